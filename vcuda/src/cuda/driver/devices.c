/* Count and handles of devices: the tenant sees the share's cards, numbered from 0 in the driver's order.
 *
 * In a container the device nodes hide the others already, and CUDA_VISIBLE_DEVICES chose among them before we are asked;
 * on a bare machine (`vcuda run`) the driver shows every card. Handles stay the driver's own. */
#include "cuda/driver/cards.h"

/* The driver's ordinal of the tenant's `wanted`th device, or -1; how many there are in *visible. */
static int find(int wanted, int *visible)
{
    int all = 0, found = -1;
    *visible = 0;
    if (vc_real.cuDeviceGetCount(&all) != CUDA_SUCCESS)
        return -1;
    for (int ordinal = 0; ordinal < all; ordinal++) {
        CUdevice device;
        /* One that can't be had is not ours to judge: the driver's own error will say so. */
        if (vc_real.cuDeviceGet(&device, ordinal) == CUDA_SUCCESS && !vc_card_is_visible(device))
            continue;
        if ((*visible)++ == wanted)
            found = ordinal;
    }
    return found;
}

CUresult vc_hook_cuDeviceGetCount(int *count)
{
    CUresult result = vc_real.cuDeviceGetCount(count);
    if (result == CUDA_SUCCESS && vc_real.cuDeviceGet)
        find(-1, count);
    return result;
}

CUresult vc_hook_cuDeviceGet(CUdevice *device, int ordinal)
{
    int visible, found = ordinal < 0 || !vc_real.cuDeviceGetCount ? ordinal : find(ordinal, &visible);
    return vc_real.cuDeviceGet(device, found); /* -1: the driver says what is wrong with it */
}

CUresult vc_hook_cuDeviceGetByPCIBusId(CUdevice *device, const char *bus)
{
    CUdevice found;
    CUresult result = vc_real.cuDeviceGetByPCIBusId(device ? &found : device, bus);
    if (result != CUDA_SUCCESS)
        return result;
    if (!vc_card_is_visible(found))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = found;
    return result;
}
