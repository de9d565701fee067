/* What may be asked of and set on the current context: device, limits, configuration, synchronisation. */
#include "cu_context.h"

enum { THREADS_PER_SM = 2048 };
#define MOST_LIMIT ((size_t)1 << 40)

const size_t cu_default_limits[8] = {1024, 1048576, 8388608, 2, 2048, 128, 0, 0};
pthread_mutex_t cu_primary_mutex = PTHREAD_MUTEX_INITIALIZER;

CU_EXPORT CUresult cuCtxGetDevice(CUdevice *device)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !device)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *device = ctx->device;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxGetFlags(unsigned int *flags)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *flags = ctx->flags;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxSetFlags(unsigned int flags)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    ctx->flags = flags;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxGetId(CUcontext ctx, unsigned long long *id)
{
    CUresult bad = ctx ? cu_usable(ctx) : cu_current(&ctx);
    if (bad || !id)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *id = ctx->id;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxGetApiVersion(CUcontext ctx, unsigned int *version)
{
    CUresult bad = ctx ? cu_usable(ctx) : cu_current(&ctx);
    if (bad || !version)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *version = ctx->api_version;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxSynchronize(void)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (!bad)
        bad = cu_capture_forbids();
    return bad ? bad : cu_context_wait(ctx);
}

/* What a limit takes from the card beyond its default, which is part of what a context costs: a stack for every thread
 * that can be resident, the heap and the buffer of printf. */
static int64_t limit_bytes(const struct CUctx_st *ctx, CUlimit limit, size_t value)
{
    const size_t least = cu_default_limits[(int)limit];
    const int64_t factor = (int)limit == 0 ? (int64_t)cu_card(ctx)->config.sms * THREADS_PER_SM : (int)limit < 3;
    return value > least ? (int64_t)(value - least) * factor : 0;
}

CU_EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    if ((int)limit < 0 || (int)limit > 6)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    if ((int)limit < 3 && value > MOST_LIMIT)
        return CUDA_ERROR_INVALID_VALUE;
    sim_card_lock(cu_process.state, ctx->card);
    const int64_t before = limit_bytes(ctx, limit, ctx->limits[(int)limit]);
    bad = sim_context_resize(cu_card(ctx), ctx->index, limit_bytes(ctx, limit, value) - before) ? CUDA_ERROR_OUT_OF_MEMORY
                                                                                             : CUDA_SUCCESS;
    if (!bad)
        ctx->limits[(int)limit] = value;
    sim_card_unlock(cu_process.state, ctx->card);
    return bad;
}

CU_EXPORT CUresult cuCtxGetLimit(size_t *value, CUlimit limit)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !value)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if ((int)limit < 0 || (int)limit > 6)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = ctx->limits[(int)limit];
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxGetCacheConfig(CUfunc_cache *config)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !config)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *config = (CUfunc_cache)ctx->cache_config;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxSetCacheConfig(CUfunc_cache config)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    ctx->cache_config = (int)config;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxGetSharedMemConfig(CUsharedconfig *config)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !config)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *config = (CUsharedconfig)ctx->shared_config;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxSetSharedMemConfig(CUsharedconfig config)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    ctx->shared_config = (int)config;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxResetPersistingL2Cache(void)
{
    CUcontext ctx;
    return cu_current(&ctx);
}
