/* Finding and mapping the region of this process, once, and again in a forked child. */
#include "region/region.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fork.h"
#include "region/descriptor.h"
#include "region/file.h"
#include "base/log.h"

#define VC__SYSTEM_DIRECTORY "/etc/vcuda"

static struct vc_region_page first_page;
struct vc_region_page *vc__region_page = &first_page;
static const struct vc_card_limit no_limit = {.cores = 100, .core_limit = 100, .flags = VC_CARD_WHOLE};
static struct vc_region the_region;
static bool opened; /* `the_region` was filled in, here or in the process that we were forked from */

static void map_fork_page(void)
{
    if (vc__region_page != &first_page)
        return;
    struct vc_region_page *page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return;
    if (madvise(page, sizeof *page, MADV_WIPEONFORK) != 0) { /* before Linux 4.14: see child_after_fork */
        munmap(page, sizeof *page);
        return;
    }
    page->lock = (uint32_t)getpid(); /* our caller holds the lock of the first page */
    vc_store_release(&vc__region_page, page);
}

/* The directory of `$ORIGIN/../vcuda` of the library that holds this function. */
static bool origin_directory(char *directory, size_t bytes)
{
    Dl_info info;
    char file[PATH_MAX] = "";
    if (dladdr((void *)&origin_directory, &info) && info.dli_fname)
        snprintf(file, sizeof file, "%s", info.dli_fname);
    if (file[0] != '/') {
        /* Found through a relative library path, and the process may have changed its directory since. */
        file[0] = '\0';
        FILE *maps = fopen("/proc/self/maps", "re");
        char line[PATH_MAX + 128];
        while (maps && fgets(line, sizeof line, maps)) {
            unsigned long start, end;
            char *path = strchr(line, '/');
            if (path && sscanf(line, "%lx-%lx", &start, &end) == 2 && (unsigned long)&origin_directory >= start &&
                (unsigned long)&origin_directory < end) {
                snprintf(file, sizeof file, "%.*s", (int)strcspn(path, "\n"), path);
                break;
            }
        }
        if (maps)
            fclose(maps);
    }
    char *slash = strrchr(file, '/');
    if (!slash)
        return false;
    *slash = '\0';
    return snprintf(directory, bytes, "%s/../vcuda", file) < (int)bytes;
}

static bool is_configured(const char *directory)
{
    char path[VC_PATH_BYTES];
    struct stat status;
    static const char *const names[] = {"limits", "usage"};
    for (size_t i = 0; i < 2; i++) {
        snprintf(path, sizeof path, "%s/%s", directory, names[i]);
        if (lstat(path, &status) == 0 || (errno != ENOENT && errno != ENOTDIR))
            return true;
    }
    return false;
}

/* Map `bytes` of a checked file so that a forked child does not inherit the mapping, and with it the slot's lock. */
static void *map_file(int descriptor, size_t bytes, int protection)
{
    void *mapping = mmap(NULL, bytes, protection, MAP_SHARED, descriptor, 0);
    if (mapping == MAP_FAILED)
        return NULL;
    madvise(mapping, bytes, MADV_DONTFORK);
    return mapping;
}

static bool open_limits(struct vc_region *region, const char *directory, uint64_t *instance, struct vc_error *error)
{
    char path[VC_PATH_BYTES];
    snprintf(path, sizeof path, "%s/limits", directory);
    struct vc_header header;
    int descriptor = vc_file_open(path, VC_KIND_LIMITS, O_RDONLY, &header, error);
    if (descriptor < 0)
        return false;
    struct vc_limits *limits = map_file(descriptor, VC_LIMITS_FILE_BYTES, PROT_READ);
    close(descriptor);
    if (!limits) {
        vc_fail(error, "cannot map %s: %s", path, strerror(errno));
        return false;
    }
    struct vc_error reason;
    if (!vc_limits_valid(limits, &reason)) {
        vc_fail(error, "cannot use %s: %.200s", path, reason.text);
        munmap(limits, VC_LIMITS_FILE_BYTES);
        return false;
    }
    *instance = header.instance;
    region->limits = limits;
    region->card_count = limits->card_count;
    return true;
}

/* `instance` 0: any, for a region whose limits can't be read. */
static bool open_usage(struct vc_region *region, const char *directory, uint64_t instance, struct vc_error *error)
{
    snprintf(region->file.path, sizeof region->file.path, "%s/usage", directory);
    struct vc_header header;
    int descriptor = vc_file_open(region->file.path, VC_KIND_USAGE, O_RDWR, &header, error);
    if (descriptor < 0)
        return false;
    struct stat status;
    if (instance != 0 && header.instance != instance) {
        vc_fail(error, "cannot use %s: it belongs to another container's limits", region->file.path);
        close(descriptor);
        return false;
    }
    if (region->limits && region->limits->usage_inode != 0 &&
        (fstat(descriptor, &status) != 0 || status.st_ino != region->limits->usage_inode)) {
        vc_fail(error, "cannot use %s: it was replaced; start the container again", region->file.path);
        close(descriptor);
        return false;
    }
    struct vc_usage *usage = map_file(descriptor, VC_USAGE_FILE_BYTES, PROT_READ | PROT_WRITE);
    if (!usage || fstat(descriptor, &status) != 0) {
        vc_fail(error, "cannot map %s: %s", region->file.path, strerror(errno));
        close(descriptor);
        return false;
    }
    region->usage = usage;
    region->file.descriptor = vc_descriptor_move_high(descriptor);
    region->file.device = status.st_dev;
    region->file.inode = status.st_ino;
    return true;
}

/* Count GPU time by ourselves in private memory: the same code, with one slot that nobody else sees. Memory is refused: processes
 * that count alone would get the limit each. */
static bool count_time_alone(struct vc_region *region)
{
    void *memory = mmap(NULL, VC_USAGE_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return false;
    madvise(memory, VC_USAGE_FILE_BYTES, MADV_DONTFORK);
    region->usage = memory;
    region->usage->slot_high_water = 1;
    region->slot = &region->usage->slots[0];
    region->slot->state = VC_SLOT_CLAIMED;
    region->slot->pid = getpid();
    return true;
}

static void open_directory(struct vc_region *region, const char *directory)
{
    struct vc_error error;
    uint64_t instance = 0;
    if (!open_limits(region, directory, &instance, &error)) {
        region->state = VC_REGION_DAMAGED;
        vc_log_once(VC_NOTICE_DAMAGED, "%s; GPU memory is refused until the container is started with readable limits", error.text);
        if (open_usage(region, directory, 0, &error)) {
            vc_add(&region->usage->limits_unreadable, 1);
            munmap(region->usage, VC_USAGE_FILE_BYTES);
            close(region->file.descriptor);
        }
        region->usage = NULL;
        region->file.descriptor = -1;
        return;
    }
    if (open_usage(region, directory, instance, &error)) {
        region->state = VC_REGION_ENFORCED;
        return;
    }
    region->state = count_time_alone(region) ? VC_REGION_UNCOUNTED : VC_REGION_DAMAGED;
    vc_log_once(VC_NOTICE_UNCOUNTED, "%s; GPU memory is refused to this process, and it borrows no idle GPU time", error.text);
}

static void find_region(struct vc_region *region)
{
    char origin[VC_PATH_BYTES];
    if (is_configured(VC__SYSTEM_DIRECTORY)) {
        open_directory(region, VC__SYSTEM_DIRECTORY);
        return;
    }
    bool has_origin = origin_directory(origin, sizeof origin);
    if (has_origin && is_configured(origin)) {
        open_directory(region, origin);
        return;
    }
    region->state = VC_REGION_ABSENT;
    vc_log_once(VC_NOTICE_ABSENT, "no share is configured (no limits in " VC__SYSTEM_DIRECTORY " nor in %s): nothing is limited here",
                has_origin ? origin : "the directory beside this library");
}

/* In a forked child: what we have belongs to the parent. The mappings are not ours (MADV_DONTFORK). The descriptor shares the
 * parent's lock: it stays open, as the card's files do, so that the parent's memory counts as long as we keep it on the
 * card. A parent without a slot had none there; then it goes, by close, never by unlocking. */
static void forget_parent(void)
{
    if (!the_region.slot && vc_descriptor_is_usage(&the_region.file, the_region.file.descriptor))
        close(the_region.file.descriptor);
    vc_fork_forget();
}

/* At once, or the modules' memory of the parent would be used. A child made without fork(3) comes here when it first looks
 * for its region. */
static void child_after_fork(void)
{
    struct vc_region_page *page = vc__region_page;
    if (page == &first_page) { /* this kernel wipes nothing: what a child made without fork(3) does is undefined there */
        vc_store_relaxed(&page->only, NULL);
        vc_store_relaxed(&page->lock, 0);
        vc_store_release(&page->region, NULL);
    }
    if (opened && vc_load_acquire(&vc__region_page->region) == NULL) {
        forget_parent();
        opened = false;
    }
}

/* Only threads of this process hold it: another process's PID was copied by fork while one of its threads was here. */
static void lock_page(struct vc_region_page *page)
{
    uint32_t own = (uint32_t)getpid();
    for (;;) {
        uint32_t holder = vc_load_relaxed(&page->lock);
        if (holder == own)
            vc_sleep_ns(50000);
        else if (__atomic_compare_exchange_n(&page->lock, &holder, own, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return;
    }
}

static struct vc_region *open_once(const char *directory)
{
    struct vc_region_page *page = vc_load_acquire(&vc__region_page);
    lock_page(page);
    /* The first caller of all moves the lock to a page of its own; who waited on the first page follows it there. */
    if (page != vc_load_acquire(&vc__region_page)) {
        vc_store_release(&page->lock, 0);
        return open_once(directory);
    }
    if (!page->region) {
        struct vc_region_page *initial = page;
        static bool watching_forks;
        if (opened)
            forget_parent();
        if (!watching_forks)
            watching_forks = pthread_atfork(NULL, NULL, child_after_fork) == 0;
        map_fork_page();
        page = vc__region_page;
        memset(&the_region, 0, sizeof the_region);
        pthread_mutex_init(&the_region.slow_mutex, NULL);
        pthread_mutex_init(&the_region.witness.mutex, NULL);
        the_region.file.descriptor = the_region.witness.descriptor = -1;
        if (directory)
            open_directory(&the_region, directory);
        else
            find_region(&the_region);
        opened = true;
        vc_store_release(&page->only, the_region.card_count == 0   ? &no_limit
                                      : the_region.card_count == 1 ? &the_region.limits->cards[0]
                                                                   : NULL);
        vc_store_release(&page->region, &the_region);
        if (page != initial)
            vc_store_release(&initial->lock, 0);
    }
    vc_store_release(&page->lock, 0);
    return page->region;
}

struct vc_region *vc__region_open(void)
{
    return open_once(NULL);
}

struct vc_region *vc_region_get_at(const char *directory)
{
    return open_once(directory);
}

int vc_region_card(const struct vc_region *region, const char *uuid)
{
    for (uint32_t card = 0; card < region->card_count; card++) {
        if (strncasecmp(region->limits->cards[card].uuid, uuid, VC_UUID_BYTES) == 0)
            return (int)card;
    }
    return -1;
}

bool vc_limits_read(const struct vc_limits *limits, uint32_t card, struct vc_card_view *view)
{
    const struct vc_card_limit *limit = &limits->cards[card];
    uint64_t deadline = 0;
    for (;;) {
        uint64_t before = vc_load_acquire(&limits->sequence);
        view->memory_bytes = vc_load_acquire(&limit->memory_bytes);
        view->overhead_bytes = vc_load_acquire(&limit->overhead_bytes);
        view->context_bytes = vc_load_acquire(&limit->context_bytes);
        view->physical_bytes = vc_load_acquire(&limit->physical_bytes);
        view->cores = vc_load_acquire(&limit->cores);
        view->core_limit = vc_load_acquire(&limit->core_limit);
        view->flags = vc_load_acquire(&limit->flags);
        view->priority = vc_load_acquire(&limit->priority);
        /* Acquire loads above: the sequence is read again after them. */
        if (before % 2 == 0 && vc_load_relaxed(&limits->sequence) == before)
            return true;
        uint64_t now = vc_now_ns();
        if (deadline == 0)
            deadline = now + 1000000;
        else if (now > deadline)
            return false;
        vc_cpu_relax();
    }
}
