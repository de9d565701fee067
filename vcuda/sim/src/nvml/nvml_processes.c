/* The processes on a card, in every form that NVML has lists of them. */
#include <stdlib.h>
#include <string.h>

#include "nvml_internal.h"

enum { MOST = SIM_MAX_PROCESSES * 2 };

typedef struct {
    nvmlDevice_t device; /* card or instance that it is on */
    sim_process_view view;
    int pid;
} entry;

/* The driver knows processes by their PIDs on the host, whoever asks. $VCUDA_SIM_PIDS of the asking process: `foreign` shows
 * numbers that no process has, as to a pod in which none of them is one of its own; `none` shows no process. */
static int pid_offset(void)
{
    const char *named = secure_getenv("VCUDA_SIM_PIDS");
    return !named ? 0 : !strcmp(named, "none") ? -1 : !strcmp(named, "foreign") ? SIM_UNKNOWN_PID : 0;
}

/* The processes on a card and its instances, or on an instance. Returns how many; *entries is to be freed. */
static int processes_on(nvmlDevice_t device, entry **entries)
{
    sim_process_view *views = calloc(SIM_MAX_PROCESSES, sizeof *views);
    const int offset = pid_offset();
    int count = 0;
    *entries = calloc(MOST, sizeof **entries);
    for (int i = 0; views && *entries && offset >= 0 && i < nv_card_count; i++) {
        if (i != device->index && nv_cards[i].parent != device->index)
            continue;
        const int found = sim_view_processes(nv_state, i, views, SIM_MAX_PROCESSES);
        for (int p = 0; p < found && count < MOST; p++)
            (*entries)[count++] = (entry){&nv_cards[i], views[p], views[p].host_pid + offset};
    }
    free(views);
    return count;
}

/* Part of what a context costs is nobody's: the card's total shows it, the list does not (H100, driver 580: 5.6 of 524 MiB). */
static unsigned long long bytes_of(const entry *process)
{
    const uint64_t unlisted = nv_state->config.cards[process->device->index].unlisted_bytes * (uint64_t)process->view.contexts;
    return process->view.context_bytes + process->view.memory_bytes - unlisted;
}

static unsigned gpu_instance_of(const entry *process)
{
    return process->device->parent < 0 ? NVML_NO_INSTANCE : (unsigned)process->device->gpu_instance;
}

static unsigned compute_instance_of(const entry *process)
{
    return process->device->parent < 0 ? NVML_NO_INSTANCE : (unsigned)process->device->compute_instance;
}

/* NVML's protocol for lists: *count is the room, then the number; too little room tells the number. */
static nvmlReturn_t room_for(unsigned found, unsigned *count, const void *array)
{
    const unsigned room = *count;
    *count = found;
    return found > room || (found && !array) ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t list_v1(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v1_t *infos)
{
    entry *entries;
    nvmlReturn_t result = nv_check(device, count != NULL);
    if (result != NVML_SUCCESS)
        return result;
    const int found = processes_on(device, &entries);
    result = room_for((unsigned)found, count, infos);
    for (int i = 0; result == NVML_SUCCESS && i < found; i++)
        infos[i] = (nvmlProcessInfo_v1_t){(unsigned)entries[i].pid, bytes_of(&entries[i])};
    free(entries);
    return result;
}

static nvmlReturn_t list_v2(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_v2_t *infos)
{
    entry *entries;
    nvmlReturn_t result = nv_check(device, count != NULL);
    if (result != NVML_SUCCESS)
        return result;
    const int found = processes_on(device, &entries);
    result = room_for((unsigned)found, count, infos);
    for (int i = 0; result == NVML_SUCCESS && i < found; i++)
        infos[i] = (nvmlProcessInfo_v2_t){(unsigned)entries[i].pid, bytes_of(&entries[i]),
                                          gpu_instance_of(&entries[i]), compute_instance_of(&entries[i])};
    free(entries);
    return result;
}

/* Graphics and MPS clients do not exist here. */
static nvmlReturn_t list_none(nvmlDevice_t device, unsigned *count)
{
    const nvmlReturn_t result = nv_check(device, count != NULL);
    if (result == NVML_SUCCESS)
        *count = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses(nvmlDevice_t device, unsigned *count,
                                                           nvmlProcessInfo_v1_t *infos)
{
    return list_v1(device, count, infos);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned *count,
                                                              nvmlProcessInfo_v2_t *infos)
{
    return list_v2(device, count, infos);
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count,
                                                              nvmlProcessInfo_v2_t *infos)
{
    return list_v2(device, count, infos);
}

#define NV_EMPTY_LIST(name)                                                                                            \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, unsigned *count, void *infos)                                      \
    {                                                                                                                  \
        (void)infos;                                                                                                   \
        return list_none(device, count);                                                                               \
    }
NV_EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses)
NV_EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2)
NV_EMPTY_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3)
NV_EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses)
NV_EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NV_EMPTY_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3)

NVML_API nvmlReturn_t nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list)
{
    entry *entries;
    nvmlReturn_t result = nv_check(device, list != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (list->version != NVML_STRUCT_VERSION(nvmlProcessDetailList_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (list->mode > 2) /* compute, graphics, MPS */
        return NVML_ERROR_INVALID_ARGUMENT;
    const int found = list->mode == 0 ? processes_on(device, &entries) : (entries = NULL, 0);
    result = room_for((unsigned)found, &list->count, list->entries);
    for (int i = 0; result == NVML_SUCCESS && i < found; i++)
        list->entries[i] =
            (nvmlProcessDetail_v1_t){(unsigned)entries[i].pid, bytes_of(&entries[i]),
                                     gpu_instance_of(&entries[i]), compute_instance_of(&entries[i]), 0};
    free(entries);
    return result;
}

/* ---- utilization per process ---- */

/* Write up to `room` samples newer than `after_us`; returns how many there are. */
static unsigned process_samples(nvmlDevice_t device, unsigned long long after_us, unsigned room,
                                nvmlProcessUtilizationInfo_v1_t *infos)
{
    uint64_t from, to;
    entry *entries;
    unsigned written = 0;
    nv_window(&from, &to);
    const unsigned long long stamp = nv_wall_us(to);
    const int found = stamp > after_us ? processes_on(device, &entries) : (entries = NULL, 0);
    for (int i = 0; i < found; i++) {
        const unsigned percent = nv_busy_percent(entries[i].device->index, entries[i].view.slot);
        if (written < room)
            infos[written] = (nvmlProcessUtilizationInfo_v1_t){.time_stamp = stamp,
                                                               .pid = (unsigned)entries[i].pid,
                                                               .sm_util = percent,
                                                               .mem_util = percent / 2};
        written++;
    }
    free(entries);
    return written;
}

/* Both functions answer a call without an array with the room they want, and "not found" when nothing is new. */
static nvmlReturn_t sampled(unsigned found, unsigned *count, const void *array)
{
    if (found == 0) {
        *count = 0;
        return NVML_ERROR_NOT_FOUND;
    }
    return room_for(found, count, array);
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples,
                                                      unsigned *count, unsigned long long after_us)
{
    nvmlProcessUtilizationInfo_v1_t *infos;
    nvmlReturn_t result = nv_check_card(device, count != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (nv_config(device)->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    infos = calloc(MOST, sizeof *infos);
    if (!infos)
        return NVML_ERROR_MEMORY;
    const unsigned found = process_samples(device, after_us, MOST, infos);
    result = sampled(found, count, samples);
    for (unsigned i = 0; result == NVML_SUCCESS && i < found; i++)
        samples[i] = (nvmlProcessUtilizationSample_t){
            .pid = infos[i].pid,
            .time_stamp = infos[i].time_stamp,
            .sm_util = infos[i].sm_util,
            .mem_util = infos[i].mem_util,
        };
    free(infos);
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device,
                                                            nvmlProcessesUtilizationInfo_v1_t *list)
{
    const nvmlReturn_t result = nv_check_card(device, list != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (list->version != NVML_STRUCT_VERSION(nvmlProcessesUtilizationInfo_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (nv_config(device)->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    const unsigned room = list->entries ? list->count : 0;
    return sampled(process_samples(device, list->last_seen, room, list->entries), &list->count, list->entries);
}
