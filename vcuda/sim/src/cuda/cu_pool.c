/* Memory pools and stream-ordered allocation. A pool pays the card in chunks and keeps them until told or
 * synchronised. */
#include <stdlib.h>

#include "cu_capture.h"
#include "cu_memory.h"

#define POOL_CHUNK (32ull << 20)

struct CUmemPoolHandle_st {
    int magic, device, alive, graph;
    struct CUmemPoolHandle_st *next;
    CUmemPoolProps props;
    int reuse[3];
    uint64_t threshold, reserved, reserved_high, used, used_high;
};

static CUmemoryPool pools; /* under cu_lock, as all of this */

static uint64_t up(uint64_t bytes, uint64_t step)
{
    return (bytes + step - 1) / step * step;
}

static CUmemoryPool make_pool(int device, const CUmemPoolProps *props)
{
    CUmemoryPool pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pool->magic = CU_MAGIC_POOL;
    pool->device = device;
    pool->alive = 1;
    pool->props = *props;
    pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
    pool->next = pools;
    pools = pool;
    return pool;
}

static CUmemoryPool lazily(CUmemoryPool *place, int device)
{
    const CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                  .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    if (!*place)
        *place = make_pool(device, &props);
    return *place;
}

CUmemoryPool cu_pool_default(int device)
{
    return lazily(&cu_process.devices[device].default_pool, device);
}

CUmemoryPool cu_pool_graph(int device)
{
    CUmemoryPool pool = lazily(&cu_process.devices[device].graph_pool, device);
    if (pool) {
        pool->graph = 1;
        pool->threshold = UINT64_MAX; /* kept until cuDeviceGraphMemTrim */
    }
    return pool;
}

static uint64_t shrink(CUmemoryPool pool, uint64_t keep)
{
    uint64_t floor = up(pool->used, CU_CHUNK);
    floor = keep > floor ? keep : floor;
    if (floor >= pool->reserved)
        return 0;
    const uint64_t released = pool->reserved - floor;
    pool->reserved = floor;
    cu_discharge(pool->device, released);
    return released;
}

uint64_t cu_pools_trim(int device)
{
    uint64_t released = 0;
    for (CUmemoryPool pool = pools; pool; pool = pool->next)
        if (pool->device == device)
            released += shrink(pool, 0);
    return released;
}

void cu_pools_settle(int device)
{
    if (!__atomic_load_n(&pools, __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&cu_lock);
    for (CUmemoryPool pool = pools; pool; pool = pool->next)
        if (pool->device == device && pool->reserved > pool->threshold)
            shrink(pool, up(pool->threshold, CU_CHUNK));
    pthread_mutex_unlock(&cu_lock);
}

static CUresult grow(CUmemoryPool pool, uint64_t bytes)
{
    const uint64_t wanted = pool->used + bytes;
    if (pool->props.maxSize && wanted > pool->props.maxSize)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (wanted > pool->reserved) {
        uint64_t more = up(wanted - pool->reserved, POOL_CHUNK);
        CUresult bad = cu_charge(pool->device, more);
        if (bad) { /* a trim may have shrunk this very pool: count again, and take no more than needed */
            more = up(wanted > pool->reserved ? wanted - pool->reserved : 0, CU_CHUNK);
            bad = more ? cu_charge(pool->device, more) : CUDA_SUCCESS;
        }
        if (bad)
            return bad;
        pool->reserved += more;
    }
    pool->used = wanted;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    return CUDA_SUCCESS;
}

CUresult cu_pool_alloc(CUcontext ctx, CUmemoryPool pool, size_t bytes, CUdeviceptr *pointer)
{
    cu_block *block;
    pthread_mutex_lock(&cu_lock);
    CUresult bad = bytes > (1ull << 46) ? CUDA_ERROR_OUT_OF_MEMORY : grow(pool, up(bytes, 512));
    if (!bad) {
        bad = cu_place(ctx, bytes, CU_BLOCK_POOL, 0, &block);
        if (bad)
            pool->used -= up(bytes, 512);
    }
    if (!bad) {
        block->pool = pool;
        *pointer = block->start;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

void cu_pool_forget(cu_block *block)
{
    block->pool->used -= up(block->bytes, 512);
    if (!block->pool->alive)
        shrink(block->pool, 0);
}

/* ---- the API ---- */

static CUresult pool_of(CUmemoryPool pool)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return pool && pool->magic == CU_MAGIC_POOL && pool->alive ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !pointer)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (!bytes) {
        *pointer = 0;
        return CUDA_SUCCESS;
    }
    bad = cu_alloc_fault(stream->ctx);
    if (bad)
        return bad;
    if (stream->capture) {
        cu_work work = {.kind = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
        work.alloc.bytesize = bytes;
        work.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        work.alloc.poolProps.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, stream->ctx->device};
        return cu_capture_alloc(stream, &work, pointer);
    }
    if (!pool) {
        pthread_mutex_lock(&cu_lock);
        pool = cu_process.devices[stream->ctx->device].current_pool;
        if (!pool)
            pool = cu_pool_default(stream->ctx->device);
        pthread_mutex_unlock(&cu_lock);
    }
    return pool ? cu_pool_alloc(stream->ctx, pool, bytes, pointer) : CUDA_ERROR_OUT_OF_MEMORY;
}

CU_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return allocate(pointer, bytes, NULL, stream);
}

CU_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    const CUresult bad = pool_of(pool);
    return bad ? bad : allocate(pointer, bytes, pool, stream);
}

CU_EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !pointer)
        return bad;
    if (stream->capture)
        return cu_capture_add(stream, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_MEM_FREE, .free = pointer}, NULL);
    return cu_free_block(pointer);
}

CU_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    cu_device *found;
    CUresult bad = cu_initialised();
    if (bad || !pool || !props || (int)props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if ((int)props->location.type != CU_MEM_LOCATION_TYPE_DEVICE || (int)props->handleTypes > 1)
        return CUDA_ERROR_NOT_SUPPORTED;
    bad = cu_device_of(props->location.id, &found);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    *pool = make_pool(props->location.id, props);
    pthread_mutex_unlock(&cu_lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Memory that is still in use stays valid; its pool ends with it. */
CU_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    const CUresult bad = pool_of(pool);
    if (bad)
        return bad;
    cu_device *device = &cu_process.devices[pool->device];
    if (pool == device->default_pool || pool == device->graph_pool)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    pool->alive = 0;
    shrink(pool, 0);
    if (device->current_pool == pool)
        device->current_pool = NULL;
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    const CUresult bad = pool_of(pool);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    shrink(pool, keep ? up(keep, CU_CHUNK) : 0);
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    const CUresult bad = pool_of(pool);
    if (bad || !value)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int number = (int)attribute;
    pthread_mutex_lock(&cu_lock);
    const uint64_t counts[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    pthread_mutex_unlock(&cu_lock);
    if (number >= 1 && number <= 3)
        *(int *)value = pool->reuse[number - 1];
    else if (number >= 4 && number <= 8)
        *(cuuint64_t *)value = counts[number - 4];
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CUresult bad = pool_of(pool);
    if (bad || !value)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int number = (int)attribute;
    pthread_mutex_lock(&cu_lock);
    if (number >= 1 && number <= 3)
        pool->reuse[number - 1] = *(const int *)value;
    else if (number == 4)
        pool->threshold = *(const cuuint64_t *)value;
    else if (number == 6 && *(const cuuint64_t *)value == 0)
        pool->reserved_high = pool->reserved;
    else if (number == 8 && *(const cuuint64_t *)value == 0)
        pool->used_high = pool->used;
    else
        bad = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    const CUresult bad = pool_of(pool);
    return bad ? bad : map || !count ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
    const CUresult bad = pool_of(pool);
    if (bad || !flags || !location)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *flags = location->id == pool->device ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : 0;
    return CUDA_SUCCESS;
}

static CUresult device_pool(CUmemoryPool *pool, CUdevice device, int want_default)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad || !pool)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    *pool = !want_default && found->current_pool ? found->current_pool : cu_pool_default(device);
    pthread_mutex_unlock(&cu_lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CU_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    return device_pool(pool, device, 1);
}

CU_EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    return device_pool(pool, device, 0);
}

CU_EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    cu_device *found;
    CUresult bad = cu_device_of(device, &found);
    if (!bad)
        bad = pool_of(pool);
    if (bad || pool->device != device)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    found->current_pool = pool;
    return CUDA_SUCCESS;
}

/* ---- memory of graphs ---- */

CUresult cu_graph_memory_use(cu_block *block)
{
    if (block->flags)
        return CUDA_SUCCESS; /* left over from the last launch: still paid for */
    CUmemoryPool pool = cu_pool_graph(block->device);
    const CUresult bad = pool ? grow(pool, up(block->bytes, CU_CHUNK)) : CUDA_ERROR_OUT_OF_MEMORY;
    block->flags = !bad;
    return bad;
}

void cu_graph_memory_drop(cu_block *block)
{
    if (block->flags)
        cu_pool_graph(block->device)->used -= up(block->bytes, CU_CHUNK);
    block->flags = 0;
}

CU_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    CUmemoryPool pool = cu_pool_graph(device);
    if (pool)
        shrink(pool, 0);
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad || !value || (int)attribute < 0 || (int)attribute > 3)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    CUmemoryPool pool = cu_pool_graph(device);
    if (pool)
        *(cuuint64_t *)value = (cuuint64_t[]){pool->used, pool->used_high, pool->reserved, pool->reserved_high}[attribute];
    pthread_mutex_unlock(&cu_lock);
    return pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CU_EXPORT CUresult cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad || !value || *(const cuuint64_t *)value || ((int)attribute != 1 && (int)attribute != 3))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    CUmemoryPool pool = cu_pool_graph(device);
    if (pool && (int)attribute == 1)
        pool->used_high = pool->used;
    else if (pool)
        pool->reserved_high = pool->reserved;
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}
