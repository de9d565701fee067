/* The NVML side of preload.h: whether the library has a hooked function. */
#include <string.h>

#include "nvml/hooks.h"
#include "preload/reals.h"

bool vc_preload_nvml_has(const char *name)
{
#define VC_HOOK(hooked, parameters, arguments) \
    if (strcmp(name, #hooked) == 0)            \
        return vc_nvml_real.hooked != NULL;
#define VC_REAL(hooked, parameters)
#define VC_SETTER(hooked)           \
    if (strcmp(name, #hooked) == 0) \
        return vc_nvml_real.hooked != NULL;
#include "nvml/hooks.def"
    return false;
}

void vc_preload_nvml_load(void)
{
    if (!vc_load_acquire(&vc_nvml_real.ready))
        vc_nvml_load();
}
