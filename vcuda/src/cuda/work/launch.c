/* Hooks of every way to launch a kernel. */
#include "cuda/memory/code.h"
#include "cuda/work/work.h"

/* A kernel handle of cuLibraryGetKernel comes as a function too: both are keys of the same table. */
#define VC__LAUNCH(name, per_thread, parameters, arguments)                                            \
    CUresult vc_hook_##name parameters                                                                 \
    {                                                                                                  \
        struct vc_work work;                                                                           \
        CUresult refusal = vc_launch_pay(function, vc_work_stream(stream, per_thread));                 \
        if (VC_UNLIKELY(refusal != CUDA_SUCCESS))                                                      \
            return refusal;                                                                            \
        uint64_t blocks = (uint64_t)grid_x * grid_y * grid_z, threads = (uint64_t)block_x * block_y * block_z; \
        if (!vc_work_begin_kernel(&work, vc_work_stream(stream, per_thread), function, blocks, threads)) \
            return vc_real.name arguments;                                                             \
        return vc_work_end(&work, vc_real.name arguments);                                             \
    }

#define VC__KERNEL                                                                                       \
    CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z, unsigned int block_x, \
        unsigned int block_y, unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **parameters
#define VC__KERNEL_ARGUMENTS function, grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes, stream, parameters

VC__LAUNCH(cuLaunchKernel, false, (VC__KERNEL, void **extra), (VC__KERNEL_ARGUMENTS, extra))
VC__LAUNCH(cuLaunchKernel_ptsz, true, (VC__KERNEL, void **extra), (VC__KERNEL_ARGUMENTS, extra))
VC__LAUNCH(cuLaunchCooperativeKernel, false, (VC__KERNEL), (VC__KERNEL_ARGUMENTS))
VC__LAUNCH(cuLaunchCooperativeKernel_ptsz, true, (VC__KERNEL), (VC__KERNEL_ARGUMENTS))

/* A function's handle may come back as another's. */
CUresult vc_hook_cuModuleUnload(CUmodule module)
{
    CUresult result = vc_module_unload(module);
    vc_work_functions_gone();
    return result;
}

CUresult vc_hook_cuLibraryUnload(CUlibrary library)
{
    CUresult result = vc_library_unload(library);
    vc_work_functions_gone();
    return result;
}

static bool begin_configured(struct vc_work *work, const CUlaunchConfig *config, bool per_thread, CUfunction function)
{
    if (!config) /* the driver says what is wrong with it */
        return false;
    uint64_t blocks = (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ;
    uint64_t threads = (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ;
    return vc_work_begin_kernel(work, vc_work_stream(config->hStream, per_thread), function, blocks, threads);
}

CUresult vc_hook_cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    struct vc_work work;
    CUresult refusal = config ? vc_launch_pay(function, vc_work_stream(config->hStream, false)) : CUDA_SUCCESS;
    if (VC_UNLIKELY(refusal != CUDA_SUCCESS))
        return refusal;
    if (!begin_configured(&work, config, false, function))
        return vc_real.cuLaunchKernelEx(config, function, parameters, extra);
    return vc_work_end(&work, vc_real.cuLaunchKernelEx(config, function, parameters, extra));
}

CUresult vc_hook_cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra)
{
    struct vc_work work;
    CUresult refusal = config ? vc_launch_pay(function, vc_work_stream(config->hStream, true)) : CUDA_SUCCESS;
    if (VC_UNLIKELY(refusal != CUDA_SUCCESS))
        return refusal;
    if (!begin_configured(&work, config, true, function))
        return vc_real.cuLaunchKernelEx_ptsz(config, function, parameters, extra);
    return vc_work_end(&work, vc_real.cuLaunchKernelEx_ptsz(config, function, parameters, extra));
}

/* The launches before CUDA 4: the block's shape was set on the function, so the grid alone tells sizes apart. */
CUresult vc_hook_cuLaunch(CUfunction function)
{
    struct vc_work work;
    CUresult refusal = vc_launch_pay(function, CU_STREAM_LEGACY);
    if (VC_UNLIKELY(refusal != CUDA_SUCCESS))
        return refusal;
    if (!vc_work_begin_kernel(&work, CU_STREAM_LEGACY, function, 1, 0))
        return vc_real.cuLaunch(function);
    return vc_work_end(&work, vc_real.cuLaunch(function));
}

CUresult vc_hook_cuLaunchGrid(CUfunction function, int grid_width, int grid_height)
{
    struct vc_work work;
    CUresult refusal = vc_launch_pay(function, CU_STREAM_LEGACY);
    if (VC_UNLIKELY(refusal != CUDA_SUCCESS))
        return refusal;
    if (!vc_work_begin_kernel(&work, CU_STREAM_LEGACY, function, (uint64_t)(int64_t)grid_width * (uint64_t)grid_height, 0))
        return vc_real.cuLaunchGrid(function, grid_width, grid_height);
    return vc_work_end(&work, vc_real.cuLaunchGrid(function, grid_width, grid_height));
}

CUresult vc_hook_cuLaunchGridAsync(CUfunction function, int grid_width, int grid_height, CUstream stream)
{
    struct vc_work work;
    CUresult refusal = vc_launch_pay(function, vc_work_stream(stream, false));
    if (VC_UNLIKELY(refusal != CUDA_SUCCESS))
        return refusal;
    uint64_t blocks = (uint64_t)(int64_t)grid_width * (uint64_t)grid_height;
    if (!vc_work_begin_kernel(&work, vc_work_stream(stream, false), function, blocks, 0))
        return vc_real.cuLaunchGridAsync(function, grid_width, grid_height, stream);
    return vc_work_end(&work, vc_real.cuLaunchGridAsync(function, grid_width, grid_height, stream));
}

/* --- one launch on several cards: each part passes the gate of its own card --- */

enum { MOST_PARTS = 32 };

static bool begin_part(struct vc_work *work, const CUDA_LAUNCH_PARAMS *part)
{
    uint64_t blocks = (uint64_t)part->gridDimX * part->gridDimY * part->gridDimZ;
    uint64_t threads = (uint64_t)part->blockDimX * part->blockDimY * part->blockDimZ;
    return vc_work_begin_kernel(work, part->hStream, part->function, blocks, threads);
}

CUresult vc_hook_cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *launches, unsigned int count, unsigned int flags)
{
    struct vc_work works[MOST_PARTS];
    bool begun[MOST_PARTS] = {false};
    CUresult refusal = CUDA_SUCCESS;
    for (unsigned i = 0; launches && i < count && i < MOST_PARTS && refusal == CUDA_SUCCESS; i++)
        refusal = vc_launch_pay(launches[i].function, launches[i].hStream);
    if (refusal != CUDA_SUCCESS)
        return refusal;
    /* These calls accept no NULL stream; a wrong one is the driver's to refuse. */
    for (unsigned i = 0; launches && i < count && i < MOST_PARTS; i++)
        begun[i] = launches[i].hStream && begin_part(&works[i], &launches[i]);
    CUresult result = vc_real.cuLaunchCooperativeKernelMultiDevice(launches, count, flags);
    for (unsigned i = 0; i < MOST_PARTS; i++)
        if (begun[i])
            vc_work_end(&works[i], result);
    return result;
}
