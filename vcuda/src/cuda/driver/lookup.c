/* cuGetProcAddress: ask the driver, then exchange what it answers, by pointer, for the hook that stands before it.
 *
 * Never by name: the driver chose the version and the stream variant for the caller, and the pointer says which. */
#include <string.h>

#include "cuda/driver/hooks.h"
#include "base/log.h"

static void exchange(const char *symbol, void **function)
{
    if (!function || !*function)
        return;
    void *hook = vc_hook_for(*function);
    if (hook) {
        *function = hook;
        return;
    }
    if (!symbol || !vc_hooks_base_name(symbol, strlen(symbol)))
        return;
    /* A version of a hooked function that did not exist when we were built: it works, but nothing limits it. */
    if (vc_regions_get()->card_count > 0)
        vc_add_relaxed(&vc_card(0)->usage->unknown_symbols, 1);
    vc_log_once(VC_NOTICE_UNKNOWN_SYMBOL, "this driver has a version of %s that is newer than this build of vcuda: it is not limited",
                symbol);
}

CUresult vc_hook_cuGetProcAddress(const char *symbol, void **function, int version, uint64_t flags)
{
    CUresult result = vc_real.cuGetProcAddress(symbol, function, version, flags);
    if (result == CUDA_SUCCESS)
        exchange(symbol, function);
    return result;
}

CUresult vc_hook_cuGetProcAddress_v2(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    CUresult result = vc_real.cuGetProcAddress_v2(symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS)
        exchange(symbol, function);
    return result;
}

CUresult vc_hook_cuGetProcAddress_v2_ptsz(const char *symbol, void **function, int version, uint64_t flags, int *status)
{
    CUresult result = vc_real.cuGetProcAddress_v2_ptsz(symbol, function, version, flags, status);
    if (result == CUDA_SUCCESS)
        exchange(symbol, function);
    return result;
}
