/* The allocators of the stress run: what each takes, in which order it gives back. Where several calls make one, a refusal undoes them. */
#define _GNU_SOURCE
#include "memory_kinds.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "vc_cuda.h"

#define CHUNK ((size_t)2 << 20)
#define PARTS 3
#define POSIX_FD 1 /* the kind of handle: of exported and of external memory */

typedef void *handle;

struct multicast { /* CUmulticastObjectProp */
    unsigned devices;
    size_t bytes;
    unsigned long long types, flags;
};

#define FUNCTIONS(_)                                                                                                            \
    _(cuMemAlloc_v2, (CUdeviceptr *, size_t))                                                                                   \
    _(cuMemAllocManaged, (CUdeviceptr *, size_t, unsigned))                                                                     \
    _(cuMemAllocPitch_v2, (CUdeviceptr *, size_t *, size_t, size_t, unsigned))                                                  \
    _(cuMemFree_v2, (CUdeviceptr))                                                                                              \
    _(cuMemAllocAsync, (CUdeviceptr *, size_t, handle))                                                                         \
    _(cuMemAllocFromPoolAsync, (CUdeviceptr *, size_t, handle, handle))                                                         \
    _(cuMemFreeAsync, (CUdeviceptr, handle))                                                                                    \
    _(cuMemPoolCreate, (handle *, const CUmemPoolProps *))                                                                      \
    _(cuMemPoolTrimTo, (handle, size_t))                                                                                        \
    _(cuMemPoolDestroy, (handle))                                                                                               \
    _(cuStreamSynchronize, (handle))                                                                                            \
    _(cuMemCreate, (CUdeviceptr *, size_t, const CUmemAllocationProp *, unsigned long long))                                    \
    _(cuMemRelease, (CUdeviceptr))                                                                                              \
    _(cuMemExportToShareableHandle, (int *, CUdeviceptr, int, unsigned long long))                                              \
    _(cuImportExternalMemory, (handle *, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *))                                             \
    _(cuDestroyExternalMemory, (handle))                                                                                        \
    _(cuMemAddressReserve, (CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long))                                    \
    _(cuMemAddressFree, (CUdeviceptr, size_t))                                                                                  \
    _(cuMemMap, (CUdeviceptr, size_t, size_t, CUdeviceptr, unsigned long long))                                                 \
    _(cuMemUnmap, (CUdeviceptr, size_t))                                                                                        \
    _(cuMulticastCreate, (CUdeviceptr *, const struct multicast *))                                                             \
    _(cuMulticastAddDevice, (CUdeviceptr, int))                                                                                 \
    _(cuMulticastBindMem, (CUdeviceptr, size_t, CUdeviceptr, size_t, size_t, unsigned long long))                               \
    _(cuMulticastUnbind, (CUdeviceptr, int, size_t, size_t))                                                                    \
    _(cuArrayCreate_v2, (handle *, const CUDA_ARRAY_DESCRIPTOR_v2 *))                                                           \
    _(cuArrayDestroy, (handle))                                                                                                 \
    _(cuMipmappedArrayCreate, (handle *, const CUDA_ARRAY3D_DESCRIPTOR_v2 *, unsigned))                                         \
    _(cuMipmappedArrayDestroy, (handle))                                                                                        \
    _(cuModuleLoadData, (handle *, const void *))                                                                               \
    _(cuModuleUnload, (handle))                                                                                                 \
    _(cuGraphCreate, (handle *, unsigned))                                                                                      \
    _(cuGraphAddMemAllocNode, (handle *, handle, const handle *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *))                         \
    _(cuGraphAddMemFreeNode, (handle *, handle, const handle *, size_t, CUdeviceptr))                                           \
    _(cuGraphInstantiateWithFlags, (handle *, handle, unsigned long long))                                                      \
    _(cuGraphLaunch, (handle, handle))                                                                                          \
    _(cuGraphExecDestroy, (handle))                                                                                             \
    _(cuGraphDestroy, (handle))                                                                                                 \
    _(cuDeviceGraphMemTrim, (int))

#define DECLARE(name, parameters) static int(*name) parameters;
FUNCTIONS(DECLARE)

static char image[200000]; /* PTX: the simulated card takes 64 KiB for each 64 KiB of it */

const char *kinds_find(void *library)
{
#define FIND(name, parameters)                \
    if (!(name = dlsym(library, #name)))      \
        return #name;
    FUNCTIONS(FIND)
    int used = snprintf(image, sizeof image, ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry spin()\n{ ret; }\n//");
    memset(image + used, '.', sizeof image - (size_t)used - 1);
    return NULL;
}

static size_t chunks(size_t bytes)
{
    return (bytes + CHUNK - 1) / CHUNK * CHUNK;
}

static handle pointer_of(unsigned long long value)
{
    return (handle)(uintptr_t)value;
}

static int take_plain(struct held *one, size_t bytes, unsigned chance)
{
    (void)chance;
    return cuMemAlloc_v2(&one->at, bytes);
}

static int take_managed(struct held *one, size_t bytes, unsigned chance)
{
    (void)chance;
    return cuMemAllocManaged(&one->at, bytes, 1);
}

static int take_pitched(struct held *one, size_t bytes, unsigned chance)
{
    size_t pitch;
    (void)chance;
    return cuMemAllocPitch_v2(&one->at, &pitch, 4000, bytes / 4096, 4);
}

static int give_plain(struct held *one, unsigned chance)
{
    (void)chance;
    return cuMemFree_v2(one->at);
}

static int take_async(struct held *one, size_t bytes, unsigned chance)
{
    (void)chance;
    return cuMemAllocAsync(&one->at, bytes, NULL);
}

static int give_async(struct held *one, unsigned chance)
{
    return chance % 8 ? cuMemFreeAsync(one->at, NULL) : cuMemFree_v2(one->at);
}

/* A pool of its own, with some in it. */
static int give_pool(struct held *one, unsigned chance)
{
    int result = 0;
    for (int part = 0; part < PARTS && !result; part++) {
        unsigned which = (chance + (unsigned)part) % PARTS;
        if (one->parts[which])
            result = cuMemFreeAsync(one->parts[which], NULL);
        if (!result && chance % 4 == (unsigned)part)
            result = cuMemPoolTrimTo(pointer_of(one->at), 0);
    }
    if (!result && chance % 2)
        result = cuStreamSynchronize(NULL);
    return result ? result : cuMemPoolDestroy(pointer_of(one->at));
}

static int take_pool(struct held *one, size_t bytes, unsigned chance)
{
    CUmemPoolProps properties = {.allocType = 1, .location = {.type = 1}};
    handle pool;
    int result = cuMemPoolCreate(&pool, &properties);
    if (result)
        return result;
    one->at = (uintptr_t)pool;
    for (int part = 0; part < PARTS && !result; part++)
        result = cuMemAllocFromPoolAsync(&one->parts[part], bytes / PARTS + 1, pool, NULL);
    int undone = result ? give_pool(one, chance) : 0;
    return undone ? undone : result;
}

static int create_for(CUdeviceptr *at, size_t bytes, int handle_types)
{
    CUmemAllocationProp properties = {.type = 1, .requestedHandleTypes = handle_types, .location = {.type = 1}};
    return cuMemCreate(at, bytes, &properties, 0);
}

static int create(CUdeviceptr *at, size_t bytes)
{
    return create_for(at, bytes, 0);
}

static int take_created(struct held *one, size_t bytes, unsigned chance)
{
    (void)chance;
    return create(&one->at, chunks(bytes));
}

static int give_created(struct held *one, unsigned chance)
{
    (void)chance;
    return cuMemRelease(one->at);
}

/* Memory that only the descriptor keeps to which it was exported: its handle is released. */
static int take_exported(struct held *one, size_t bytes, unsigned chance)
{
    int file;
    CUdeviceptr memory;
    (void)chance;
    int result = create_for(&memory, chunks(bytes), POSIX_FD);
    if (result)
        return result;
    result = cuMemExportToShareableHandle(&file, memory, POSIX_FD, 0);
    one->at = result ? 0 : (unsigned)file;
    int released = cuMemRelease(memory);
    return result ? result : released;
}

static int give_exported(struct held *one, unsigned chance)
{
    (void)chance;
    return close((int)one->at);
}

/* What another API made, here a file in its place: the simulated card takes it for memory of the card. */
static int take_external(struct held *one, size_t bytes, unsigned chance)
{
    handle memory = NULL;
    (void)chance;
    int file = memfd_create("external", MFD_CLOEXEC), result = 304; /* the operating system failed */
    CUDA_EXTERNAL_MEMORY_HANDLE_DESC given = {.type = POSIX_FD, .handle.fd = file, .size = chunks(bytes)};
    if (file >= 0 && !ftruncate(file, (off_t)given.size))
        result = cuImportExternalMemory(&memory, &given);
    if (result && file >= 0)
        close(file);
    one->at = (uintptr_t)memory;
    return result;
}

static int give_external(struct held *one, unsigned chance)
{
    (void)chance;
    return cuDestroyExternalMemory(pointer_of(one->at));
}

/* A range of addresses with memory in each part, whose handles are released at once; unmapped part by part in any order, or two
 * parts by one call. */
static int give_mapped(struct held *one, unsigned chance)
{
    bool all = one->parts[0] && one->parts[1] && one->parts[2];
    int result = 0;
    if (all && chance % 2) {
        unsigned alone = chance % 4 == 1 ? 0 : 2;
        result = cuMemUnmap(one->at + alone * one->part, one->part);
        if (!result)
            result = cuMemUnmap(one->at + (alone ? 0 : one->part), 2 * one->part);
    } else {
        for (unsigned part = 0; part < PARTS && !result; part++) {
            unsigned which = (chance + part * (1 + chance % 2)) % PARTS;
            if (one->parts[which])
                result = cuMemUnmap(one->at + which * one->part, one->part);
        }
    }
    return result ? result : cuMemAddressFree(one->at, PARTS * one->part);
}

static int take_mapped(struct held *one, size_t bytes, unsigned chance)
{
    one->part = chunks(bytes / PARTS + 1);
    int result = cuMemAddressReserve(&one->at, PARTS * one->part, 0, 0, 0);
    if (result)
        return result;
    for (unsigned part = 0; part < PARTS && !result; part++) {
        CUdeviceptr memory;
        if ((result = create(&memory, one->part)))
            break;
        result = cuMemMap(one->at + part * one->part, one->part, 0, memory, 0);
        one->parts[part] = !result;
        int released = cuMemRelease(memory);
        result = result ? result : released;
    }
    int undone = result ? give_mapped(one, chance & ~1u) : 0;
    return undone ? undone : result;
}

/* Memory bound to a multicast object; its handle is released before. */
static int take_multicast(struct held *one, size_t bytes, unsigned chance)
{
    CUdeviceptr memory;
    (void)chance;
    one->part = chunks(bytes);
    struct multicast shape = {.devices = 1, .bytes = one->part};
    int result = create(&memory, one->part);
    if (result)
        return result;
    result = cuMulticastCreate(&one->at, &shape);
    if (!result)
        result = cuMulticastAddDevice(one->at, 0);
    if (!result)
        result = cuMulticastBindMem(one->at, 0, memory, 0, one->part, 0);
    int released = cuMemRelease(memory);
    return result ? result : released;
}

static int give_multicast(struct held *one, unsigned chance)
{
    int result = chance % 2 ? cuMulticastUnbind(one->at, 0, 0, one->part) : 0;
    return result ? result : cuMemRelease(one->at);
}

static int take_array(struct held *one, size_t bytes, unsigned chance)
{
    handle array = NULL;
    size_t rows = chance % 4 ? bytes / 4096 : 1 + chance % 16; /* one in four is small: it shares its chunk */
    CUDA_ARRAY_DESCRIPTOR_v2 shape = {.Width = 1024, .Height = rows, .Format = 0x20, .NumChannels = 1};
    int result = cuArrayCreate_v2(&array, &shape);
    one->at = (uintptr_t)array;
    return result;
}

static int give_array(struct held *one, unsigned chance)
{
    (void)chance;
    return cuArrayDestroy(pointer_of(one->at));
}

static int take_mipmap(struct held *one, size_t bytes, unsigned chance)
{
    handle array = NULL;
    size_t rows = chance % 4 ? bytes / 4096 : 1 + chance % 16;
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = 1024, .Height = rows, .Format = 0x20, .NumChannels = 1};
    int result = cuMipmappedArrayCreate(&array, &shape, 1 + chance % 5);
    one->at = (uintptr_t)array;
    return result;
}

static int give_mipmap(struct held *one, unsigned chance)
{
    (void)chance;
    return cuMipmappedArrayDestroy(pointer_of(one->at));
}

static int take_module(struct held *one, size_t bytes, unsigned chance)
{
    handle module = NULL;
    (void)bytes, (void)chance;
    int result = cuModuleLoadData(&module, image);
    one->at = (uintptr_t)module;
    return result;
}

static int give_module(struct held *one, unsigned chance)
{
    (void)chance;
    return cuModuleUnload(pointer_of(one->at));
}

/* A graph that allocates and frees, launched once or twice: what its launches took stays with the process until it is trimmed. Or one
 * that leaves its memory to the program. */
static int give_graph(struct held *one, unsigned chance)
{
    int result = one->parts[1] ? cuMemFree_v2(one->parts[1]) : 0;
    if (!result && one->parts[0])
        result = cuGraphExecDestroy(pointer_of(one->parts[0]));
    if (!result)
        result = cuGraphDestroy(pointer_of(one->at));
    if (!result && chance % 2)
        result = cuDeviceGraphMemTrim(0);
    return result;
}

static int take_graph(struct held *one, size_t bytes, unsigned chance)
{
    handle graph, node, other, executable = NULL;
    bool leaves = chance % 4 == 3;
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = 1, .location = {.type = 1}}, .bytesize = bytes};
    int result = cuGraphCreate(&graph, 0);
    if (result)
        return result;
    one->at = (uintptr_t)graph;
    result = cuGraphAddMemAllocNode(&node, graph, NULL, 0, &memory);
    if (!result && !leaves)
        result = cuGraphAddMemFreeNode(&other, graph, &node, 1, memory.dptr);
    if (!result)
        result = cuGraphInstantiateWithFlags(&executable, graph, 0);
    one->parts[0] = result ? 0 : (uintptr_t)executable;
    for (unsigned time = 0; time <= (leaves ? 0 : chance % 2) && !result; time++)
        result = cuGraphLaunch(executable, NULL);
    one->parts[1] = leaves && !result ? memory.dptr : 0;
    int undone = result ? give_graph(one, chance) : 0;
    return undone ? undone : result;
}

static const struct {
    const char *name;
    int (*take)(struct held *, size_t, unsigned);
    int (*give)(struct held *, unsigned);
} kinds[KINDS + 1] = {
    {"none", NULL, NULL},
    {"plain", take_plain, give_plain},
    {"managed", take_managed, give_plain},
    {"pitched", take_pitched, give_plain},
    {"default pool", take_async, give_async},
    {"own pool", take_pool, give_pool},
    {"physical", take_created, give_created},
    {"mapped", take_mapped, give_mapped},
    {"multicast", take_multicast, give_multicast},
    {"array", take_array, give_array},
    {"mipmap", take_mipmap, give_mipmap},
    {"module", take_module, give_module},
    {"graph", take_graph, give_graph},
    {"exported", take_exported, give_exported},
    {"external", take_external, give_external},
};

const char *kind_name(int kind)
{
    return kinds[kind].name;
}

size_t kind_bytes(int kind, size_t bytes)
{
    return kinds[kind].take == take_module ? sizeof image : bytes;
}

int take(struct held *one, int kind, size_t bytes, unsigned chance)
{
    *one = (struct held){0};
    int result = kinds[kind].take(one, bytes, chance);
    one->kind = result ? 0 : kind;
    return result;
}

int give(struct held *one, unsigned chance)
{
    int result = kinds[one->kind].give(one, chance);
    one->kind = 0;
    return result;
}
