/* How much of a card is used and by whom: memory, utilization and the power that follows it. */
#include "nvml_internal.h"

#define SECOND_NS 1000000000ull
#define PERIOD_NS (SECOND_NS / 6)

/* ---- memory ---- */

/* A card in MIG mode holds what its instances hold. */
static void memory_of(nvmlDevice_t device, unsigned long long *total, unsigned long long *used)
{
    sim_card_view view;
    *total = nv_config(device)->memory_bytes;
    *used = 0;
    for (int i = 0; i < nv_card_count; i++) {
        if (i == device->index || nv_cards[i].parent == device->index) {
            sim_view_card(nv_state, i, &view);
            *used += view.used_bytes;
        }
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    const nvmlReturn_t result = nv_check(device, memory != NULL);
    if (result == NVML_SUCCESS) {
        memory_of(device, &memory->total, &memory->used);
        memory->free = memory->total - memory->used;
    }
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    const nvmlReturn_t result = nv_check(device, memory != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (memory->version != NVML_STRUCT_VERSION(nvmlMemory_v2_t, 2))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    memory_of(device, &memory->total, &memory->used);
    memory->reserved = 0; /* the simulated driver keeps nothing for itself */
    memory->free = memory->total - memory->used;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    const nvmlReturn_t result = nv_check(device, memory != NULL);
    if (result == NVML_SUCCESS)
        *memory = (nvmlBAR1Memory_t){.total = 64ull << 30, .free = (64ull << 30) - (1u << 20), .used = 1u << 20};
    return result;
}

/* ---- utilization ---- */

void nv_window(uint64_t *from_ns, uint64_t *to_ns)
{
    *to_ns = sim_now() / PERIOD_NS * PERIOD_NS;
    *from_ns = *to_ns > SECOND_NS ? *to_ns - SECOND_NS : 0;
}

unsigned nv_busy_percent(int index, int32_t slot)
{
    uint64_t from, to;
    nv_window(&from, &to);
    return ((unsigned)sim_busy_ppm(nv_state, index, slot, from, to) + 5000) / 10000;
}

unsigned nv_power_at(nvmlDevice_t device, unsigned busy_percent)
{
    const unsigned limit_mw = (unsigned)device->power_limit * 1000, idle_mw = limit_mw / 8;
    return idle_mw + (limit_mw - idle_mw) / 100 * busy_percent;
}

NVML_API nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    const nvmlReturn_t result = nv_check_card(device, utilization != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (nv_config(device)->mig)
        return NVML_ERROR_NOT_SUPPORTED;
    utilization->gpu = nv_busy_percent(device->index, -1);
    utilization->memory = utilization->gpu / 2;
    return NVML_SUCCESS;
}

/* Encoders and the like: there, and always idle. */
static nvmlReturn_t idle_engine(nvmlDevice_t device, unsigned *utilization, unsigned *period_us)
{
    const nvmlReturn_t result = nv_check_card(device, utilization && period_us);
    if (result == NVML_SUCCESS) {
        *utilization = 0;
        *period_us = PERIOD_NS / 1000;
    }
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *utilization, unsigned *period_us)
{
    return idle_engine(device, utilization, period_us);
}

NVML_API nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *utilization, unsigned *period_us)
{
    return idle_engine(device, utilization, period_us);
}

NVML_API nvmlReturn_t nvmlDeviceGetJpgUtilization(nvmlDevice_t device, unsigned *utilization, unsigned *period_us)
{
    return idle_engine(device, utilization, period_us);
}

NVML_API nvmlReturn_t nvmlDeviceGetOfaUtilization(nvmlDevice_t device, unsigned *utilization, unsigned *period_us)
{
    return idle_engine(device, utilization, period_us);
}

/* What a sample of this kind says of a moment at which the card was `percent` busy. */
static unsigned sample_value(nvmlDevice_t device, unsigned type, unsigned percent)
{
    switch (type) {
    case NVML_TOTAL_POWER_SAMPLES:
        return nv_power_at(device, percent);
    case NVML_MEMORY_UTILIZATION_SAMPLES:
        return percent / 2;
    case NVML_PROCESSOR_CLK_SAMPLES:
        return (unsigned)device->sm_clock;
    case NVML_MEMORY_CLK_SAMPLES:
        return (unsigned)device->memory_clock;
    default:
        return percent;
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetSamples(nvmlDevice_t device, unsigned type, unsigned long long after_us,
                                           unsigned *value_type, unsigned *count, nvmlSample_t *samples)
{
    uint64_t ends[SIM_SAMPLES];
    uint32_t ppm[SIM_SAMPLES];
    const nvmlReturn_t result = nv_check_card(device, value_type && count);
    if (result != NVML_SUCCESS)
        return result;
    if (type != NVML_TOTAL_POWER_SAMPLES && type != NVML_GPU_UTILIZATION_SAMPLES &&
        type != NVML_MEMORY_UTILIZATION_SAMPLES && type != NVML_PROCESSOR_CLK_SAMPLES &&
        type != NVML_MEMORY_CLK_SAMPLES)
        return NVML_ERROR_NOT_SUPPORTED;
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (!samples) {
        *count = SIM_SAMPLES;
        return NVML_SUCCESS;
    }
    const int found = sim_busy_samples(nv_state, device->index, -1, 0, ends, ppm, SIM_SAMPLES);
    unsigned written = 0;
    for (int i = 0; i < found && written < *count; i++) {
        const unsigned long long stamp = nv_wall_us(ends[i]);
        if (stamp <= after_us)
            continue;
        samples[written].time_stamp = stamp;
        samples[written++].value.ui = sample_value(device, type, ppm[i] / 10000);
    }
    *count = written;
    return written ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
