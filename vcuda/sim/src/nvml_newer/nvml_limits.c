/* What a libnvidia-ml of 615 has beside the 550's names: limits of device memory per control group (core/sim_limits.c).
 *
 * Facts: nvml.h of CUDA 13.4 (structures, what clears a limit, no MIG handles, root only), NVIDIA's page "MPS v3 Memory Partitioning"
 * ("not found" for a group that can't have one, no limit on the root group). The codes of other errors are not documented.
 */
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include "../nvml/nvml_internal.h"
#include "sim_engine.h"

#define UNLIMITED 0xFFFFFFFFFFFFFFFFull
#define CGROUP2_MAGIC 0x63677270

typedef struct {
    const char *name_space; /* the group's folder */
    unsigned long long soft_limit, hard_limit;
} nvmlSetMemoryLimits_v1_t;

typedef struct {
    const char *name_space;
    unsigned long long soft_limit, hard_limit, current_used;
} nvmlGetMemoryLimits_v1_t;

static_assert(sizeof(nvmlSetMemoryLimits_v1_t) == 24 && sizeof(nvmlGetMemoryLimits_v1_t) == 32, "as nvml.h has them");

typedef struct {
    uint64_t id;
    char folder[PATH_MAX];
    char path[SIM_GROUP_TEXT]; /* from the hierarchy's root on; "/" is the root */
} group;

/* The folder's place in the hierarchy: its mount's root there, and the way from its mount to it. 0, or -1. */
static int place(const char *folder, char path[SIM_GROUP_TEXT])
{
    char line[8192], root[PATH_MAX], point[PATH_MAX], whole[2 * PATH_MAX], type[64];
    size_t best = 0;
    FILE *mounts = fopen("/proc/self/mountinfo", "re");
    while (mounts && fgets(line, sizeof line, mounts)) {
        const char *after = strstr(line, " - ");
        if (!after || sscanf(after, " - %63s", type) != 1 || strcmp(type, "cgroup2") ||
            sscanf(line, "%*s %*s %*s %4095s %4095s", root, point) != 2)
            continue;
        const size_t length = strlen(point);
        if (length < best || strncmp(folder, point, length) || (folder[length] && folder[length] != '/'))
            continue;
        best = length;
        const char *from = strcmp(root, "/") ? root : "", *rest = folder + length;
        snprintf(whole, sizeof whole, "%s%s", from, *from || *rest ? rest : "/");
    }
    if (mounts)
        fclose(mounts);
    if (!best || strlen(whole) >= SIM_GROUP_TEXT)
        return -1;
    memcpy(path, whole, strlen(whole) + 1);
    return 0;
}

static int find(const char *folder, group *found)
{
    struct stat status;
    struct statfs system;
    if (!realpath(folder, found->folder) || stat(found->folder, &status) || !S_ISDIR(status.st_mode) ||
        statfs(found->folder, &system) || system.f_type != CGROUP2_MAGIC || place(found->folder, found->path))
        return -1;
    found->id = status.st_ino;
    return 0;
}

/* A group that was removed takes its limits along. Only who sees the hierarchy can tell. */
static void drop_removed(sim_card *card, const group *named)
{
    char other[PATH_MAX + SIM_GROUP_TEXT];
    struct stat status;
    const size_t length = strlen(named->folder) - strlen(named->path); /* of the mount's path, where its root is the hierarchy's */
    for (int32_t i = 0; i < card->limits_used; i++) {
        snprintf(other, sizeof other, "%.*s%s", (int)length, named->folder, card->limits[i].path);
        if (card->limits[i].group && (stat(other, &status) || status.st_ino != card->limits[i].group))
            sim_limit_clear(&card->limits[i]);
    }
}

static nvmlReturn_t begin(nvmlDevice_t device, const char *folder, group *found)
{
    const nvmlReturn_t result = nv_check_card(device, folder != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (nv_config(device)->mig || nv_state->config.memory_limits == SIM_LIMITS_NONE)
        return NVML_ERROR_NOT_SUPPORTED;
    return find(folder, found) ? NVML_ERROR_NOT_FOUND : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceSetMemoryLimits_v1(nvmlDevice_t device, const nvmlSetMemoryLimits_v1_t *limits)
{
    group named;
    const nvmlReturn_t result = begin(device, limits ? limits->name_space : NULL, &named);
    if (result != NVML_SUCCESS)
        return result;
    if (geteuid() != 0)
        return NVML_ERROR_NO_PERMISSION;
    if (!strcmp(named.path, "/"))
        return NVML_ERROR_NOT_SUPPORTED;
    if (limits->soft_limit > limits->hard_limit)
        return NVML_ERROR_INVALID_ARGUMENT;
    int bad = 0;
    sim_card_lock(nv_state, device->index);
    sim_card *card = sim_card_at(nv_state, device->index);
    drop_removed(card, &named);
    sim_limit *known = sim_limit_find(card, named.id);
    if (limits->hard_limit == UNLIMITED && limits->soft_limit == 0) {
        if (known)
            sim_limit_clear(known);
    } else {
        bad = sim_limit_set(nv_state, card, named.id, named.path, limits->soft_limit, limits->hard_limit);
    }
    sim_card_unlock(nv_state, device->index);
    return bad == -1 ? NVML_ERROR_MEMORY : bad ? NVML_ERROR_INVALID_ARGUMENT : NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryLimits_v1(nvmlDevice_t device, nvmlGetMemoryLimits_v1_t *limits)
{
    group named;
    nvmlReturn_t result = begin(device, limits ? limits->name_space : NULL, &named);
    if (result != NVML_SUCCESS)
        return result;
    if (!strcmp(named.path, "/"))
        return NVML_ERROR_NOT_SUPPORTED;
    sim_card_lock(nv_state, device->index);
    sim_card *card = sim_card_at(nv_state, device->index);
    drop_removed(card, &named);
    const sim_limit *seen = sim_limit_seen(nv_state, card, named.path);
    limits->soft_limit = seen ? seen->soft_bytes : 0;
    limits->hard_limit = seen ? seen->hard_bytes : UNLIMITED;
    limits->current_used = seen ? sim_limit_used(nv_state, card, seen) : 0;
    if (!seen && nv_state->config.memory_limits == SIM_LIMITS_MISC)
        result = NVML_ERROR_NOT_SUPPORTED; /* the driver's own accounting knows no group without one */
    sim_card_unlock(nv_state, device->index);
    return result;
}
