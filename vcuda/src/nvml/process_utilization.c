/* Utilization per process, in the two forms that NVML has: the container's processes only, by its own PIDs. */
#include "nvml/devices.h"
#include "nvml/utilization.h"

/* Both forms: a call without room tells the number, and "not found" means nothing is newer. */
static nvmlReturn_t sampled(unsigned int found, unsigned int *count, const void *array)
{
    if (found == 0) {
        *count = 0;
        return NVML_ERROR_NOT_FOUND;
    }
    return array ? vc_nvml_fits(count, array, found) : (*count = found, NVML_ERROR_INSUFFICIENT_SIZE);
}

/* The driver's refusal for this device (MIG instances have no such figures), if it refuses. */
static nvmlReturn_t refusal(nvmlDevice_t device)
{
    nvmlUtilization_t rates;
    if (!vc_nvml_real.nvmlDeviceGetUtilizationRates)
        return NVML_SUCCESS;
    return vc_nvml_real.nvmlDeviceGetUtilizationRates(device, &rates);
}

nvmlReturn_t vc_hook_nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                     unsigned int *count, unsigned long long after_us)
{
    if (!count || vc_card_of_handle(device) < 0)
        return vc_nvml_real.nvmlDeviceGetProcessUtilization(device, samples, count, after_us);
    struct vc_busy_process busy[VC_MAX_SLOTS];
    nvmlReturn_t result = refusal(device);
    if (result != NVML_SUCCESS)
        return result;
    unsigned int found = vc_busy_processes(device, after_us, busy);
    result = sampled(found, count, samples);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < found; index++)
        samples[index] = (nvmlProcessUtilizationSample_t){
            .pid = busy[index].pid,
            .timeStamp = busy[index].stamp_us,
            .smUtil = busy[index].gpu,
            .memUtil = busy[index].memory,
        };
    return result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_v1_t *list)
{
    if (!list || vc_card_of_handle(device) < 0)
        return vc_nvml_real.nvmlDeviceGetProcessesUtilizationInfo(device, list);
    /* Not asked of the driver, which would fill a newer version with other containers' processes. */
    if (list->version != VC_NVML_VERSION(nvmlProcessesUtilizationInfo_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    struct vc_busy_process busy[VC_MAX_SLOTS];
    nvmlReturn_t result = refusal(device);
    if (result != NVML_SUCCESS)
        return result;
    unsigned int found = vc_busy_processes(device, list->lastSeenTimeStamp, busy);
    result = sampled(found, &list->processSamplesCount, list->procUtilArray);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < found; index++)
        list->procUtilArray[index] = (nvmlProcessUtilizationInfo_v1_t){
            .timeStamp = busy[index].stamp_us,
            .pid = busy[index].pid,
            .smUtil = busy[index].gpu,
            .memUtil = busy[index].memory,
        };
    return result;
}
