/* Count, index and handles: the tenant sees the share's cards, numbered from 0 in the driver's order.
 *
 * In a container the device nodes already hide the others, so this changes nothing there; on a bare machine
 * (`vcuda run`) the driver shows every card. The driver's list is read at each question: cards may fall off. */
#include "nvml/devices.h"

#include <string.h>

#define VC__MAX_DEVICES 64

int vc_card_of_handle(nvmlDevice_t device)
{
    char uuid[VC_NVML_UUID_BYTES];
    if (!vc_nvml_real.nvmlDeviceGetUUID || vc_nvml_real.nvmlDeviceGetUUID(device, uuid, sizeof uuid) != NVML_SUCCESS)
        return -1;
    return vc_regions_card(vc_regions_get(), uuid);
}

/* Whether a top-level device is a card of the share, or the parent of a MIG instance that is. */
static bool is_visible(nvmlDevice_t device)
{
    if (vc_regions_get()->lost || vc_card_of_handle(device) >= 0)
        return true; /* limits that can't be read may name it: hide none */
    unsigned int instances = 0;
    if (!vc_nvml_real.nvmlDeviceGetMaxMigDeviceCount || !vc_nvml_real.nvmlDeviceGetMigDeviceHandleByIndex ||
        vc_nvml_real.nvmlDeviceGetMaxMigDeviceCount(device, &instances) != NVML_SUCCESS)
        return false;
    for (unsigned int index = 0; index < instances; index++) {
        nvmlDevice_t instance;
        if (vc_nvml_real.nvmlDeviceGetMigDeviceHandleByIndex(device, index, &instance) == NVML_SUCCESS &&
            vc_card_of_handle(instance) >= 0)
            return true;
    }
    return false;
}

/* The driver's indices of the visible devices; their number in *count. Returns the driver's error, if any. */
static nvmlReturn_t visible_devices(unsigned int *indices, unsigned int *count)
{
    unsigned int all = 0;
    *count = 0;
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetCount_v2(&all);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < all && *count < VC__MAX_DEVICES; index++) {
        nvmlDevice_t device;
        /* A card that can't be opened is not ours to judge: its handle call gives the driver's error. */
        if (vc_nvml_real.nvmlDeviceGetHandleByIndex_v2(index, &device) != NVML_SUCCESS || is_visible(device))
            indices[(*count)++] = index;
    }
    return result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetCount_v2(unsigned int *count)
{
    unsigned int indices[VC__MAX_DEVICES], visible;
    if (!count)
        return vc_nvml_real.nvmlDeviceGetCount_v2(count);
    nvmlReturn_t result = visible_devices(indices, &visible);
    if (result == NVML_SUCCESS)
        *count = visible;
    return result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetCount(unsigned int *count)
{
    return vc_nvml_real.nvmlDeviceGetCount_v2 ? vc_hook_nvmlDeviceGetCount_v2(count) : vc_nvml_real.nvmlDeviceGetCount(count);
}

nvmlReturn_t vc_hook_nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    unsigned int indices[VC__MAX_DEVICES], visible;
    nvmlReturn_t result = visible_devices(indices, &visible);
    if (result != NVML_SUCCESS)
        return result;
    return index < visible ? vc_nvml_real.nvmlDeviceGetHandleByIndex_v2(indices[index], device) : NVML_ERROR_INVALID_ARGUMENT;
}

/* Not by the driver's own old call: where that jumps to the newer one's exported name, ours would count among the visible again. */
nvmlReturn_t vc_hook_nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return vc_hook_nvmlDeviceGetHandleByIndex_v2(index, device);
}

nvmlReturn_t vc_hook_nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    unsigned int indices[VC__MAX_DEVICES], visible, really;
    if (!index)
        return vc_nvml_real.nvmlDeviceGetIndex(device, index);
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetIndex(device, &really);
    if (result != NVML_SUCCESS || vc_card_of_handle(device) < 0) {
        if (result == NVML_SUCCESS)
            *index = really;
        return result;
    }
    char uuid[VC_NVML_UUID_BYTES];
    if (vc_nvml_real.nvmlDeviceGetUUID(device, uuid, sizeof uuid) == NVML_SUCCESS && strncmp(uuid, "MIG-", 4) == 0) {
        *index = really; /* counts within its parent */
        return result;
    }
    result = visible_devices(indices, &visible);
    for (unsigned int ours = 0; result == NVML_SUCCESS && ours < visible; ours++) {
        if (indices[ours] == really) {
            *index = ours;
            return result;
        }
    }
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : result;
}

/* A card outside the share is not there. */
static nvmlReturn_t only_visible(nvmlReturn_t result, nvmlDevice_t *device)
{
    if (result == NVML_SUCCESS && !is_visible(*device)) {
        *device = NULL;
        return NVML_ERROR_NOT_FOUND;
    }
    return result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    return only_visible(vc_nvml_real.nvmlDeviceGetHandleByUUID(uuid, device), device);
}

nvmlReturn_t vc_hook_nvmlDeviceGetHandleByUUIDV(const void *uuid, nvmlDevice_t *device)
{
    return only_visible(vc_nvml_real.nvmlDeviceGetHandleByUUIDV(uuid, device), device);
}

nvmlReturn_t vc_hook_nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    return only_visible(vc_nvml_real.nvmlDeviceGetHandleBySerial(serial, device), device);
}

nvmlReturn_t vc_hook_nvmlDeviceGetHandleByPciBusId(const char *bus, nvmlDevice_t *device)
{
    return only_visible(vc_nvml_real.nvmlDeviceGetHandleByPciBusId(bus, device), device);
}

nvmlReturn_t vc_hook_nvmlDeviceGetHandleByPciBusId_v2(const char *bus, nvmlDevice_t *device)
{
    return only_visible(vc_nvml_real.nvmlDeviceGetHandleByPciBusId_v2(bus, device), device);
}

/* Instances of the share's parent card may be other tenants'. */
nvmlReturn_t vc_hook_nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *instance)
{
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetMigDeviceHandleByIndex(device, index, instance);
    if (result != NVML_SUCCESS || vc_regions_get()->lost || vc_card_of_handle(device) >= 0 ||
        vc_card_of_handle(*instance) >= 0)
        return result;
    *instance = NULL;
    return NVML_ERROR_NOT_FOUND;
}

/* Lists of handles: asked of the driver with room for all, handed on without other tenants' cards. */
static nvmlReturn_t hand_on(nvmlReturn_t result, const nvmlDevice_t *all, unsigned int found, unsigned int *count,
                            nvmlDevice_t *devices)
{
    unsigned int room = *count, visible = 0;
    if (result != NVML_SUCCESS)
        return result;
    for (unsigned int index = 0; index < found && index < VC__MAX_DEVICES; index++) {
        if (!is_visible(all[index]))
            continue;
        if (devices && visible < room)
            devices[visible] = all[index];
        visible++;
    }
    *count = visible;
    return devices && visible > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

nvmlReturn_t vc_hook_nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, unsigned int level, unsigned int *count,
                                                      nvmlDevice_t *devices)
{
    nvmlDevice_t all[VC__MAX_DEVICES];
    unsigned int found = VC__MAX_DEVICES;
    if (!count)
        return vc_nvml_real.nvmlDeviceGetTopologyNearestGpus(device, level, count, devices);
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetTopologyNearestGpus(device, level, &found, all);
    return hand_on(result, all, found, count, devices);
}

nvmlReturn_t vc_hook_nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *devices)
{
    nvmlDevice_t all[VC__MAX_DEVICES];
    unsigned int found = VC__MAX_DEVICES;
    if (!count)
        return vc_nvml_real.nvmlSystemGetTopologyGpuSet(cpu, count, devices);
    nvmlReturn_t result = vc_nvml_real.nvmlSystemGetTopologyGpuSet(cpu, &found, all);
    return hand_on(result, all, found, count, devices);
}

nvmlReturn_t vc_hook_nvmlUnitGetDevices(void *unit, unsigned int *count, nvmlDevice_t *devices)
{
    nvmlDevice_t all[VC__MAX_DEVICES];
    unsigned int found = VC__MAX_DEVICES;
    if (!count)
        return vc_nvml_real.nvmlUnitGetDevices(unit, count, devices);
    nvmlReturn_t result = vc_nvml_real.nvmlUnitGetDevices(unit, &found, all);
    return hand_on(result, all, found, count, devices);
}
