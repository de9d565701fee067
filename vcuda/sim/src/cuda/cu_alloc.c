/* Plain, pitched and managed device memory, and what is free. */
#include "cu_capture.h"
#include "cu_sharing.h"

#define MOST_BYTES (1ull << 46) /* more than any card has */

CUresult cu_alloc_fault_on(int device)
{
    const int card = cu_process.devices[device].card;
    sim_faults *faults = &sim_card_at(cu_process.state, card)->faults;
    sim_slow_call(cu_process.state, card);
    if (faults->lost)
        return CUDA_ERROR_UNKNOWN;
    int32_t left = atomic_load_explicit(&faults->fail_next, memory_order_relaxed);
    while (left > 0 && !atomic_compare_exchange_weak(&faults->fail_next, &left, left - 1))
        ;
    return left ? faults->fail_code : CUDA_SUCCESS;
}

CUresult cu_alloc_fault(CUcontext ctx)
{
    return cu_card(ctx)->faults.lost ? cu_lost(ctx) : cu_alloc_fault_on(ctx->device);
}

static CUresult take(int card, uint64_t bytes, int managed, int reap)
{
    sim_state *state = cu_process.state;
    sim_card_lock(state, card);
    if (reap)
        sim_reap(state, card);
    const int refused = sim_memory_take(state, sim_card_at(state, card), bytes, managed);
    sim_card_unlock(state, card);
    return refused ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

CUresult cu_charge_as(int device, uint64_t bytes, int managed)
{
    const int card = cu_process.devices[device].card;
    cu_physical_sweep();
    CUresult bad = take(card, bytes, managed, 0);
    if (bad) { /* the newest deaths, then our own idle pools, may hold what is missing */
        cu_pools_trim(device);
        bad = take(card, bytes, managed, 1);
    }
    return bad;
}

void cu_discharge_as(int device, uint64_t bytes, int managed)
{
    const int card = cu_process.devices[device].card;
    sim_card_lock(cu_process.state, card);
    sim_memory_give(cu_process.state, sim_card_at(cu_process.state, card), bytes, managed);
    sim_card_unlock(cu_process.state, card);
}

CUresult cu_charge(int device, uint64_t bytes)
{
    return cu_charge_as(device, bytes, 0);
}

void cu_discharge(int device, uint64_t bytes)
{
    cu_discharge_as(device, bytes, 0);
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes)
{
    CUcontext ctx;
    cu_block *block;
    CUresult bad = cu_current(&ctx);
    if (bad || !pointer || !bytes)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    bad = cu_capture_forbids();
    if (!bad)
        bad = cu_alloc_fault(ctx);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    bad = cu_place(ctx, ctx->device, bytes, CU_BLOCK_PLAIN, 1, &block);
    if (!bad)
        *pointer = block->start;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    return allocate(pointer, bytes);
}

CU_EXPORT CUresult cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height,
                                      unsigned int element)
{
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    if (width > MOST_BYTES || height > MOST_BYTES / width)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const size_t row = (width + 511) & ~(size_t)511;
    const CUresult bad = allocate(pointer, row * height);
    if (!bad)
        *pitch = row;
    return bad;
}

/* Managed memory is charged as if all of it were on the card, as far as the card has room; the rest stays on the
 * host. */
CU_EXPORT CUresult cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    CUcontext ctx;
    cu_block *block;
    CUresult bad = cu_current(&ctx);
    if (bad || !pointer || !bytes || (flags & ~4u) == 0 || (flags & ~4u) > 2)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    bad = cu_capture_forbids();
    if (!bad)
        bad = cu_alloc_fault(ctx);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    bad = cu_place(ctx, ctx->device, bytes < CU_CHUNK ? CU_CHUNK : bytes, CU_BLOCK_MANAGED, 1, &block);
    if (bad)
        bad = cu_place(ctx, ctx->device, bytes < CU_CHUNK ? CU_CHUNK : bytes, CU_BLOCK_MANAGED, 0, &block);
    if (!bad) {
        *pointer = block->start;
        block->flags = flags;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

static CUresult free_found(cu_block *block, CUstream stream)
{
    if (block->fixed)
        return CUDA_ERROR_INVALID_VALUE;
    if (block->kind == CU_BLOCK_GRAPH) { /* the address stays the graph's */
        if (!block->held)
            return CUDA_ERROR_INVALID_VALUE;
        block->held = 0;
    }
    if (stream)
        return cu_order_free(stream, block);
    cu_block_end(block);
    return CUDA_SUCCESS;
}

CUresult cu_free_block(CUdeviceptr pointer, CUstream stream)
{
    pthread_mutex_lock(&cu_lock);
    cu_order_settle();
    cu_block *block = cu_find((uintptr_t)pointer);
    const CUresult result = block && block->start + block->extent.offset * (block->kind == CU_BLOCK_IMPORTED) == (uintptr_t)pointer &&
                                    (block->kind <= CU_BLOCK_GRAPH ||
                                     (block->kind == CU_BLOCK_IMPORTED && block->flags != CU_IMPORT_IPC))
                                ? free_found(block, stream)
                                : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&cu_lock);
    return result;
}

/* Freeing waits for the context's work; not for what came from a pool or a graph, which no context owns (cuda.h). */
CU_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (!bad)
        bad = cu_capture_forbids();
    if (bad || !pointer)
        return bad;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)pointer);
    const int found = block != NULL;
    CUcontext owner = block ? block->ctx : NULL;
    pthread_mutex_unlock(&cu_lock);
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    bad = owner ? cu_context_wait(owner) : CUDA_SUCCESS;
    return bad ? bad : cu_free_block(pointer, NULL);
}

CU_EXPORT CUresult cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !free_bytes || !total)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    cu_order_settle();
    cu_physical_sweep();
    pthread_mutex_unlock(&cu_lock);
    sim_card_lock(cu_process.state, ctx->card);
    const sim_card *card = cu_card(ctx);
    const int lost = card->faults.lost;
    *total = card->config.memory_bytes;
    *free_bytes = card->config.memory_bytes - card->used_bytes;
    char group[SIM_GROUP_TEXT];
    if (card->limits_used)
        sim_own_group(group);
    const sim_limit *limit = !card->limits_used ? NULL : sim_limit_seen(cu_process.state, card, group);
    if (limit && limit->hard_bytes < *total) {
        const uint64_t used = sim_limit_used(cu_process.state, card, limit);
        const uint64_t left = used < limit->hard_bytes ? limit->hard_bytes - used : 0;
        *total = limit->hard_bytes;
        *free_bytes = left < *free_bytes ? left : *free_bytes;
    }
    sim_card_unlock(cu_process.state, ctx->card);
    return lost ? cu_lost(ctx) : CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *start, size_t *bytes, CUdeviceptr pointer)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)pointer);
    if (block && start)
        *start = block->start;
    if (block && bytes)
        *bytes = block->bytes;
    pthread_mutex_unlock(&cu_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

static void end_block(cu_block *block)
{
    if (block->freed || block->kind == CU_BLOCK_GRAPH)
        return;
    if (block->kind < CU_BLOCK_HOST || block->kind == CU_BLOCK_IMPORTED)
        cu_block_end(block);
}

/* Memory of pools, graphs and cuMemCreate is no context's and stays (cuda.h at cuCtxDestroy). */
void cu_memory_end(CUcontext ctx)
{
    pthread_mutex_lock(&cu_lock);
    cu_order_end(ctx);
    cu_sparse_context_ended(ctx);
    cu_external_context_ended(ctx);
    cu_each_block(ctx, end_block);
    pthread_mutex_unlock(&cu_lock);
    cu_pools_settle(ctx->device);
}

/* ---- the 32-bit versions of CUDA 2: a 64-bit address does not fit, so nothing can be given out ---- */

CU_EXPORT CUresult cuMemGetInfo(unsigned int *free_bytes, unsigned int *total)
{
    size_t left, all;
    const CUresult bad = free_bytes && total ? cuMemGetInfo_v2(&left, &all) : CUDA_ERROR_INVALID_VALUE;
    if (!bad) {
        *free_bytes = left > 0xffffffffu ? 0xffffffffu : (unsigned)left;
        *total = all > 0xffffffffu ? 0xffffffffu : (unsigned)all;
    }
    return bad;
}
