/* What may be asked of functions and kernels: attributes, parameters, occupancy. */
#include "cu_module.h"

enum { THREADS_PER_SM = 2048, BLOCKS_PER_SM = 32, SHARED_PER_SM = 167936, RESERVED_SHARED = 1024 };

static CUresult get_attribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !value || (int)attribute < 0 || (int)attribute > 15)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *value = function->attributes[(int)attribute];
    return CUDA_SUCCESS;
}

static CUresult set_attribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    const CUresult bad = cu_function_of(function);
    if (bad || (int)attribute < 8 || (int)attribute > 15)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if ((int)attribute == 8 && (value < 0 || value > 232448))
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[(int)attribute] = value;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function)
{
    return get_attribute(value, attribute, function);
}

CU_EXPORT CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value)
{
    return set_attribute(function, attribute, value);
}

CU_EXPORT CUresult cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    return bad ? bad : get_attribute(value, attribute, (CUfunction)kernel);
}

CU_EXPORT CUresult cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    return bad ? bad : set_attribute((CUfunction)kernel, attribute, value);
}

CU_EXPORT CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config)
{
    (void)config;
    return cu_function_of(function);
}

CU_EXPORT CUresult cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device)
{
    (void)config, (void)device;
    return cu_function_of((CUfunction)kernel);
}

CU_EXPORT CUresult cuFuncSetSharedMemConfig(CUfunction function, CUsharedconfig config)
{
    (void)config;
    return cu_function_of(function);
}

CU_EXPORT CUresult cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CUcontext ctx;
    CUresult bad = cu_function_of((CUfunction)kernel);
    if (!bad)
        bad = cu_current(&ctx);
    if (bad || !function)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuFuncGetModule(CUmodule *module, CUfunction function)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !module)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *module = function->module;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuFuncGetName(const char **name, CUfunction function)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !name)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *name = function->name;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuKernelGetName(const char **name, CUkernel kernel)
{
    return cuFuncGetName(name, (CUfunction)kernel);
}

CU_EXPORT CUresult cuFuncGetParamInfo(CUfunction function, size_t index, size_t *offset, size_t *bytes)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !offset || index >= function->param_count)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *offset = function->params[index].offset;
    if (bytes)
        *bytes = function->params[index].bytes;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *bytes)
{
    return cuFuncGetParamInfo((CUfunction)kernel, index, offset, bytes);
}

CU_EXPORT CUresult cuFuncIsLoaded(CUfunctionLoadingState *state, CUfunction function)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !state)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *state = (CUfunctionLoadingState)1;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuFuncLoad(CUfunction function)
{
    CUcontext ctx;
    CUresult bad = cu_function_of(function);
    if (!bad)
        bad = cu_current(&ctx);
    return bad ? bad : cu_module_need(function->module, ctx);
}

/* ---- occupancy: threads, blocks and shared memory of an SM, without register pressure ---- */

CU_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction function, int block_size,
                                                                        size_t shared, unsigned int flags)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !blocks || block_size < 1 || flags > 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int rounded = (block_size + 31) / 32 * 32;
    const int by_threads = block_size > 1024 ? 0 : THREADS_PER_SM / rounded;
    const int by_shared = (int)((size_t)SHARED_PER_SM / (shared + RESERVED_SHARED));
    *blocks = by_threads < by_shared ? by_threads : by_shared;
    if (*blocks > BLOCKS_PER_SM)
        *blocks = BLOCKS_PER_SM;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction function, int block_size,
                                                               size_t shared)
{
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, function, block_size, shared, 0);
}

CU_EXPORT CUresult cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction function,
                                                             CUoccupancyB2DSize shared_of, size_t shared, int limit,
                                                             unsigned int flags)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    int best = 0;
    if (bad || !grid || !block)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int most = limit > 0 && limit < 1024 ? limit : 1024;
    for (int size = most; size > 0; size -= size % 32 ? size % 32 : 32) {
        int active;
        bad = cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(&active, function, size,
                                                                   shared_of ? shared_of(size) : shared, flags);
        if (bad)
            return bad;
        if (active * size > best) {
            best = active * size;
            *block = size;
            *grid = active * cu_card(ctx)->config.sms;
        }
    }
    return best ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction function,
                                                    CUoccupancyB2DSize shared_of, size_t shared, int limit)
{
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, function, shared_of, shared, limit, 0);
}

CU_EXPORT CUresult cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction function, int blocks, int block_size)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !bytes || blocks < 1 || block_size < 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const size_t each = (size_t)SHARED_PER_SM / (size_t)blocks;
    *bytes = each > RESERVED_SHARED ? each - RESERVED_SHARED : 0;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuOccupancyMaxPotentialClusterSize(int *size, CUfunction function, const CUlaunchConfig *config)
{
    const CUresult bad = cu_function_of(function);
    if (bad || !size || !config)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *size = 8;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (!bad)
        bad = cu_function_of(function);
    if (bad || !count || !config)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *count = cu_card(ctx)->config.sms / 8;
    return CUDA_SUCCESS;
}
