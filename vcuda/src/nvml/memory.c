/* Memory of the share: its limit as the total, the container's own use as used. */
#include "nvml/devices.h"
#include "region/quota.h"

/* Whether the card is limited, and by how much. */
static bool share_of(nvmlDevice_t device, unsigned long long really_total, unsigned long long *total, unsigned long long *used)
{
    int number = vc_card_of_handle(device);
    if (number < 0)
        return false;
    const struct vc_card *card = vc_card((uint32_t)number);
    uint64_t limit = vc_quota_limit(card->region, card->index);
    if (limit == UINT64_MAX)
        return false;
    vc_slots_reap(card->region);
    uint64_t taken = vc_quota_used(card->region, card->index);
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

/* The window of the bus is the whole card's; what others have mapped through it is not told. */
nvmlReturn_t vc_hook_nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetBAR1MemoryInfo(device, memory);
    unsigned long long total, used;
    if (result == NVML_SUCCESS && share_of(device, UINT64_MAX, &total, &used)) {
        memory->bar1Used = memory->bar1Used < used ? memory->bar1Used : used;
        memory->bar1Free = memory->bar1Total - memory->bar1Used;
    }
    return result;
}

/* Of a MIG instance that is shared. */
static nvmlReturn_t narrow_attributes(nvmlDevice_t device, nvmlReturn_t result, nvmlDeviceAttributes_t *attributes)
{
    unsigned long long total, used;
    if (result == NVML_SUCCESS && share_of(device, attributes->memorySizeMB << 20, &total, &used))
        attributes->memorySizeMB = total >> 20;
    return result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    return narrow_attributes(device, vc_nvml_real.nvmlDeviceGetAttributes(device, attributes), attributes);
}

nvmlReturn_t vc_hook_nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    return narrow_attributes(device, vc_nvml_real.nvmlDeviceGetAttributes_v2(device, attributes), attributes);
}
