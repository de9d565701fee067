/* Accounting mode: the container's running processes. The driver's records name host PIDs, of all containers. */
#include "nvml/devices.h"
#include "nvml/tenants.h"
#include "base/clock.h"

/* NVML_SUCCESS if the card keeps accounts and is the share's; *card is then its index. */
static nvmlReturn_t accounts(nvmlDevice_t device, int *card)
{
    unsigned int enabled = 0;
    *card = vc_card_of_handle(device);
    if (!vc_nvml_real.nvmlDeviceGetAccountingMode)
        return NVML_ERROR_NOT_SUPPORTED;
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetAccountingMode(device, &enabled);
    return result == NVML_SUCCESS && !enabled ? NVML_ERROR_NOT_SUPPORTED : result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    int card;
    nvmlReturn_t result = accounts(device, &card);
    if (result != NVML_SUCCESS || card < 0 || !count)
        return vc_nvml_real.nvmlDeviceGetAccountingPids(device, count, pids);
    struct vc_tenant processes[VC_MAX_SLOTS];
    unsigned int found = vc_tenants(vc_card((uint32_t)card), processes);
    result = vc_nvml_fits(count, pids, found);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < found; index++)
        pids[index] = processes[index].pid;
    return result;
}

/* What the region knows of the process: what it does not, its peak and its memory traffic, is "not available". */
static bool stats_of(int card, unsigned int pid, nvmlAccountingStats_t *stats)
{
    struct vc_tenant processes[VC_MAX_SLOTS];
    unsigned int count = vc_tenants(vc_card((uint32_t)card), processes);
    for (unsigned int index = 0; index < count; index++) {
        if (processes[index].pid != pid)
            continue;
        uint64_t lived_ns = vc_now_ns() - processes[index].since_ns;
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        double busy = lived_ns ? 100.0 * (double)processes[index].gpu_ns / (double)lived_ns : 0;
        *stats = (nvmlAccountingStats_t){
            .gpuUtilization = busy > 100 ? 100 : (unsigned int)busy,
            .memoryUtilization = (unsigned int)VC_NVML_NOT_AVAILABLE,
            .maxMemoryUsage = (unsigned long long)VC_NVML_NOT_AVAILABLE,
            .startTime = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u - lived_ns / 1000u,
            .isRunning = 1,
        };
        return true;
    }
    return false;
}

nvmlReturn_t vc_hook_nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
    int card;
    nvmlReturn_t result = accounts(device, &card);
    if (result != NVML_SUCCESS || card < 0 || !stats)
        return vc_nvml_real.nvmlDeviceGetAccountingStats(device, pid, stats);
    return stats_of(card, pid, stats) ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t vc_hook_nvmlDeviceGetAccountingStats_v2(nvmlDevice_t device, nvmlAccountingStats_v2_t *stats)
{
    int card;
    nvmlAccountingStats_t found;
    nvmlReturn_t result = accounts(device, &card);
    if (result != NVML_SUCCESS || card < 0 || !stats)
        return vc_nvml_real.nvmlDeviceGetAccountingStats_v2(device, stats);
    if (!stats_of(card, stats->pid, &found))
        return NVML_ERROR_NOT_FOUND;
    *stats = (nvmlAccountingStats_v2_t){
        .pid = stats->pid,
        .isRunning = 1,
        .gpuUtilization = found.gpuUtilization,
        .memoryUtilization = found.memoryUtilization,
        .maxMemoryUsage = found.maxMemoryUsage,
        .startTime = found.startTime,
    };
    return NVML_SUCCESS;
}
