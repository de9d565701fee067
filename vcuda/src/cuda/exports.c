/* The exported functions: each finds the driver's own, passes through without a share, else asks our hook. */
#include "gate/gate.h"
#include "cuda/driver/hooks.h"
#include "cuda/memory/context_memory.h"
#include "cuda/work/work.h"

/* Declared first: -Wmissing-prototypes users and the compiler agree on one signature per name. */
#define VC_HOOK(name, parameters, arguments) VC_EXPORT CUresult name parameters;
#define VC_REAL(name, parameters)
#include "cuda/driver/hooks.def"
#undef VC_HOOK

/* `refusal`: of what the share does not let be asked at all. */
#define VC__BODY_UNLESS(refusal, name, arguments)                 \
    {                                                             \
        if (VC_UNLIKELY(!vc_load_acquire(&vc_real.ready)))        \
            vc_real_load();                                       \
        if (VC_UNLIKELY(!vc_real.name))                           \
            return CUDA_ERROR_NOT_FOUND;                          \
        if (!vc_regions_get()->any)                               \
            return vc_real.name arguments;                        \
        CUresult refused = refusal;                               \
        if (VC_UNLIKELY(refused != CUDA_SUCCESS))                 \
            return refused;                                       \
        return vc_hook_##name arguments;                          \
    }
#define VC__BODY(name, arguments) VC__BODY_UNLESS(CUDA_SUCCESS, name, arguments)
#define VC__WORK_BODY(name, arguments) VC__BODY_UNLESS(vc_work_refusal(), name, arguments)
#define VC_HOOK(name, parameters, arguments) CUresult name parameters VC__BODY(name, arguments)

/* No call but jumps, so that no argument is ever saved: `python -m benchmarks.launch_cost` shows what it compiles to. */
#define VC_HOOK_WORK(name, parameters, arguments)                                                        \
    static __attribute__((noinline)) CUresult asked_##name parameters VC__WORK_BODY(name, arguments)     \
    CUresult name parameters                                                                             \
    {                                                                                                    \
        const struct vc_card_limit *limit = vc_regions_only_limit();                                      \
        if (VC_LIKELY(limit && !vc_gate_needed(limit)) && VC_LIKELY(vc_load_relaxed(&vc_real.name) != NULL)) \
            return vc_real.name arguments;                                                               \
        return asked_##name arguments;                                                                   \
    }

/* And a launch within its permit: one more. Only in a share of one card: in a forked child its limit is NULL until what belonged
 * to the parent is forgotten. */
#define VC_HOOK_LAUNCH(name, parameters, arguments)                                                      \
    static __attribute__((noinline)) CUresult asked_##name parameters VC__WORK_BODY(name, arguments)     \
    static __attribute__((noinline)) CUresult limited_##name parameters                                  \
    {                                                                                                    \
        if (VC_LIKELY(vc_frame_is_paid(function)) && VC_LIKELY(VC__PASSES_##name))                       \
            return vc_real.name arguments;                                                               \
        return asked_##name arguments;                                                                   \
    }                                                                                                    \
    CUresult name parameters                                                                             \
    {                                                                                                    \
        const struct vc_card_limit *limit = vc_regions_only_limit();                                      \
        if (VC_UNLIKELY(!limit) || VC_UNLIKELY(vc_load_relaxed(&vc_real.name) == NULL))                  \
            return asked_##name arguments;                                                               \
        if (VC_LIKELY(!vc_gate_needed(limit)) &&                                                         \
            ((VC_LIKELY(vc_frame_is_paid(function)) && VC_LIKELY(vc_stream_is_paid(VC__STREAM_##name))) || \
             (vc_load_relaxed(&limit->flags) & VC_CARD_WHOLE)))                                          \
            return vc_real.name arguments;                                                               \
        return limited_##name arguments;                                                                 \
    }
#define VC__STREAM_cuLaunchKernel vc_work_stream(stream, false)
#define VC__STREAM_cuLaunchKernel_ptsz vc_work_stream(stream, true)
#define VC__STREAM_cuLaunchCooperativeKernel VC__STREAM_cuLaunchKernel
#define VC__STREAM_cuLaunchCooperativeKernel_ptsz VC__STREAM_cuLaunchKernel_ptsz
#define VC__STREAM_cuLaunchKernelEx vc_work_stream(config ? config->hStream : NULL, false)
#define VC__STREAM_cuLaunchKernelEx_ptsz vc_work_stream(config ? config->hStream : NULL, true)

#define VC__PASSES(stream) \
    vc_work_passes(stream, function, (uint64_t)grid_x * grid_y * grid_z, (uint64_t)block_x * block_y * block_z)
#define VC__PASSES_cuLaunchKernel VC__PASSES(VC__STREAM_cuLaunchKernel)
#define VC__PASSES_cuLaunchKernel_ptsz VC__PASSES(VC__STREAM_cuLaunchKernel_ptsz)
#define VC__PASSES_cuLaunchCooperativeKernel VC__PASSES_cuLaunchKernel
#define VC__PASSES_cuLaunchCooperativeKernel_ptsz VC__PASSES_cuLaunchKernel_ptsz
#define VC__PASSES_CONFIGURED(stream)                                                                    \
    (config && vc_work_passes(stream, function, (uint64_t)config->gridDimX * config->gridDimY * config->gridDimZ, \
                              (uint64_t)config->blockDimX * config->blockDimY * config->blockDimZ))
#define VC__PASSES_cuLaunchKernelEx VC__PASSES_CONFIGURED(VC__STREAM_cuLaunchKernelEx)
#define VC__PASSES_cuLaunchKernelEx_ptsz VC__PASSES_CONFIGURED(VC__STREAM_cuLaunchKernelEx_ptsz)
#include "cuda/driver/hooks.def"
