/* The exported functions: each finds the driver's own, passes through without a share, else asks our hook. */
#include "hooks.h"

/* Declared first: -Wmissing-prototypes users and the compiler agree on one signature per name. */
#define VC_HOOK(name, parameters, arguments) VC_EXPORT CUresult name parameters;
#define VC_REAL(name, parameters)
#include "hooks.def"
#undef VC_HOOK

#define VC_HOOK(name, parameters, arguments)                      \
    CUresult name parameters                                      \
    {                                                             \
        if (VC_UNLIKELY(!vc_load_acquire(&vc_real.ready)))        \
            vc_real_load();                                       \
        if (VC_UNLIKELY(!vc_real.name))                           \
            return CUDA_ERROR_NOT_FOUND;                          \
        if (vc_region_get()->state == VC_REGION_ABSENT)           \
            return vc_real.name arguments;                        \
        return vc_hook_##name arguments;                          \
    }
#include "hooks.def"
