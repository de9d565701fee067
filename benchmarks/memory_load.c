/* A CUDA driver-API program that takes and gives back memory: what benchmarks/memory.py runs in a share.
 *
 *   memory_load load                      load libcuda.so.1 and cuInit: prints the nanoseconds
 *   memory_load cost LIVE BYTES PAIRS     with LIVE allocations, time PAIRS of alloc + free: prints the median and the 99th
 *                                         percentile in ns. Starts at a line on stdin, when it has printed "ready"
 *   memory_load stress SEED OPERATIONS [VICTIM]   random allocations by every allocator and random frees; prints a line for each
 *                                         allocator: [how many it granted, how many it refused, the CUresult if it failed otherwise]. A
 *                                         VICTIM then goes on until a second thread, which allocates too, ends both with SIGKILL in the
 *                                         middle of whatever they do
 *   memory_load kinds                     prints the allocators' names
 *   memory_load fill KIND BYTES MOST      take BYTES at a time by one allocator ("mix": by each in turn) until all refuse or MOST
 *                                         bytes were asked for; prints the CUresult of the last refusal (0: none) and what cuMemGetInfo said was
 *                                         the total at first. Holds all until a line on stdin
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "memory_kinds.h"

typedef unsigned long long pointer;
typedef void *handle;

static handle context;

static int (*cuInit)(unsigned);
static int (*cuCtxSetCurrent)(handle);
static int (*cuCtxCreate_v2)(handle *, unsigned, int);
static int (*cuMemAlloc_v2)(pointer *, size_t);
static int (*cuMemFree_v2)(pointer);
static int (*cuMemGetInfo_v2)(size_t *, size_t *);

#define MIB ((size_t)1 << 20)
enum { MOST = 96 };     /* held at a time: a few processes fill the share */
enum { FULL_SIZE = 3 }; /* the `chance` of variants that keep all they ask for, in the size asked for */

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void *load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "memory_load: %s\n", dlerror());
        exit(1);
    }
#define FIND(name) name = dlsym(library, #name)
    FIND(cuInit), FIND(cuCtxCreate_v2), FIND(cuMemAlloc_v2), FIND(cuMemFree_v2), FIND(cuCtxSetCurrent), FIND(cuMemGetInfo_v2);
    if (cuInit(0)) {
        fprintf(stderr, "memory_load: cuInit failed\n");
        exit(1);
    }
    return library;
}

/* Returns whether there was room for a context beside what others hold. */
static bool context_made(void)
{
    int result = cuCtxCreate_v2(&context, 0, 0);
    if (result && result != 2) {
        fprintf(stderr, "memory_load: cuCtxCreate: CUresult %d\n", result);
        exit(2);
    }
    return !result;
}

static void *begin(void)
{
    void *library = load();
    while (!context_made()) /* others give theirs back */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return library;
}

static int by_value(const void *a, const void *b)
{
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

static int cost(size_t live, size_t bytes, size_t pairs)
{
    pointer taken;
    uint32_t *ns = calloc(pairs, sizeof *ns);
    begin();
    for (size_t index = 0; index < live; index++) {
        if (cuMemAlloc_v2(&taken, bytes))
            return 3;
    }
    puts("ready");
    fflush(stdout);
    getchar();
    for (size_t index = 0; index < pairs; index++) {
        uint64_t start = now_ns();
        if (cuMemAlloc_v2(&taken, bytes) || cuMemFree_v2(taken))
            return 4;
        ns[index] = (uint32_t)(now_ns() - start);
    }
    qsort(ns, pairs, sizeof *ns, by_value);
    printf("[%u, %u]\n", ns[pairs / 2], ns[pairs * 99 / 100]);
    return 0;
}

static struct held held[MOST];
static atomic_bool finished; /* the victim's operations are done */

/* The victim's other thread. The SIGKILL comes some way into an operation of the first one. */
static void *churn(void *seed)
{
    pointer at;
    unsigned chance = (unsigned)(uintptr_t)seed;
    cuCtxSetCurrent(context);
    for (unsigned more = 0; more < 1 + chance % 50; more += atomic_load(&finished)) {
        if (cuMemAlloc_v2(&at, 3 * MIB) == 0)
            cuMemFree_v2(at);
    }
    for (uint64_t until = now_ns() + chance % 100000; now_ns() < until;)
        ;
    kill(getpid(), SIGKILL);
    return NULL;
}

/* One random operation: gives back what is at a random place, or takes. An allocator that fails in another way than for want of
 * memory is not asked again: a card may not have it. */
static void operate(unsigned *seed, long (*counts)[3])
{
    struct held *one = &held[rand_r(seed) % MOST];
    int kind = one->kind;
    unsigned chance = (unsigned)rand_r(seed);
    if (kind) {
        int result = give(one, chance);
        if (!result)
            return;
        fprintf(stderr, "memory_load: giving back %s: CUresult %d\n", kind_name(kind), result);
        exit(5);
    }
    kind = 1 + rand_r(seed) % KINDS;
    size_t bytes = rand_r(seed) % 4 ? 2 * MIB + rand_r(seed) % (12 * MIB) : 8192 + rand_r(seed) % MIB;
    if (counts[kind][2])
        return;
    int result = take(one, kind, bytes, chance);
    if (result != 0 && result != 2)
        counts[kind][2] = result;
    else
        counts[kind][result == 2]++;
}

static int stress(unsigned seed, long operations, int victim)
{
    static long counts[KINDS + 1][3];
    const char *missing = kinds_find(begin());
    if (missing) {
        fprintf(stderr, "memory_load: no %s in libcuda.so.1\n", missing);
        return 3;
    }
    pthread_t other;
    if (victim && pthread_create(&other, NULL, churn, (void *)(uintptr_t)seed))
        return 8;
    for (long done = 0; done < operations; done++)
        operate(&seed, counts);
    for (int kind = 1; kind <= KINDS; kind++)
        printf("\"%s\": [%ld, %ld, %ld]%s\n", kind_name(kind), counts[kind][0], counts[kind][1], counts[kind][2],
               kind < KINDS ? "," : "");
    fflush(stdout);
    atomic_store(&finished, true);
    while (victim)
        operate(&seed, counts);
    for (int index = 0; index < MOST; index++) {
        if (held[index].kind && give(&held[index], (unsigned)index))
            return 7;
    }
    return 0;
}

static int kind_called(const char *name)
{
    int kind = KINDS;
    while (kind && strcmp(kind_name(kind), name) != 0)
        kind--;
    return kind;
}

/* What is taken is never given back: one record serves for all. */
static int fill(const char *name, size_t bytes, size_t most)
{
    struct held one;
    size_t asked = 0, left = 0, total = 0;
    int kind = kind_called(name), result = 0, refused[KINDS + 1] = {0}, open = kind ? 1 : KINDS;
    if (!kind && strcmp(name, "mix") != 0)
        return 64;
    const char *missing = kinds_find(load());
    if (missing) {
        fprintf(stderr, "memory_load: no %s in libcuda.so.1\n", missing);
        return 3;
    }
    if (context_made()) {
        cuMemGetInfo_v2(&left, &total);
    } else { /* another process has all */
        result = 2;
        open = 0;
    }
    for (unsigned turn = 0; open && asked < most; turn++) {
        int now = kind ? kind : 1 + (int)(turn % KINDS);
        if (refused[now])
            continue;
        refused[now] = take(&one, now, bytes, FULL_SIZE);
        asked += kind_bytes(now, bytes);
        open -= refused[now] != 0;
        result = refused[now] ? refused[now] : result;
    }
    printf("{\"result\": %d, \"total\": %zu}\n", result, total);
    fflush(stdout);
    getchar();
    return 0;
}

int main(int count, char **words)
{
    if (count == 2 && !strcmp(words[1], "load")) {
        uint64_t start = now_ns();
        load();
        printf("%llu\n", (unsigned long long)(now_ns() - start));
        return 0;
    }
    if (count == 5 && !strcmp(words[1], "cost"))
        return cost(strtoul(words[2], NULL, 10), strtoul(words[3], NULL, 10), strtoul(words[4], NULL, 10));
    if ((count == 4 || count == 5) && !strcmp(words[1], "stress"))
        return stress((unsigned)strtoul(words[2], NULL, 10), strtol(words[3], NULL, 10), count == 5);
    if (count == 2 && !strcmp(words[1], "kinds")) {
        for (int kind = 1; kind <= KINDS; kind++)
            puts(kind_name(kind));
        return 0;
    }
    if (count == 5 && !strcmp(words[1], "fill"))
        return fill(words[2], strtoul(words[3], NULL, 10), strtoul(words[4], NULL, 10));
    fprintf(stderr, "usage: memory_load load | cost LIVE BYTES PAIRS | stress SEED OPERATIONS [VICTIM] | kinds | fill KIND BYTES MOST\n");
    return 64;
}
