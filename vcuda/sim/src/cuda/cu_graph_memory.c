/* Memory of graphs: paid by the device at the launch, kept by it until trimmed. */
#include "cu_pool.h"

CUresult cu_graph_memory_use(cu_block *block)
{
    CUmemoryPool pool = cu_pool_graph(block->device);
    if (block->uses++) /* a launch before still has it: the same memory serves this one, after it */
        return CUDA_SUCCESS;
    CUresult bad = pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (!bad && cu_space_take(pool, block->bytes, &block->extent)) {
        bad = cu_space_grow(pool, block->bytes);
        if (!bad && cu_space_take(pool, block->bytes, &block->extent))
            bad = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (bad) {
        block->uses = 0;
        return bad;
    }
    pool->used += block->extent.bytes;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
    return CUDA_SUCCESS;
}

void cu_graph_memory_drop(cu_block *block)
{
    if (!block->uses || --block->uses)
        return;
    CUmemoryPool pool = cu_pool_graph(block->device);
    pool->used -= block->extent.bytes;
    cu_space_give(pool, &block->extent);
}

CU_EXPORT CUresult cuDeviceGraphMemTrim(CUdevice device)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    CUmemoryPool pool = cu_pool_graph(device);
    cu_order_settle();
    if (pool)
        cu_space_release(pool, 0);
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
