/* Finding and opening the regions of this process, once, and again in a forked child.
 *
 * In `/etc/vcuda`, else in `$ORIGIN/../vcuda` of this library: the region that lies there itself, then one in each folder below `claims`, in
 * the order of their names. A card belongs to the first that names it. But a folder that something is mounted on comes before all that
 * nothing is: a container's root can make folders there, by whatever name, and can't mount. */
#include "region/regions.h"

#include <dirent.h>
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
#include <sys/syscall.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/fork.h"
#include "base/log.h"

#define VC__SYSTEM_DIRECTORY "/etc/vcuda"
#ifndef STATX_ATTR_MOUNT_ROOT
#define STATX_ATTR_MOUNT_ROOT 0x2000 /* Linux 5.8 */
#endif

static struct vc_regions_page first_page;
struct vc_regions_page *vc__regions_page = &first_page;
static const struct vc_card_limit no_limit = {.cores = 100, .core_limit = 100, .flags = VC_CARD_WHOLE};
static const char TOO_MANY[] = "a process can use 31 GPUs; give the container fewer";
static struct vc_regions the_regions;
static bool opened; /* `the_regions` was filled in, here or in the process that we were forked from */

/* --- finding --- */

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

/* Whether something is mounted on a folder. A link is none, wherever it leads. */
static bool is_mounted(const char *folder)
{
    struct statx told;
    struct stat own, above;
    char parent[VC_PATH_BYTES + NAME_MAX + 48];
    if (syscall(SYS_statx, AT_FDCWD, folder, AT_SYMLINK_NOFOLLOW, 0, &told) == 0 && (told.stx_attributes_mask & STATX_ATTR_MOUNT_ROOT))
        return told.stx_attributes & STATX_ATTR_MOUNT_ROOT;
    /* An older kernel shows only mounts of other file systems. */
    snprintf(parent, sizeof parent, "%s/..", folder);
    return lstat(folder, &own) == 0 && S_ISDIR(own.st_mode) && lstat(parent, &above) == 0 && own.st_dev != above.st_dev;
}

static void lose(struct vc_regions *regions, const char *what, const char *why)
{
    regions->any = regions->lost = true;
    vc_log_once(VC_NOTICE_DAMAGED, "cannot use %s: %s; memory of the GPUs that it gives is refused", what, why);
}

static int folder_length(const struct vc_region *region)
{
    return (int)(strrchr(region->file.path, '/') - region->file.path);
}

/* The region's cards that no earlier one has; returns how many. */
static uint32_t add_cards(struct vc_regions *regions, struct vc_region *region)
{
    uint32_t before = regions->card_count;
    for (uint32_t index = 0; index < region->card_count; index++) {
        const char *uuid = region->limits->cards[index].uuid;
        int known = vc_regions_card(regions, uuid);
        if (known >= 0) {
            const struct vc_region *first = regions->cards[known].region;
            vc_log_once(VC_NOTICE_TWICE, "two shares name GPU %.47s: %.*s counts, %.*s does not; give the container one share of each GPU", uuid,
                        folder_length(first), first->file.path, folder_length(region), region->file.path);
        } else if (regions->card_count == VC_MAX_PROCESS_CARDS) {
            lose(regions, uuid, TOO_MANY);
        } else {
            regions->cards[regions->card_count++] =
                (struct vc_card){region, index, &region->limits->cards[index], &region->usage->cards[index]};
        }
    }
    return regions->card_count - before;
}

static void add_region(struct vc_regions *regions, const char *folder)
{
    struct vc_region *region = &regions->all[regions->count];
    regions->any = true;
    if (regions->count == VC_MAX_PROCESS_CARDS) {
        lose(regions, folder, TOO_MANY);
        return;
    }
    vc_region_open(region, folder);
    if (region->state == VC_REGION_DAMAGED)
        regions->lost = true;
    else if (add_cards(regions, region) > 0)
        regions->count++;
    else
        vc_region_close(region);
}

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

/* What lies in a folder and below its `claims`. */
static void add_below(struct vc_regions *regions, const char *directory)
{
    char claims[VC_PATH_BYTES + 16], folder[VC_PATH_BYTES + NAME_MAX + 32];
    struct dirent **names = NULL;
    struct stat status;
    snprintf(claims, sizeof claims, "%s/claims", directory);
    int count = scandir(claims, &names, is_visible, by_name);
    if (count < 0 && errno != ENOENT && errno != ENOTDIR)
        lose(regions, claims, strerror(errno));
    bool link = lstat(claims, &status) == 0 && S_ISLNK(status.st_mode); /* to a folder that has mounts of its own */
    for (int mounted = 1; mounted >= 0; mounted--) {
        if (vc_region_is_at(directory) && is_mounted(directory) == mounted)
            add_region(regions, directory);
        for (int at = 0; at < count; at++) {
            snprintf(folder, sizeof folder, "%s/%s", claims, names[at]->d_name);
            if (vc_region_is_at(folder) && (!link && is_mounted(folder)) == mounted)
                add_region(regions, folder);
        }
    }
    for (int at = 0; at < count; at++)
        free(names[at]);
    free(names);
}

static void find_all(struct vc_regions *regions)
{
    char origin[VC_PATH_BYTES];
    add_below(regions, VC__SYSTEM_DIRECTORY);
    if (regions->any)
        return;
    bool has_origin = origin_directory(origin, sizeof origin);
    if (has_origin)
        add_below(regions, origin);
    if (!regions->any)
        vc_log_once(VC_NOTICE_ABSENT, "no share is configured (no limits in " VC__SYSTEM_DIRECTORY " nor in %s): nothing is limited here",
                    has_origin ? origin : "the directory beside this library");
}

int vc_regions_card(const struct vc_regions *regions, const char *uuid)
{
    for (uint32_t card = 0; card < regions->card_count; card++) {
        if (strncasecmp(regions->cards[card].limit->uuid, uuid, VC_UUID_BYTES) == 0)
            return (int)card;
    }
    return -1;
}

/* --- once in a process --- */

static void map_fork_page(void)
{
    if (vc__regions_page != &first_page)
        return;
    struct vc_regions_page *page = mmap(NULL, (size_t)sysconf(_SC_PAGESIZE), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return;
    if (madvise(page, sizeof *page, MADV_WIPEONFORK) != 0) { /* before Linux 4.14: see child_after_fork */
        munmap(page, sizeof *page);
        return;
    }
    page->lock = (uint32_t)getpid(); /* our caller holds the lock of the first page */
    vc_store_release(&vc__regions_page, page);
}

static void forget_parent(void)
{
    for (uint32_t index = 0; index < the_regions.count; index++)
        vc_region_forget(&the_regions.all[index]);
    vc_fork_forget();
}

/* At once, or the modules' memory of the parent would be used. A child made without fork(3) comes here when it first looks
 * for its regions. */
static void child_after_fork(void)
{
    struct vc_regions_page *page = vc__regions_page;
    if (page == &first_page) { /* this kernel wipes nothing: what a child made without fork(3) does is undefined there */
        vc_store_relaxed(&page->only, NULL);
        vc_store_relaxed(&page->lock, 0);
        vc_store_release(&page->regions, NULL);
    }
    if (opened && vc_load_acquire(&vc__regions_page->regions) == NULL) {
        forget_parent();
        opened = false;
    }
}

/* Only threads of this process hold it: another process's PID was copied by fork while one of its threads was here. */
static void lock_page(struct vc_regions_page *page)
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

static const struct vc_card_limit *only_limit(void)
{
    if (the_regions.lost) /* whose work is refused */
        return NULL;
    return the_regions.card_count == 0 ? &no_limit : the_regions.card_count == 1 ? the_regions.cards[0].limit : NULL;
}

static struct vc_regions *open_once(const char *directory)
{
    struct vc_regions_page *page = vc_load_acquire(&vc__regions_page);
    lock_page(page);
    /* The first caller of all moves the lock to a page of its own; who waited on the first page follows it there. */
    if (page != vc_load_acquire(&vc__regions_page)) {
        vc_store_release(&page->lock, 0);
        return open_once(directory);
    }
    if (!page->regions) {
        struct vc_regions_page *initial = page;
        static bool watching_forks;
        if (opened)
            forget_parent();
        if (!watching_forks)
            watching_forks = pthread_atfork(NULL, NULL, child_after_fork) == 0;
        map_fork_page();
        page = vc__regions_page;
        memset(&the_regions, 0, sizeof the_regions);
        if (directory)
            add_below(&the_regions, directory);
        else
            find_all(&the_regions);
        opened = true;
        vc_store_release(&page->only, only_limit());
        vc_store_release(&page->regions, &the_regions);
        if (page != initial)
            vc_store_release(&initial->lock, 0);
    }
    vc_store_release(&page->lock, 0);
    return page->regions;
}

struct vc_regions *vc__regions_open(void)
{
    return open_once(NULL);
}

struct vc_regions *vc_regions_get_at(const char *directory)
{
    return open_once(directory);
}
