/* The CUDA side of preload.h: whether the driver has a hooked function. */
#include <string.h>

#include "cuda/driver/hooks.h"
#include "preload/reals.h"

bool vc_preload_cuda_has(const char *name)
{
#define VC_HOOK(hooked, parameters, arguments) \
    if (strcmp(name, #hooked) == 0)            \
        return vc_real.hooked != NULL;
#define VC_REAL(hooked, parameters)
#include "cuda/driver/hooks.def"
    return false;
}

void vc_preload_cuda_load(void)
{
    if (!vc_load_acquire(&vc_real.ready))
        vc_real_load();
}
