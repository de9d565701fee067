/* Green contexts: parts of their card's primary context, which they keep. */
#include "cuda/driver/owner.h"
#include "cuda/context/context.h"
#include "cuda/driver/cards.h"
#include "cuda/work/lanes.h"
#include "base/table.h"

struct green {
    uint64_t key; /* the green context */
    CUdevice device;
    CUcontext primary;
};
VC_TABLE(greens, struct green);

struct creation {
    CUgreenCtx *green;
    CUdevResourceDesc resources;
    CUdevice device;
    unsigned int flags;
};

static CUresult create(void *argument, CUcontext *primary)
{
    const struct creation *creation = argument;
    CUresult result =
        vc_real.cuGreenCtxCreate(creation->green, creation->resources, creation->device, creation->flags);
    *primary = NULL;
    if (result == CUDA_SUCCESS && vc_real.cuDevicePrimaryCtxRetain(primary, creation->device) == CUDA_SUCCESS)
        vc_real.cuDevicePrimaryCtxRelease_v2(creation->device); /* the green context keeps it: only its handle is wanted */
    return result;
}

static void destroy(void *argument, CUdevice device)
{
    const struct creation *creation = argument;
    (void)device;
    vc_real.cuGreenCtxDestroy(*creation->green);
    *creation->green = NULL;
}

CUresult vc_hook_cuGreenCtxCreate(CUgreenCtx *context, CUdevResourceDesc resources, CUdevice device, unsigned int flags)
{
    struct creation creation = {context, resources, device, flags};
    if (!context)
        return vc_real.cuGreenCtxCreate(context, resources, device, flags);
    vc_regions_get();
    CUcontext primary = NULL;
    CUresult result = vc_primary_keep(device, &(struct vc_keeper){create, destroy, &creation}, &primary);
    if (result != CUDA_SUCCESS)
        return result;
    struct green entry = {(uint64_t)(uintptr_t)*context, device, primary};
    if (!vc_table_put(&greens, &entry)) {
        destroy(&creation, device);
        vc_primary_ended(device);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

CUresult vc_hook_cuGreenCtxDestroy(CUgreenCtx context)
{
    struct green entry;
    vc_regions_get();
    bool known = vc_table_take(&greens, (uint64_t)(uintptr_t)context, &entry);
    CUresult result = vc_real.cuGreenCtxDestroy(context);
    if (known && result == CUDA_SUCCESS)
        vc_primary_ended(entry.device);
    else if (known)
        vc_table_put(&greens, &entry);
    return result;
}

/* Contexts made of green ones are distinct handles, in which applications allocate; their memory is the primary context's. */
CUresult vc_hook_cuCtxFromGreenCtx(CUcontext *context, CUgreenCtx green)
{
    CUresult result = vc_real.cuCtxFromGreenCtx(context, green);
    struct green entry;
    vc_regions_get();
    if (result == CUDA_SUCCESS && vc_table_get(&greens, (uint64_t)(uintptr_t)green, &entry))
        vc_owner_set(*context, entry.primary);
    if (result == CUDA_SUCCESS) { /* it has default streams of its own */
        vc_cards_forget_contexts();
        vc_lanes_new_epoch();
    }
    return result;
}
