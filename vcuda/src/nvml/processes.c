/* Process lists: the container's own processes, by the PIDs that they know each other by, with the bytes of the ledger. */
#include "nvml/devices.h"
#include "nvml/tenants.h"

enum list_kind { LIST_COMPUTE, LIST_OTHER };

/* Fill `processes`, as many as the card has; false: let the driver answer (not a card of the share, limits unreadable). */
static bool answer(nvmlDevice_t device, enum list_kind kind, struct vc_tenant *processes, unsigned int *count)
{
    int card = vc_card_of_handle(device);
    if (card < 0)
        return false;
    *count = kind == LIST_COMPUTE ? vc_tenants(vc_card((uint32_t)card), processes) : 0;
    return true;
}


static nvmlReturn_t list_v1(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_v1_t *buffer, enum list_kind kind,
                            nvmlReturn_t (*call)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v1_t *))
{
    struct vc_tenant processes[VC_MAX_SLOTS];
    unsigned int count = 0;
    if (!room || !answer(device, kind, processes, &count))
        return call(device, room, buffer);
    nvmlReturn_t result = vc_nvml_fits(room, buffer, count);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < count; index++)
        buffer[index] = (nvmlProcessInfo_v1_t){.pid = processes[index].pid, .usedGpuMemory = processes[index].bytes};
    return result;
}

static nvmlReturn_t list(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *buffer, enum list_kind kind,
                         nvmlReturn_t (*call)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *))
{
    struct vc_tenant processes[VC_MAX_SLOTS];
    unsigned int count = 0;
    if (!room || !answer(device, kind, processes, &count))
        return call(device, room, buffer);
    nvmlReturn_t result = vc_nvml_fits(room, buffer, count);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < count; index++)
        buffer[index] = (nvmlProcessInfo_t){.pid = processes[index].pid, .usedGpuMemory = processes[index].bytes,
                                            .gpuInstanceId = VC_NVML_NO_INSTANCE, .computeInstanceId = VC_NVML_NO_INSTANCE};
    return result;
}

#define VC__LIST(name, type, function, kind)                                                             \
    nvmlReturn_t vc_hook_##name(nvmlDevice_t device, unsigned int *count, type *processes)               \
    {                                                                                                    \
        return function(device, count, processes, kind, vc_nvml_real.name);                              \
    }

VC__LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, list_v1, LIST_COMPUTE)
VC__LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t, list, LIST_COMPUTE)
VC__LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, list, LIST_COMPUTE)
VC__LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, list_v1, LIST_OTHER)
VC__LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t, list, LIST_OTHER)
VC__LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, list, LIST_OTHER)
VC__LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, list_v1, LIST_OTHER)
VC__LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t, list, LIST_OTHER)
VC__LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, list, LIST_OTHER)

nvmlReturn_t vc_hook_nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list)
{
    struct vc_tenant processes[VC_MAX_SLOTS];
    unsigned int count = 0;
    if (!list || vc_card_of_handle(device) < 0)
        return vc_nvml_real.nvmlDeviceGetRunningProcessDetailList(device, list);
    /* Not asked of the driver, which would fill a newer version with other containers' processes. */
    if (list->version != VC_NVML_VERSION(nvmlProcessDetailList_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (list->mode > NVML_PROCESS_MODE_ALL)
        return NVML_ERROR_INVALID_ARGUMENT;
    bool all = list->mode == NVML_PROCESS_MODE_COMPUTE || list->mode == NVML_PROCESS_MODE_ALL;
    answer(device, all ? LIST_COMPUTE : LIST_OTHER, processes, &count);
    nvmlReturn_t result = vc_nvml_fits(&list->numProcArrayEntries, list->procArray, count);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < count; index++)
        list->procArray[index] = (nvmlProcessDetail_v1_t){
            .pid = processes[index].pid,
            .usedGpuMemory = processes[index].bytes,
            .gpuInstanceId = VC_NVML_NO_INSTANCE,
            .computeInstanceId = VC_NVML_NO_INSTANCE,
        };
    return result;
}

/* Sessions of the video encoder and of frame capture carry host PIDs, which nobody here can attribute: none is listed. */
#define VC__NO_SESSIONS(name)                                                                   \
    nvmlReturn_t vc_hook_##name(nvmlDevice_t device, unsigned int *count, void *sessions)       \
    {                                                                                           \
        if (!count || vc_card_of_handle(device) < 0)                           \
            return vc_nvml_real.name(device, count, sessions);                                  \
        unsigned int really = 0;                                                                \
        nvmlReturn_t result = vc_nvml_real.name(device, &really, NULL);                         \
        if (result == NVML_SUCCESS || result == NVML_ERROR_INSUFFICIENT_SIZE) {                 \
            *count = 0;                                                                         \
            return NVML_SUCCESS;                                                                \
        }                                                                                       \
        return result;                                                                          \
    }

VC__NO_SESSIONS(nvmlDeviceGetEncoderSessions)
VC__NO_SESSIONS(nvmlDeviceGetFBCSessions)
