/* Memory of the share: its limit as the total, the container's own use as used. */
#include "devices.h"
#include "vc_quota.h"

/* Whether the card is limited, and by how much. */
static bool share_of(nvmlDevice_t device, unsigned long long really_total, unsigned long long *total, unsigned long long *used)
{
    struct vc_region *region = vc_region_get();
    int card = vc_card_of_handle(region, device);
    if (card < 0)
        return false;
    uint64_t limit = vc_quota_limit(region, (uint32_t)card);
    if (limit == UINT64_MAX)
        return false;
    vc_slots_reap(region);
    uint64_t taken = vc_quota_used(region, (uint32_t)card);
    *total = limit < really_total ? limit : really_total;
    *used = taken < *total ? taken : *total;
    return true;
}

nvmlReturn_t vc_hook_nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetMemoryInfo(device, memory);
    unsigned long long total, used;
    if (result == NVML_SUCCESS && share_of(device, memory->total, &total, &used))
        *memory = (nvmlMemory_t){.total = total, .used = used, .free = total - used};
    return result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetMemoryInfo_v2(device, memory);
    unsigned long long total, used;
    /* total = reserved + used + free, as the real one; what firmware reserves is not part of a share. */
    if (result == NVML_SUCCESS && share_of(device, memory->total, &total, &used))
        *memory = (nvmlMemory_v2_t){.version = memory->version, .total = total, .used = used, .free = total - used};
    return result;
}
