/* MIG: mode, the instances of a card as devices, and what GPU and compute instances say of themselves. */
#include <stdio.h>
#include <string.h>

#include "nvml_internal.h"

enum { MOST_INSTANCES = 7, MIG_SLICES = 8 };

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    const nvmlReturn_t result = nv_check_card(device, current && pending);
    if (result != NVML_SUCCESS)
        return result;
    if (!device->mig_capable)
        return NVML_ERROR_NOT_SUPPORTED;
    *current = *pending = (unsigned)nv_config(device)->mig;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count)
{
    const nvmlReturn_t result = nv_check_card(device, count != NULL);
    if (result == NVML_SUCCESS)
        *count = device->mig_capable ? MOST_INSTANCES : 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned index, nvmlDevice_t *instance)
{
    const nvmlReturn_t result = nv_check_card(device, instance != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (!nv_config(device)->mig)
        return NVML_ERROR_NOT_FOUND;
    if (index >= MOST_INSTANCES)
        return NVML_ERROR_INVALID_ARGUMENT;
    const nvmlDevice_t found = nv_visible(device->index, (int)index);
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    *instance = found;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned *is_instance)
{
    const nvmlReturn_t result = nv_check(device, is_instance != NULL);
    if (result == NVML_SUCCESS)
        *is_instance = device->parent >= 0;
    return result;
}

/* Calls that only a MIG instance answers. */
static nvmlReturn_t check_instance(nvmlDevice_t device, int arguments_ok)
{
    const nvmlReturn_t result = nv_check(device, arguments_ok);
    return result == NVML_SUCCESS && device->parent < 0 ? NVML_ERROR_NOT_SUPPORTED : result;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id)
{
    const nvmlReturn_t result = check_instance(device, id != NULL);
    if (result == NVML_SUCCESS)
        *id = (unsigned)device->gpu_instance;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id)
{
    const nvmlReturn_t result = check_instance(device, id != NULL);
    if (result == NVML_SUCCESS)
        *id = (unsigned)device->compute_instance;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t device, nvmlDevice_t *card)
{
    const nvmlReturn_t result = check_instance(device, card != NULL);
    if (result == NVML_SUCCESS)
        *card = nv_card_of(device);
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    const nvmlReturn_t result = check_instance(device, attributes != NULL);
    if (result != NVML_SUCCESS)
        return result;
    *attributes = (nvmlDeviceAttributes_t){
        .multiprocessors = (unsigned)nv_config(device)->sms,
        .copy_engines = (unsigned)device->slices,
        .decoders = (unsigned)device->slices / 2,
        .gpu_instance_slices = (unsigned)device->slices,
        .compute_instance_slices = (unsigned)device->slices,
        .memory_mb = nv_config(device)->memory_bytes >> 20,
    };
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
    return nvmlDeviceGetAttributes_v2(device, attributes);
}

/* ---- profiles ---- */

/* Slices of NVML's profile numbers 0 … 4, and their memory slices of eight. */
static const struct {
    unsigned slices, memory_slices, instances;
} profiles[] = {{1, 1, 7}, {2, 2, 3}, {3, 4, 2}, {4, 4, 1}, {7, 8, 1}};

static unsigned profile_of(nvmlDevice_t device)
{
    unsigned profile = 0;
    while (profile < 4 && profiles[profile].slices != (unsigned)device->slices)
        profile++;
    return profile;
}

static nvmlReturn_t check_profile(nvmlDevice_t device, unsigned profile, int arguments_ok)
{
    const nvmlReturn_t result = nv_check_card(device, arguments_ok);
    if (result != NVML_SUCCESS)
        return result;
    return device->mig_capable && profile < sizeof profiles / sizeof *profiles ? NVML_SUCCESS
                                                                               : NVML_ERROR_NOT_SUPPORTED;
}

static unsigned long long profile_mb(nvmlDevice_t device, unsigned profile)
{
    return (nv_config(device)->memory_bytes * profiles[profile].memory_slices / MIG_SLICES) >> 20;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned profile,
                                                          nvmlGpuInstanceProfileInfo_t *info)
{
    const nvmlReturn_t result = check_profile(device, profile, info != NULL);
    if (result == NVML_SUCCESS)
        *info = (nvmlGpuInstanceProfileInfo_t){
            .id = profile,
            .slices = profiles[profile].slices,
            .instances = profiles[profile].instances,
            .multiprocessors = (unsigned)nv_config(device)->sms / 15 * 2 * profiles[profile].slices,
            .copy_engines = profiles[profile].slices,
            .decoders = profiles[profile].slices / 2,
            .memory_mb = profile_mb(device, profile),
        };
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned profile,
                                                           nvmlGpuInstanceProfileInfo_v2_t *info)
{
    nvmlGpuInstanceProfileInfo_t plain;
    if (info && info->version != NVML_STRUCT_VERSION(nvmlGpuInstanceProfileInfo_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    const nvmlReturn_t result = check_profile(device, profile, info != NULL);
    if (result != NVML_SUCCESS)
        return result;
    nvmlDeviceGetGpuInstanceProfileInfo(device, profile, &plain);
    *info = (nvmlGpuInstanceProfileInfo_v2_t){
        .version = info->version,
        .id = plain.id,
        .slices = plain.slices,
        .instances = plain.instances,
        .multiprocessors = plain.multiprocessors,
        .copy_engines = plain.copy_engines,
        .decoders = plain.decoders,
        .memory_mb = plain.memory_mb,
    };
    snprintf(info->name, sizeof info->name, "MIG %ug.%llugb", plain.slices, plain.memory_mb >> 10);
    return NVML_SUCCESS;
}

/* ---- instances: a GPU instance and its one compute instance share the handle of the MIG device ---- */

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned profile, nvmlGpuInstance_t *instances,
                                                unsigned *count)
{
    const nvmlReturn_t result = nv_check_card(device, instances && count);
    if (result != NVML_SUCCESS)
        return result;
    if (!nv_config(device)->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    *count = 0;
    for (int i = 0; nv_visible(device->index, i); i++)
        if (profile_of(nv_visible(device->index, i)) == profile)
            instances[(*count)++] = nv_visible(device->index, i);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned id, nvmlGpuInstance_t *instance)
{
    const nvmlReturn_t result = nv_check_card(device, instance != NULL);
    if (result != NVML_SUCCESS)
        return result;
    for (int i = 0; nv_visible(device->index, i); i++) {
        if ((unsigned)nv_visible(device->index, i)->gpu_instance == id) {
            *instance = nv_visible(device->index, i);
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
    const nvmlReturn_t result = check_instance(instance, info != NULL);
    if (result == NVML_SUCCESS)
        *info = (nvmlGpuInstanceInfo_t){
            .device = nv_card_of(instance),
            .id = (unsigned)instance->gpu_instance,
            .profile_id = profile_of(instance),
            .placement = {(unsigned)instance->start, (unsigned)instance->memory_slices},
        };
    return result;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned profile,
                                                         nvmlComputeInstance_t *instances, unsigned *count)
{
    const nvmlReturn_t result = check_instance(instance, instances && count);
    if (result != NVML_SUCCESS)
        return result;
    *count = profile == profile_of(instance);
    if (*count)
        instances[0] = instance;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned id,
                                                            nvmlComputeInstance_t *compute)
{
    const nvmlReturn_t result = check_instance(instance, compute != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if ((unsigned)instance->compute_instance != id)
        return NVML_ERROR_NOT_FOUND;
    *compute = instance;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    const nvmlReturn_t result = check_instance(instance, info != NULL);
    if (result == NVML_SUCCESS)
        *info = (nvmlComputeInstanceInfo_t){
            .device = nv_card_of(instance),
            .gpu_instance = instance,
            .id = (unsigned)instance->compute_instance,
            .profile_id = profile_of(instance),
            .placement = {0, (unsigned)instance->slices},
        };
    return result;
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
    return nvmlComputeInstanceGetInfo_v2(instance, info);
}
