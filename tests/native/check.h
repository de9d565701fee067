/* Small test frame: CHECK names the broken claim and its place (the first ten), and a program ends non-zero if any broke. */
#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/clock.h"
#include "region/file.h"
#include "region/quota.h"
#include "region/regions.h"

#ifdef VC_COVERAGE /* else what forked children ran would not be counted */
void __gcov_dump(void);
#define _exit(status) (__gcov_dump(), _exit(status))
#endif

static int broken;

#define CHECK(claim)                                                             \
    do {                                                                         \
        if (!(claim)) {                                                          \
            if (__atomic_fetch_add(&broken, 1, __ATOMIC_RELAXED) < 10)            \
                fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #claim); \
        }                                                                        \
    } while (0)

/* A region with one card of `memory_bytes` in a fresh folder; returns the folder. */
static inline char *make_region(uint64_t memory_bytes)
{
    static char folder[256];
    const char *base = getenv("TMPDIR");
    snprintf(folder, sizeof folder, "%s/vcuda-native-XXXXXX", base && *base ? base : "/tmp");
    if (!mkdtemp(folder)) {
        perror(folder);
        exit(2);
    }
    char limits[300], usage[300];
    snprintf(limits, sizeof limits, "%s/limits", folder);
    snprintf(usage, sizeof usage, "%s/usage", folder);
    struct vc_card_limit card = {.uuid = "GPU-0", .memory_bytes = memory_bytes, .cores = 50, .core_limit = 50};
    struct vc_error error;
    if (vc_files_create(limits, usage, &card, 1, &error) != 0) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
    return folder;
}

/* The process's region in this folder, its only one. */
static inline struct vc_region *region_at(const char *folder)
{
    return vc_regions_get_at(folder)->all;
}

static inline void remove_region(const char *folder)
{
    char path[300];
    for (const char *const *name = (const char *const[]){"limits", "usage", NULL}; *name; name++) {
        snprintf(path, sizeof path, "%s/%s", folder, *name);
        unlink(path);
    }
    rmdir(folder);
}

/* Whether exactly so many dead slots can be freed, soon: whoever reads /proc/PID/maps at this moment keeps the memory of the
 * process, and with it the lock of its slot, a little longer than it lives. */
static inline bool reaped(struct vc_region *region, uint32_t wanted)
{
    uint32_t count = 0;
    for (uint64_t until = vc_now_ns() + 10000000000u; count < wanted && vc_now_ns() < until; vc_sleep_ns(100000))
        count += vc_slots_reap(region);
    return count == wanted;
}

/* Wait for a child and add what it found broken. */
static inline void join(pid_t child)
{
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif
