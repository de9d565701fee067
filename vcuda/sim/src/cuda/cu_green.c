/* Green contexts: each keeps its card's primary context; all of the card's processors are in each. */
#include <stdlib.h>

#include "cu_context.h"

struct CUgreenCtx_st {
    int magic, device;
    CUcontext primary;
};

CU_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device);
CU_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);

CU_EXPORT CUresult cuGreenCtxCreate(CUgreenCtx *ctx, CUdevResourceDesc resources, CUdevice device, unsigned int flags)
{
    (void)resources; /* there is nothing to partition */
    if (!ctx || flags != 1) /* CU_GREEN_CTX_DEFAULT_STREAM, which is required */
        return CUDA_ERROR_INVALID_VALUE;
    CUgreenCtx made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const CUresult bad = cuDevicePrimaryCtxRetain(&made->primary, device);
    if (bad) {
        free(made);
        return bad;
    }
    made->magic = CU_MAGIC_CONTEXT;
    made->device = device;
    *ctx = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGreenCtxDestroy(CUgreenCtx ctx)
{
    if (!ctx || ctx->magic != CU_MAGIC_CONTEXT)
        return CUDA_ERROR_INVALID_CONTEXT;
    ctx->magic = 0;
    const CUresult bad = cuDevicePrimaryCtxRelease_v2(ctx->device);
    free(ctx);
    return bad;
}

/* Here the primary context itself, where the real one has another handle for it. */
CU_EXPORT CUresult cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green)
{
    if (!ctx || !green || green->magic != CU_MAGIC_CONTEXT)
        return CUDA_ERROR_INVALID_VALUE;
    *ctx = green->primary;
    return CUDA_SUCCESS;
}
