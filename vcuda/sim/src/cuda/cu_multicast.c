/* What keeps physical memory beside handles and mappings: multicast objects, and sparse arrays. */
#include <stdlib.h>

#include "cu_array.h"
#include "cu_memory.h"

typedef struct binding {
    struct binding *next;
    CUmemGenericAllocationHandle multicast; /* 0: an array's */
    const void *array;
    CUcontext ctx; /* the array's */
    int device;
    size_t place[8]; /* of a multicast object: from, to; of an array: level, layer, offsets, extents */
    CUmemGenericAllocationHandle memory;
} binding;

static binding *bindings; /* under cu_lock, as all of this */

static CUresult bind(binding wanted)
{
    binding *made = malloc(sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (cu_physical_keep(wanted.memory, 1)) {
        free(made);
        return CUDA_ERROR_INVALID_VALUE;
    }
    *made = wanted;
    made->next = bindings;
    bindings = made;
    return CUDA_SUCCESS;
}

/* Let go of the first binding for which `matches` holds; 0 if there is none. */
static int unbind(int (*matches)(const binding *, const binding *), const binding *like)
{
    for (binding **link = &bindings; *link; link = &(*link)->next) {
        binding *one = *link;
        if (!matches(one, like))
            continue;
        *link = one->next;
        const CUmemGenericAllocationHandle memory = one->memory;
        free(one);
        cu_physical_keep(memory, -1);
        return 1;
    }
    return 0;
}

static int of_multicast(const binding *one, const binding *like)
{
    return one->multicast && one->multicast == like->multicast;
}

static int of_array(const binding *one, const binding *like)
{
    return one->array && one->array == like->array;
}

static int in_range(const binding *one, const binding *like)
{
    return of_multicast(one, like) && one->device == like->device && one->place[0] >= like->place[0] &&
           one->place[1] <= like->place[1];
}

static int same_tiles(const binding *one, const binding *like)
{
    if (!of_array(one, like))
        return 0;
    for (int i = 0; i < 8; i++)
        if (one->place[i] != like->place[i])
            return 0;
    return 1;
}

static int of_context(const binding *one, const binding *like)
{
    return one->array && one->ctx == like->ctx;
}

void cu_sparse_context_ended(CUcontext ctx)
{
    while (unbind(of_context, &(binding){.ctx = ctx}))
        ;
}

void cu_multicast_ended(CUmemGenericAllocationHandle handle)
{
    while (unbind(of_multicast, &(binding){.multicast = handle}))
        ;
}

void cu_sparse_ended(const void *array)
{
    while (unbind(of_array, &(binding){.array = array}))
        ;
}

CU_EXPORT CUresult cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
    CUresult bad = cu_initialised();
    if (bad || !handle || !prop || !prop->numDevices || !prop->size || prop->size % CU_CHUNK)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    bad = cu_physical_add_free(0, prop->size, handle);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device)
{
    cu_device *found;
    (void)handle;
    return cu_device_of(device, &found);
}

CU_EXPORT CUresult cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *prop, int option)
{
    const CUresult bad = cu_initialised();
    if (bad || !granularity || !prop || option < 0 || option > 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *granularity = CU_CHUNK;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory,
                                      size_t from, size_t bytes, unsigned long long flags)
{
    CUresult bad = cu_initialised();
    if (bad || !bytes || bytes % CU_CHUNK || offset % CU_CHUNK || from % CU_CHUNK || flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    const int device = cu_physical_device(memory);
    bad = device < 0 || cu_physical_device(handle) < 0
              ? CUDA_ERROR_INVALID_VALUE
              : bind((binding){.multicast = handle, .device = device, .place = {offset, offset + bytes}, .memory = memory});
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr address, size_t bytes,
                                       unsigned long long flags)
{
    CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)address);
    const CUmemGenericAllocationHandle memory = block && block->kind == CU_BLOCK_VMM ? block->handle : 0;
    pthread_mutex_unlock(&cu_lock);
    return memory ? cuMulticastBindMem(handle, offset, memory, 0, bytes, flags) : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes)
{
    const CUresult bad = cu_initialised();
    int any = 0;
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    while (unbind(in_range, &(binding){.multicast = handle, .device = device, .place = {offset, offset + bytes}}))
        any = 1;
    pthread_mutex_unlock(&cu_lock);
    return any ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Maps tile by tile as listed; takes effect at once, where the real one does it in stream order. */
CU_EXPORT CUresult cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    CUresult bad = cu_initialised();
    (void)stream;
    if (bad || !list || !count)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    for (unsigned i = 0; i < count && !bad; i++) {
        const CUarrayMapInfo *one = &list[i];
        const binding wanted = {.array = one->resource.array,
                                .ctx = cu_array_context(one->resource.array, one->resourceType == 1),
                                .memory = one->memHandle.memHandle,
                                .place = {one->subresource.sparseLevel.level, one->subresource.sparseLevel.layer,
                                          one->subresource.sparseLevel.offsetX, one->subresource.sparseLevel.offsetY,
                                          one->subresource.sparseLevel.offsetZ, one->subresource.sparseLevel.extentWidth,
                                          one->subresource.sparseLevel.extentHeight, one->subresource.sparseLevel.extentDepth}};
        unbind(same_tiles, &wanted);
        if ((int)one->memOperationType == 1)
            bad = bind(wanted);
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    return cuMemMapArrayAsync(list, count, stream);
}
