/* What may be asked of and set on the current context: device, limits, configuration, synchronisation. */
#include "cu_context.h"

#include <string.h>

enum { THREADS_PER_SM = 2048 };
#define MOST_LIMIT ((size_t)1 << 40)
#define MOST_STACK ((size_t)512 << 10) /* of local memory of a thread */

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

/* What the context takes of the card beyond its cost, which holds the defaults: local memory for every thread that can be resident, as
 * much as the stack's limit or the largest frame that was launched; the heap and the buffer of printf since the launch that first found
 * them larger (seen on an H100, driver 580). Card locked. */
static CUresult hold(CUcontext ctx, size_t frame, const size_t limits[3])
{
    const int64_t threads = (int64_t)cu_card(ctx)->config.sms * THREADS_PER_SM;
    const size_t local = limits[0] > frame ? limits[0] : frame;
    int64_t bytes = local > cu_default_limits[0] ? (int64_t)(local - cu_default_limits[0]) * threads : 0;
    for (int limit = 1; limit < 3; limit++)
        bytes += limits[limit] > cu_default_limits[limit] ? (int64_t)(limits[limit] - cu_default_limits[limit]) : 0;
    if (sim_context_resize(cu_process.state, cu_card(ctx), ctx->index, bytes - ctx->held))
        return CUDA_ERROR_OUT_OF_MEMORY;
    ctx->held = bytes;
    ctx->frame = frame;
    memcpy(ctx->held_limits, limits, sizeof ctx->held_limits);
    return CUDA_SUCCESS;
}

CUresult cu_context_launches(CUcontext ctx, size_t frame)
{
    if (frame <= ctx->frame && !memcmp(ctx->held_limits, ctx->limits, sizeof ctx->held_limits))
        return CUDA_SUCCESS;
    sim_card_lock(cu_process.state, ctx->card);
    const CUresult bad = hold(ctx, frame > ctx->frame ? frame : ctx->frame, ctx->limits);
    sim_card_unlock(cu_process.state, ctx->card);
    return bad;
}

CU_EXPORT CUresult cuCtxSetLimit(CUlimit limit, size_t value)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    if ((int)limit < 0 || (int)limit > 6)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    if ((int)limit < 3 && value > (limit ? MOST_LIMIT : MOST_STACK))
        return CUDA_ERROR_INVALID_VALUE;
    sim_card_lock(cu_process.state, ctx->card);
    if ((int)limit < 3) {
        size_t limits[3];
        memcpy(limits, ctx->held_limits, sizeof limits);
        if ((int)limit == 0 || value < limits[(int)limit])
            limits[(int)limit] = value;
        bad = hold(ctx, ctx->frame, limits);
    }
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
