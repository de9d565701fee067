/* Figures of the board: clocks, power, temperature, PCIe, ECC, modes. Plausible constants; power follows the load. */
#include <string.h>

#include "nvml_internal.h"

#define REASON_IDLE 1ull
#define ALL_REASONS 0x1FFull

/* A function that stores one figure of a whole card. */
#define NV_FIGURE(name, type, expression)                                                                              \
    NVML_API nvmlReturn_t name(nvmlDevice_t device, type *value)                                                       \
    {                                                                                                                  \
        const nvmlReturn_t result = nv_check_card(device, value != NULL);                                              \
        if (result == NVML_SUCCESS)                                                                                    \
            *value = (type)(expression);                                                                               \
        return result;                                                                                                 \
    }

/* ---- power and heat ---- */

NV_FIGURE(nvmlDeviceGetPowerUsage, unsigned, nv_power_at(device, nv_busy_percent(device->index, -1)))
NV_FIGURE(nvmlDeviceGetPowerManagementLimit, unsigned, device->power_limit * 1000)
NV_FIGURE(nvmlDeviceGetPowerManagementDefaultLimit, unsigned, device->power_limit * 1000)
NV_FIGURE(nvmlDeviceGetEnforcedPowerLimit, unsigned, device->power_limit * 1000)
NV_FIGURE(nvmlDeviceGetPowerManagementMode, unsigned, 1)
NV_FIGURE(nvmlDeviceGetTotalEnergyConsumption, unsigned long long,
          sim_now() / 1000000000 * (uint64_t)device->power_limit * 1000 / 8)

NVML_API nvmlReturn_t nvmlDeviceGetPowerManagementLimitConstraints(nvmlDevice_t device, unsigned *least, unsigned *most)
{
    const nvmlReturn_t result = nv_check_card(device, least && most);
    if (result == NVML_SUCCESS) {
        *least = (unsigned)device->power_limit * 250;
        *most = (unsigned)device->power_limit * 1000;
    }
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned sensor, unsigned *celsius)
{
    const nvmlReturn_t result = nv_check_card(device, celsius && sensor == NVML_TEMPERATURE_GPU);
    if (result == NVML_SUCCESS)
        *celsius = 30 + nv_busy_percent(device->index, -1) * 35 / 100;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetTemperatureThreshold(nvmlDevice_t device, unsigned which, unsigned *celsius)
{
    static const unsigned thresholds[] = {[NVML_TEMPERATURE_THRESHOLD_SHUTDOWN] = 92,
                                          [NVML_TEMPERATURE_THRESHOLD_SLOWDOWN] = 89,
                                          [NVML_TEMPERATURE_THRESHOLD_MEM_MAX] = 95,
                                          [NVML_TEMPERATURE_THRESHOLD_GPU_MAX] = 85};
    const nvmlReturn_t result = nv_check_card(device, celsius != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (which >= sizeof thresholds / sizeof *thresholds)
        return NVML_ERROR_NOT_SUPPORTED;
    *celsius = thresholds[which];
    return NVML_SUCCESS;
}

/* ---- clocks ---- */

static nvmlReturn_t clock_of(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    const nvmlReturn_t result = nv_check_card(device, mhz && type < NVML_CLOCK_COUNT);
    if (result == NVML_SUCCESS)
        *mhz = (unsigned)(type == NVML_CLOCK_MEM ? device->memory_clock : device->sm_clock);
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetApplicationsClock(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetDefaultApplicationsClock(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxCustomerBoostClock(nvmlDevice_t device, unsigned type, unsigned *mhz)
{
    return clock_of(device, type, mhz);
}

NVML_API nvmlReturn_t nvmlDeviceGetClock(nvmlDevice_t device, unsigned type, unsigned which, unsigned *mhz)
{
    return which < 4 ? clock_of(device, type, mhz) : NVML_ERROR_INVALID_ARGUMENT;
}

NV_FIGURE(nvmlDeviceGetPerformanceState, unsigned, 0)
NV_FIGURE(nvmlDeviceGetPowerState, unsigned, 0)
NV_FIGURE(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long,
          nv_busy_percent(device->index, -1) ? 0 : REASON_IDLE)
NV_FIGURE(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long,
          nv_busy_percent(device->index, -1) ? 0 : REASON_IDLE)
NV_FIGURE(nvmlDeviceGetSupportedClocksThrottleReasons, unsigned long long, ALL_REASONS)
NV_FIGURE(nvmlDeviceGetSupportedClocksEventReasons, unsigned long long, ALL_REASONS)

NVML_API nvmlReturn_t nvmlDeviceGetViolationStatus(nvmlDevice_t device, unsigned policy, nvmlViolationTime_t *time)
{
    (void)policy;
    const nvmlReturn_t result = nv_check_card(device, time != NULL);
    if (result == NVML_SUCCESS)
        *time = (nvmlViolationTime_t){.reference_time = nv_wall_us(sim_now()), .violation_time = 0};
    return result;
}

/* ---- the board ---- */

NV_FIGURE(nvmlDeviceGetMemoryBusWidth, unsigned, device->bus_width)
NV_FIGURE(nvmlDeviceGetNumGpuCores, unsigned, nv_config(device)->sms * 64)
NV_FIGURE(nvmlDeviceGetBusType, unsigned, NVML_BUS_TYPE_PCIE)
NV_FIGURE(nvmlDeviceGetBoardId, unsigned, device->bus << 8)
NV_FIGURE(nvmlDeviceGetMultiGpuBoard, unsigned, 0)
NV_FIGURE(nvmlDeviceGetNumFans, unsigned, 0)
NV_FIGURE(nvmlDeviceGetPersistenceMode, unsigned, 1)
NV_FIGURE(nvmlDeviceGetComputeMode, unsigned, 0)
NV_FIGURE(nvmlDeviceGetDisplayMode, unsigned, 0)
NV_FIGURE(nvmlDeviceGetDisplayActive, unsigned, 0)
NV_FIGURE(nvmlDeviceGetAccountingBufferSize, unsigned, 4000)
NV_FIGURE(nvmlDeviceGetVirtualizationMode, unsigned, 0)

NVML_API nvmlReturn_t nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned size)
{
    const nvmlReturn_t result = nv_check_card(device, version != NULL);
    return result == NVML_SUCCESS ? nv_text("92.00.19.00.01", version, size) : result;
}

NVML_API nvmlReturn_t nvmlDeviceGetBoardPartNumber(nvmlDevice_t device, char *number, unsigned size)
{
    const nvmlReturn_t result = nv_check_card(device, number != NULL);
    return result == NVML_SUCCESS ? nv_text("692-2G506-0200-002", number, size) : result;
}

/* ---- PCIe ---- */

NV_FIGURE(nvmlDeviceGetMaxPcieLinkGeneration, unsigned, 4)
NV_FIGURE(nvmlDeviceGetGpuMaxPcieLinkGeneration, unsigned, 4)
NV_FIGURE(nvmlDeviceGetCurrPcieLinkGeneration, unsigned, 4)
NV_FIGURE(nvmlDeviceGetMaxPcieLinkWidth, unsigned, 16)
NV_FIGURE(nvmlDeviceGetCurrPcieLinkWidth, unsigned, 16)
NV_FIGURE(nvmlDeviceGetPcieReplayCounter, unsigned, 0)
NV_FIGURE(nvmlDeviceGetPcieSpeed, unsigned, 16000)
NV_FIGURE(nvmlDeviceGetPcieLinkMaxSpeed, unsigned, 16000)

NVML_API nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, unsigned counter, unsigned *kib_per_second)
{
    const nvmlReturn_t result = nv_check_card(device, kib_per_second && counter < 2);
    if (result == NVML_SUCCESS)
        *kib_per_second = 0;
    return result;
}

/* ---- ECC: on, and never an error ---- */

NVML_API nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t device, unsigned *current, unsigned *pending)
{
    const nvmlReturn_t result = nv_check_card(device, current && pending);
    if (result == NVML_SUCCESS)
        *current = *pending = 1;
    return result;
}

NV_FIGURE(nvmlDeviceGetDefaultEccMode, unsigned, 1)

NVML_API nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                                  unsigned long long *errors)
{
    const nvmlReturn_t result = nv_check_card(device, errors && type < 2 && counter < 2);
    if (result == NVML_SUCCESS)
        *errors = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryErrorCounter(nvmlDevice_t device, unsigned type, unsigned counter,
                                                      unsigned location, unsigned long long *errors)
{
    const nvmlReturn_t result = nv_check_card(device, errors && type < 2 && counter < 2 && location < 8);
    if (result == NVML_SUCCESS)
        *errors = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetDetailedEccErrors(nvmlDevice_t device, unsigned type, unsigned counter,
                                                     nvmlEccErrorCounts_t *errors)
{
    const nvmlReturn_t result = nv_check_card(device, errors && type < 2 && counter < 2);
    if (result == NVML_SUCCESS)
        memset(errors, 0, sizeof *errors);
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *corrected, unsigned *uncorrected,
                                                unsigned *pending, unsigned *failed)
{
    const nvmlReturn_t result = nv_check_card(device, corrected && uncorrected && pending && failed);
    if (result == NVML_SUCCESS)
        *corrected = *uncorrected = *pending = *failed = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetRowRemapperHistogram(nvmlDevice_t device, nvmlRowRemapperHistogram_t *histogram)
{
    const nvmlReturn_t result = nv_check_card(device, histogram != NULL);
    if (result == NVML_SUCCESS)
        *histogram = (nvmlRowRemapperHistogram_t){.max = 640};
    return result;
}

/* ---- accounting mode: off ---- */

NV_FIGURE(nvmlDeviceGetAccountingMode, unsigned, 0)

NVML_API nvmlReturn_t nvmlDeviceGetAccountingPids(nvmlDevice_t device, unsigned *count, unsigned *pids)
{
    (void)pids;
    const nvmlReturn_t result = nv_check_card(device, count != NULL);
    if (result == NVML_SUCCESS)
        *count = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetAccountingStats(nvmlDevice_t device, unsigned pid, nvmlAccountingStats_t *stats)
{
    (void)pid;
    const nvmlReturn_t result = nv_check_card(device, stats != NULL);
    return result == NVML_SUCCESS ? NVML_ERROR_NOT_FOUND : result;
}
