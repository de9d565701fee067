/* What one call costs beside so many live objects: what benchmarks/memory_growth.py runs natively and in a share.
 *
 *   memory_growth KIND COUNT     with COUNT objects of KIND (one of `kinds`), prints the nanoseconds of the thread's
 *                                processor time that one operation takes, the least of many groups
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "vc_cuda.h"

#define CHUNK ((size_t)2 << 20)
#define TILE 64u
#define COLUMNS 128u /* tiles of a row of the sparse array */
#define GROUPS 40
#define GROUP 50

typedef void *handle;

#define FUNCTIONS(_)                                                                           \
    _(cuInit, (unsigned))                                                                      \
    _(cuCtxCreate_v2, (handle *, unsigned, int))                                               \
    _(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                  \
    _(cuMemFree_v2, (CUdeviceptr))                                                             \
    _(cuMemGetInfo_v2, (size_t *, size_t *))                                                   \
    _(cuMemAllocAsync, (CUdeviceptr *, size_t, handle))                                        \
    _(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, handle, handle))                        \
    _(cuMemFreeAsync, (CUdeviceptr, handle))                                                   \
    _(cuMemPoolCreate, (handle *, const CUmemPoolProps *))                                     \
    _(cuMemPoolDestroy, (handle))                                                              \
    _(cuIpcGetMemHandle, (CUipcMemHandle *, CUdeviceptr))                                      \
    _(cuStreamSynchronize, (handle))                                                           \
    _(cuMemCreate, (CUdeviceptr *, size_t, const CUmemAllocationProp *, unsigned long long))   \
    _(cuMemRelease, (CUdeviceptr))                                                             \
    _(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))   \
    _(cuMemMap, (CUdeviceptr, size_t, size_t, CUdeviceptr, unsigned long long))                \
    _(cuMemUnmap, (CUdeviceptr, size_t))                                                       \
    _(cuArray3DCreate_v2, (handle *, const CUDA_ARRAY3D_DESCRIPTOR_v2 *))                      \
    _(cuMemMapArrayAsync, (CUarrayMapInfo *, unsigned, handle))

#define DECLARE(name, parameters) static int(*name) parameters;
FUNCTIONS(DECLARE)

static const CUmemAllocationProp on_card = {.type = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static const CUmemPoolProps pool_on_card = {.allocType = 1, .location = {CU_MEM_LOCATION_TYPE_DEVICE, 0}};
static CUdeviceptr memory, range;
static handle array;
static unsigned count;

static void must(int result, const char *what)
{
    if (!result)
        return;
    fprintf(stderr, "memory_growth: %s: CUresult %d\n", what, result);
    exit(2);
}
#define MUST(call) must(call, #call)

static void plain_live(unsigned index)
{
    CUdeviceptr at;
    (void)index;
    MUST(cuMemAlloc_v2(&at, 4096));
}

static void plain(void)
{
    CUdeviceptr at;
    MUST(cuMemAlloc_v2(&at, 4096));
    MUST(cuMemFree_v2(at));
}

static void info(void)
{
    size_t free_bytes, total;
    MUST(cuMemGetInfo_v2(&free_bytes, &total));
}

static void async_live(unsigned index)
{
    CUdeviceptr at;
    (void)index;
    MUST(cuMemAllocAsync(&at, 4096, NULL));
}

static void async(void)
{
    CUdeviceptr at;
    MUST(cuMemAllocAsync(&at, 4096, NULL));
    MUST(cuMemFreeAsync(at, NULL));
}

static void pool_live(unsigned index)
{
    handle pool;
    CUdeviceptr at;
    (void)index;
    MUST(cuMemPoolCreate(&pool, &pool_on_card));
    MUST(cuMemAllocFromPoolAsync(&at, 4096, pool, NULL));
}

static void synchronised(void)
{
    async();
    MUST(cuStreamSynchronize(NULL));
}

static void pool(void)
{
    handle made;
    MUST(cuMemPoolCreate(&made, &pool_on_card));
    MUST(cuMemPoolDestroy(made));
}

static void export_live(unsigned index)
{
    CUdeviceptr at;
    CUipcMemHandle exported;
    (void)index;
    MUST(cuMemAlloc_v2(&at, CHUNK));
    MUST(cuIpcGetMemHandle(&exported, at));
}

static void export(void)
{
    CUdeviceptr at;
    CUipcMemHandle exported;
    MUST(cuMemAlloc_v2(&at, CHUNK));
    MUST(cuIpcGetMemHandle(&exported, at));
    MUST(cuMemFree_v2(at));
}

static void handle_live(unsigned index)
{
    CUdeviceptr made;
    (void)index;
    MUST(cuMemCreate(&made, CHUNK, &on_card, 0));
}

static void physical(void)
{
    CUdeviceptr made;
    MUST(cuMemCreate(&made, CHUNK, &on_card, 0));
    MUST(cuMemRelease(made));
}

static void map_live(unsigned index)
{
    if (!index) {
        MUST(cuMemCreate(&memory, CHUNK, &on_card, 0));
        MUST(cuMemAddressReserve(&range, (count + 1) * CHUNK, 0, 0, 0));
    }
    MUST(cuMemMap(range + index * CHUNK, CHUNK, 0, memory, 0));
}

static void map(void)
{
    MUST(cuMemMap(range + count * CHUNK, CHUNK, 0, memory, 0));
    MUST(cuMemUnmap(range + count * CHUNK, CHUNK));
}

static void tile(unsigned index, CUdeviceptr of, unsigned tall)
{
    CUarrayMapInfo one = {.deviceBitMask = 1};
    one.memOperationType = of ? CU_MEM_OPERATION_TYPE_MAP : CU_MEM_OPERATION_TYPE_UNMAP;
    one.resource.array = array;
    one.subresource.sparseLevel.offsetX = TILE * (index % COLUMNS);
    one.subresource.sparseLevel.offsetY = TILE * (index / COLUMNS);
    one.subresource.sparseLevel.extentWidth = TILE;
    one.subresource.sparseLevel.extentHeight = TILE * tall;
    one.subresource.sparseLevel.extentDepth = 1;
    one.memHandle.memHandle = of;
    MUST(cuMemMapArrayAsync(&one, 1, NULL));
}

static void tile_live(unsigned index)
{
    const CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Format = 0x20, .NumChannels = 1, .Flags = CUDA_ARRAY3D_SPARSE,
                                              .Width = TILE * COLUMNS, .Height = (size_t)TILE * (count / COLUMNS + 4)};
    if (!index) {
        MUST(cuMemCreate(&memory, CHUNK, &on_card, 0));
        MUST(cuArray3DCreate_v2(&array, &shape));
    }
    tile(index, memory, 1);
}

/* As an array's last row is, whose size no tile divides. */
static void uneven_live(unsigned index)
{
    tile_live(index);
    if (!index)
        tile(count + COLUMNS, memory, 2);
}

static void tiles(void)
{
    tile(count, memory, 1);
    tile(count, 0, 1);
}

static const struct kind {
    const char *name;
    void (*live)(unsigned index);
    void (*operation)(void);
} kinds[] = {
    {"plain", plain_live, plain},         {"info", plain_live, info},      {"async", async_live, async},
    {"synchronised", async_live, synchronised}, {"pools-plain", pool_live, plain}, {"pools-async", pool_live, async},
    {"pools-synchronised", pool_live, synchronised}, {"pools", pool_live, pool}, {"handles", handle_live, physical},
    {"ipc", export_live, export},
    {"maps", map_live, map},              {"tiles", tile_live, tiles},     {"uneven-tiles", uneven_live, tiles},
};

static double processor_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return (double)now.tv_sec * 1e9 + (double)now.tv_nsec;
}

int main(int words, char **word)
{
    const struct kind *kind = kinds, *end = kinds + sizeof kinds / sizeof *kinds;
    while (words == 3 && kind < end && strcmp(kind->name, word[1]))
        kind++;
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (words != 3 || kind == end || !library) {
        fprintf(stderr, "usage: memory_growth KIND COUNT, with a libcuda.so.1 in reach\n");
        return 64;
    }
#define FIND(name, parameters)                        \
    if (!(name = dlsym(library, #name))) {            \
        fprintf(stderr, "memory_growth: no %s\n", #name); \
        return 2;                                     \
    }
    FUNCTIONS(FIND)
    MUST(cuInit(0));
    MUST(cuCtxCreate_v2(&context, 0, 0));
    count = (unsigned)strtoul(word[2], NULL, 10);
    for (unsigned index = 0; index < count; index++)
        kind->live(index);
    MUST(cuStreamSynchronize(NULL));
    double least = 1e18;
    for (int group = 0; group < GROUPS; group++) {
        double begun = processor_ns();
        for (int each = 0; each < GROUP; each++)
            kind->operation();
        double taken = (processor_ns() - begun) / GROUP;
        least = taken < least ? taken : least;
    }
    printf("%.0f\n", least);
    return 0;
}
