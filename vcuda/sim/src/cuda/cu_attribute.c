/* Stream attributes, the profiler's switches and other settings that the simulated card has no use for. */
#include <string.h>

#include "cu_module.h"

CU_EXPORT CUresult cuStreamGetAttribute(CUstream handle, CUstreamAttrID id, CUstreamAttrValue *value)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !value)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    memset(value, 0, sizeof *value);
    if ((int)id == CU_LAUNCH_ATTRIBUTE_PRIORITY)
        value->priority = stream->priority;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuStreamSetAttribute(CUstream handle, CUstreamAttrID id, const CUstreamAttrValue *value)
{
    CUstream stream;
    (void)id;
    const CUresult bad = cu_stream_of(handle, &stream);
    return bad ? bad : value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuStreamCopyAttributes(CUstream to, CUstream from)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(to, &stream);
    return bad ? bad : cu_stream_of(from, &stream);
}

CU_EXPORT CUresult cuProfilerStart(void)
{
    return cu_initialised();
}

CU_EXPORT CUresult cuProfilerStop(void)
{
    return cu_initialised();
}

CU_EXPORT CUresult cuFlushGPUDirectRDMAWrites(int target, int scope)
{
    (void)target, (void)scope;
    CUcontext ctx;
    return cu_current(&ctx);
}

CU_EXPORT CUresult cuFuncSetSharedSize(CUfunction function, unsigned int bytes)
{
    (void)bytes;
    return cu_function_of(function);
}

CU_EXPORT CUresult cuParamSetSize(CUfunction function, unsigned int bytes)
{
    (void)bytes;
    return cu_function_of(function);
}

CU_EXPORT CUresult cuParamSeti(CUfunction function, int offset, unsigned int value)
{
    (void)offset, (void)value;
    return cu_function_of(function);
}

CU_EXPORT CUresult cuParamSetf(CUfunction function, int offset, float value)
{
    (void)offset, (void)value;
    return cu_function_of(function);
}

CU_EXPORT CUresult cuParamSetv(CUfunction function, int offset, void *pointer, unsigned int bytes)
{
    (void)offset, (void)bytes;
    const CUresult bad = cu_function_of(function);
    return bad ? bad : pointer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
