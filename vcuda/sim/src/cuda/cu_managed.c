/* Where managed memory is: on one card, which pays for it, or on the host. It moves as a whole, by prefetch and by first use. */
#include "cu_memory.h"

enum { BUS_BYTES_PER_NS = 20, BUS_LATENCY_NS = 2000 };

int cu_managed_move(cu_block *block, int device)
{
    const size_t whole = (block->bytes + CU_CHUNK - 1) / CU_CHUNK * CU_CHUNK;
    if (block->charged ? block->device == device : device < 0)
        return 0;
    if (device >= 0 && cu_charge_as(device, whole, 1))
        return 0; /* the card is full: it stays where it is, and the card reads it there */
    if (block->charged)
        cu_discharge_as(block->device, block->charged, 1);
    block->charged = device >= 0 ? whole : 0;
    if (device >= 0)
        block->device = device;
    return 1;
}

static CUresult find(CUdeviceptr pointer, size_t bytes, cu_block **block)
{
    *block = cu_find((uintptr_t)pointer);
    return bytes && *block && (*block)->kind == CU_BLOCK_MANAGED && pointer + bytes <= (*block)->start + (*block)->bytes
               ? CUDA_SUCCESS
               : CUDA_ERROR_INVALID_VALUE;
}

static CUresult managed(CUdeviceptr pointer, size_t bytes)
{
    cu_block *block;
    CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    bad = find(pointer, bytes, &block);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

/* `device` -1: to the host. The memory changes its payer at the call, the stream takes the time that the bus needs. */
static CUresult prefetch(CUdeviceptr pointer, size_t bytes, int device, CUstream handle)
{
    CUstream stream;
    cu_block *block;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    bad = find(pointer, bytes, &block);
    const int moved = !bad && cu_managed_move(block, device);
    pthread_mutex_unlock(&cu_lock);
    if (bad || !moved || stream->capture)
        return bad;
    const sim_op op = {.kind = device < 0 ? SIM_OP_COPY_OUT : SIM_OP_COPY_IN, .ns = BUS_LATENCY_NS + bytes / BUS_BYTES_PER_NS};
    return cu_push(stream, &op, 1, NULL);
}

CU_EXPORT CUresult cuMemPrefetchAsync(CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream)
{
    if (device < -1 || device >= cu_process.device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    return prefetch(pointer, bytes, device, stream);
}

CU_EXPORT CUresult cuMemPrefetchAsync_v2(CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags,
                                         CUstream stream)
{
    cu_device *found;
    const int type = (int)location.type, on_card = type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (flags || type < CU_MEM_LOCATION_TYPE_DEVICE || type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult bad = on_card ? cu_device_of(location.id, &found) : CUDA_SUCCESS;
    return bad ? bad : prefetch(pointer, bytes, on_card ? location.id : -1, stream);
}

CU_EXPORT CUresult cuMemAdvise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUdevice device)
{
    (void)device;
    return (int)advice < 1 || (int)advice > 6 ? CUDA_ERROR_INVALID_VALUE : managed(pointer, bytes);
}

CU_EXPORT CUresult cuMemAdvise_v2(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUmemLocation location)
{
    (void)location;
    return (int)advice < 1 || (int)advice > 6 ? CUDA_ERROR_INVALID_VALUE : managed(pointer, bytes);
}
