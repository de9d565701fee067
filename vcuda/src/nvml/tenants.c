/* The container's processes on a card, from the region's slots.
 *
 * NVML lists host PIDs, which cannot be translated from inside a container: neighbours are left out and our own are known
 * by what they wrote into their slots. */
#include "nvml/tenants.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/process.h"
#include "region/quota.h"

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

unsigned int vc_tenants(const struct vc_card *card, struct vc_tenant *processes)
{
    struct vc_region *region = card->region;
    struct vc_identity self;
    unsigned int count = 0;
    vc_slots_reap(region);
    vc_identify_self(&self);
    for (uint32_t index = 0, slots = vc_region_slots(region); index < slots; index++) {
        const struct vc_slot *slot = &region->usage->slots[index];
        uint64_t bytes = vc_load_relaxed(&slot->cards[card->index].committed_bytes);
        if (vc_load_acquire(&slot->state) == VC_SLOT_FREE || (bytes == 0 && vc_load_relaxed(&slot->cards[card->index].contexts) == 0))
            continue;
        struct vc_identity owner = {.pid = vc_load_relaxed(&slot->pid), .pid_namespace = vc_load_relaxed(&slot->pid_namespace)};
        unsigned int pid = owner.pid_namespace == self.pid_namespace ? (unsigned int)owner.pid : pid_from_above(&owner);
        if (pid != 0)
            processes[count++] = (struct vc_tenant){
                .pid = pid,
                .slot = index,
                .bytes = bytes,
                .gpu_ns = vc_load_relaxed(&slot->cards[card->index].gpu_ns),
                .since_ns = vc_load_relaxed(&slot->claimed_ns),
            };
    }
    return count;
}

nvmlReturn_t vc_nvml_fits(unsigned int *room, const void *buffer, unsigned int count)
{
    unsigned int given = *room;
    *room = count;
    if (count > given)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    return count > 0 && !buffer ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}
