/* The exported NVML functions: pass through without a share or for the driver itself, else ask our hook. */
#include "nvml/hooks.h"

#define VC_HOOK(name, parameters, arguments) VC_EXPORT nvmlReturn_t name parameters;
#define VC_REAL(name, parameters)
#define VC_SETTER(name) VC_EXPORT nvmlReturn_t name VC_SETTER_PARAMETERS;
#include "hooks.def"
#undef VC_HOOK
#undef VC_SETTER

static bool passes_through(const void *return_address)
{
    return vc_nvml_called_by_driver(return_address) || !vc_regions_get()->any;
}

#define VC__BODY(name, parameters, arguments, otherwise)          \
    nvmlReturn_t name parameters                                  \
    {                                                             \
        if (VC_UNLIKELY(!vc_load_acquire(&vc_nvml_real.ready)))   \
            vc_nvml_load();                                       \
        if (VC_UNLIKELY(!vc_nvml_real.name))                      \
            return NVML_ERROR_FUNCTION_NOT_FOUND;                 \
        if (passes_through(__builtin_return_address(0)))          \
            return vc_nvml_real.name arguments;                   \
        return otherwise;                                         \
    }
#define VC_HOOK(name, parameters, arguments) VC__BODY(name, parameters, arguments, vc_hook_##name arguments)
#define VC_SETTER(name) VC__BODY(name, VC_SETTER_PARAMETERS, VC_SETTER_ARGUMENTS, NVML_ERROR_NO_PERMISSION)
#include "hooks.def"
