/* Small test frame: CHECK names the broken claim and its place, and a program ends non-zero if any broke. */
#ifndef TEST_CHECK_H
#define TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "vc_file.h"
#include "vc_quota.h"

static int broken;

#define CHECK(claim)                                                             \
    do {                                                                         \
        if (!(claim)) {                                                          \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #claim); \
            __atomic_fetch_add(&broken, 1, __ATOMIC_RELAXED);                     \
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

static inline void remove_region(const char *folder)
{
    char path[300];
    for (const char *const *name = (const char *const[]){"limits", "usage", NULL}; *name; name++) {
        snprintf(path, sizeof path, "%s/%s", folder, *name);
        unlink(path);
    }
    rmdir(folder);
}

/* Wait for a child and add what it found broken. */
static inline void join(pid_t child)
{
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

#endif
