/* Process lists: the container's own processes, by the PIDs that they know each other by.
 *
 * NVML lists host PIDs, which cannot be translated from inside a container: neighbours are left out and our own are
 * listed from the region's slots, with the bytes of the ledger. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "devices.h"
#include "vc_process.h"
#include "vc_quota.h"

struct listed {
    unsigned int pid;
    unsigned long long bytes;
};

/* The last number of "NSpid:\t12\t3\n", the PID in the innermost namespace; 0 if there is none. */
static int innermost_pid(const char *pid)
{
    char path[64], line[256];
    int innermost = 0;
    snprintf(path, sizeof path, "/proc/%.20s/status", pid);
    FILE *status = fopen(path, "re");
    while (status && fgets(line, sizeof line, status)) {
        if (strncmp(line, "NSpid:", 6) != 0)
            continue;
        char *last = strrchr(line, '\t');
        innermost = last ? atoi(last) : 0;
        break;
    }
    if (status)
        fclose(status);
    return innermost;
}

/* A slot of a process in a PID namespace below ours: find it in /proc. 0: we can't see it. */
static unsigned int pid_from_above(const struct vc_identity *owner)
{
    unsigned int found = 0;
    DIR *proc = opendir("/proc");
    for (struct dirent *entry; proc && !found && (entry = readdir(proc));) {
        char path[64];
        struct stat namespace_file;
        if (entry->d_name[0] < '1' || entry->d_name[0] > '9')
            continue;
        snprintf(path, sizeof path, "/proc/%.20s/ns/pid", entry->d_name);
        if (stat(path, &namespace_file) == 0 && namespace_file.st_ino == owner->pid_namespace &&
            innermost_pid(entry->d_name) == (int)owner->pid)
            found = (unsigned int)atoi(entry->d_name);
    }
    if (proc)
        closedir(proc);
    return found;
}

/* The container's processes that have a context or memory on the card. */
static unsigned int list_processes(struct vc_region *region, uint32_t card, struct listed *processes)
{
    struct vc_identity self;
    unsigned int count = 0;
    vc_slots_reap(region);
    vc_identify_self(&self);
    for (uint32_t index = 0, slots = vc_region_slots(region); index < slots; index++) {
        const struct vc_slot *slot = &region->usage->slots[index];
        uint64_t bytes = vc_load_relaxed(&slot->cards[card].committed_bytes);
        if (vc_load_acquire(&slot->state) == VC_SLOT_FREE || (bytes == 0 && vc_load_relaxed(&slot->cards[card].contexts) == 0))
            continue;
        struct vc_identity owner = {.pid = vc_load_relaxed(&slot->pid), .pid_namespace = vc_load_relaxed(&slot->pid_namespace)};
        unsigned int pid = owner.pid_namespace == self.pid_namespace ? (unsigned int)owner.pid : pid_from_above(&owner);
        if (pid != 0)
            processes[count++] = (struct listed){pid, bytes};
    }
    return count;
}

enum list_kind { LIST_COMPUTE, LIST_OTHER };

/* Fill `processes`, as many as the card has; false: let the driver answer (not a card of the share, limits unreadable). */
static bool answer(nvmlDevice_t device, enum list_kind kind, struct listed *processes, unsigned int *count)
{
    struct vc_region *region = vc_region_get();
    int card = vc_card_of_handle(region, device);
    if (card < 0)
        return false;
    *count = kind == LIST_COMPUTE ? list_processes(region, (uint32_t)card, processes) : 0;
    return true;
}

/* NVML's protocol: *room becomes the number there is; too small a room is an error. */
static nvmlReturn_t fits(unsigned int *room, const void *buffer, unsigned int count)
{
    unsigned int given = *room;
    *room = count;
    if (count > given)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    return count > 0 && !buffer ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

static nvmlReturn_t list_v1(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_v1_t *buffer, enum list_kind kind,
                            nvmlReturn_t (*call)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v1_t *))
{
    struct listed processes[VC_MAX_SLOTS];
    unsigned int count = 0;
    if (!room || !answer(device, kind, processes, &count))
        return call(device, room, buffer);
    nvmlReturn_t result = fits(room, buffer, count);
    for (unsigned int index = 0; result == NVML_SUCCESS && index < count; index++)
        buffer[index] = (nvmlProcessInfo_v1_t){.pid = processes[index].pid, .usedGpuMemory = processes[index].bytes};
    return result;
}

static nvmlReturn_t list(nvmlDevice_t device, unsigned int *room, nvmlProcessInfo_t *buffer, enum list_kind kind,
                         nvmlReturn_t (*call)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_t *))
{
    struct listed processes[VC_MAX_SLOTS];
    unsigned int count = 0;
    if (!room || !answer(device, kind, processes, &count))
        return call(device, room, buffer);
    nvmlReturn_t result = fits(room, buffer, count);
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
