/* Opening, mapping and reading one region. */
#include "region/region.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "region/descriptor.h"
#include "region/file.h"

bool vc_region_is_at(const char *directory)
{
    char path[VC_PATH_BYTES];
    struct stat status;
    static const char *const names[] = {"limits", "usage"};
    for (size_t i = 0; i < 2; i++) {
        bool whole = snprintf(path, sizeof path, "%s/%s", directory, names[i]) < (int)sizeof path;
        if (!whole || lstat(path, &status) == 0 || (errno != ENOENT && errno != ENOTDIR))
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

void vc_region_open(struct vc_region *region, const char *directory)
{
    memset(region, 0, sizeof *region);
    pthread_mutex_init(&region->slow_mutex, NULL);
    pthread_mutex_init(&region->witness.mutex, NULL);
    pthread_mutex_init(&region->charged.mutex, NULL);
    region->file.descriptor = region->witness.descriptor = region->charged.descriptor = -1;
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

void vc_region_close(struct vc_region *region)
{
    if (region->limits)
        munmap((void *)(uintptr_t)region->limits, VC_LIMITS_FILE_BYTES);
    if (region->usage)
        munmap(region->usage, VC_USAGE_FILE_BYTES);
    if (region->file.descriptor >= 0)
        close(region->file.descriptor);
}

void vc_region_forget(const struct vc_region *region)
{
    if (!region->slot && vc_descriptor_is_usage(&region->file, region->file.descriptor))
        close(region->file.descriptor);
    if (vc_descriptor_is_usage(&region->file, region->charged.descriptor))
        close(region->charged.descriptor);
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
