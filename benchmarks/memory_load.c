/* A CUDA driver-API program that takes and gives back memory: what benchmarks/memory.py runs in a share.
 *
 *   memory_load load                      load libcuda.so.1 and cuInit: prints the nanoseconds
 *   memory_load cost LIVE BYTES PAIRS     with LIVE allocations, time PAIRS of alloc + free: prints the median and the 99th
 *                                         percentile in ns. Starts at a line on stdin, when it has printed "ready"
 *   memory_load stress SEED OPERATIONS [VICTIM]   random allocations by every allocator and random frees; prints how many of the
 *                                         operations were granted, and refused. A VICTIM kills itself with SIGKILL when it has done
 *                                         them, in whatever state a second thread, which goes on, finds itself
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long pointer;
typedef void *handle;

struct pool_or_memory { /* CUmemAllocationProp */
    int type, handles, location, id;
    void *pointer;
    unsigned char flags[8];
};
struct shape { /* CUDA_ARRAY_DESCRIPTOR */
    size_t width, height;
    int format;
    unsigned channels;
};

static handle context;

static int (*cuInit)(unsigned);
static int (*cuCtxSetCurrent)(handle);
static int (*cuCtxCreate_v2)(handle *, unsigned, int);
static int (*cuMemAlloc_v2)(pointer *, size_t);
static int (*cuMemAllocManaged)(pointer *, size_t, unsigned);
static int (*cuMemAllocPitch_v2)(pointer *, size_t *, size_t, size_t, unsigned);
static int (*cuMemAllocAsync)(pointer *, size_t, handle);
static int (*cuMemFreeAsync)(pointer, handle);
static int (*cuMemFree_v2)(pointer);
static int (*cuMemCreate)(pointer *, size_t, const struct pool_or_memory *, unsigned long long);
static int (*cuMemRelease)(pointer);
static int (*cuArrayCreate_v2)(handle *, const struct shape *);
static int (*cuArrayDestroy)(handle);

#define MIB ((size_t)1 << 20)
enum { KINDS = 6, MOST = 64 };

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void load(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "memory_load: %s\n", dlerror());
        exit(1);
    }
#define FIND(name) name = dlsym(library, #name)
    FIND(cuInit), FIND(cuCtxCreate_v2), FIND(cuMemAlloc_v2), FIND(cuMemAllocManaged), FIND(cuMemAllocPitch_v2);
    FIND(cuMemAllocAsync), FIND(cuMemFreeAsync), FIND(cuMemFree_v2), FIND(cuMemCreate), FIND(cuMemRelease);
    FIND(cuArrayCreate_v2), FIND(cuArrayDestroy), FIND(cuCtxSetCurrent);
    if (cuInit(0)) {
        fprintf(stderr, "memory_load: cuInit failed\n");
        exit(1);
    }
}

static void begin(void)
{
    load();
    int result;
    while ((result = cuCtxCreate_v2(&context, 0, 0)) == 2) /* no room beside what the others hold now */
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    if (result) {
        fprintf(stderr, "memory_load: cuCtxCreate: CUresult %d\n", result);
        exit(2);
    }
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

static struct held {
    int kind; /* 0: nothing */
    pointer at;
} held[MOST];

static int take(int kind, size_t bytes, pointer *at)
{
    struct pool_or_memory memory = {.type = 1, .location = 1};
    struct shape shape = {.width = 1024, .height = bytes / 4096, .format = 0x20, .channels = 1};
    size_t pitch;
    switch (kind) {
    case 1: return cuMemAlloc_v2(at, bytes);
    case 2: return cuMemAllocManaged(at, bytes, 1);
    case 3: return cuMemAllocPitch_v2(at, &pitch, 4000, bytes / 4096, 4);
    case 4: return cuMemAllocAsync(at, bytes, NULL);
    case 5: return cuMemCreate(at, (bytes + 2 * MIB - 1) / (2 * MIB) * (2 * MIB), &memory, 0);
    default: return cuArrayCreate_v2((handle *)at, &shape);
    }
}

static int give(const struct held *one)
{
    switch (one->kind) {
    case 4: return cuMemFreeAsync(one->at, NULL);
    case 5: return cuMemRelease(one->at);
    case 6: return cuArrayDestroy((handle)one->at);
    default: return cuMemFree_v2(one->at);
    }
}

/* The victim's other thread: always somewhere inside an allocation or a free when the SIGKILL comes. */
static void *churn(void *unused)
{
    pointer at;
    while (cuCtxSetCurrent(context) == 0) {
        if (cuMemAlloc_v2(&at, 3 * MIB) == 0)
            cuMemFree_v2(at);
    }
    return unused;
}

static int stress(unsigned seed, long operations, int victim)
{
    long granted = 0, refused = 0;
    begin();
    pthread_t other;
    if (victim && pthread_create(&other, NULL, churn, NULL))
        return 8;
    for (long done = 0; done < operations; done++) {
        struct held *one = &held[rand_r(&seed) % MOST];
        if (one->kind) {
            if (give(one))
                return 5;
            one->kind = 0;
            continue;
        }
        int kind = 1 + rand_r(&seed) % KINDS;
        size_t bytes = rand_r(&seed) % 4 ? 2 * MIB + rand_r(&seed) % (12 * MIB) : 8192 + rand_r(&seed) % MIB;
        int result = take(kind, bytes, &one->at);
        if (result != 0 && result != 2) {
            fprintf(stderr, "memory_load: allocator %d: CUresult %d\n", kind, result);
            return 6;
        }
        one->kind = result ? 0 : kind;
        granted += !result;
        refused += result == 2;
    }
    if (victim)
        kill(getpid(), SIGKILL);
    for (int index = 0; index < MOST; index++) {
        if (held[index].kind && give(&held[index]))
            return 7;
    }
    printf("[%ld, %ld]\n", granted, refused);
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
    fprintf(stderr, "usage: memory_load load | cost LIVE BYTES PAIRS | stress SEED OPERATIONS [VICTIM]\n");
    return 64;
}
