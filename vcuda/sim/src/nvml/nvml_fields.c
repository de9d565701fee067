/* nvmlDeviceGetFieldValues: the fields that have a value here, and "not supported" for the others. */
#include <string.h>

#include "nvml_internal.h"

/* Field numbers of nvml.h that this file answers. */
enum {
    FIELD_ECC_CURRENT = 1,
    FIELD_ECC_PENDING = 2,
    FIELD_ECC_FIRST_COUNTER = 3, /* up to the last aggregate counter: all errors ever, none */
    FIELD_ECC_LAST_COUNTER = 28,
    FIELD_RETIRED_PENDING = 31,
    FIELD_MEMORY_TEMP = 82,
    FIELD_TOTAL_ENERGY = 83,
    FIELD_NVLINK_SPEED_L0 = 84,
    FIELD_NVLINK_SPEED_COMMON = 90,
    FIELD_NVLINK_LINK_COUNT = 91,
    FIELD_PCIE_REPLAY = 94,
    FIELD_PCIE_REPLAY_ROLLOVER = 95,
    FIELD_NVLINK_GET_SPEED = 164,
    FIELD_NVLINK_GET_STATE = 165,
    FIELD_POWER_AVERAGE = 185,
    FIELD_POWER_INSTANT = 186,
    FIELD_POWER_MIN_LIMIT = 187,
    FIELD_POWER_MAX_LIMIT = 188,
    FIELD_POWER_DEFAULT_LIMIT = 189,
    FIELD_POWER_CURRENT_LIMIT = 190,
    FIELD_POWER_REQUESTED_LIMIT = 192,
};
#define NVLINK_MBPS 25000 /* per link and direction, of third- and fourth-generation links */

NVML_API nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules);

static nvmlReturn_t set(nvmlFieldValue_t *field, unsigned value)
{
    field->value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    field->value.ui = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t set_long(nvmlFieldValue_t *field, unsigned long long value)
{
    field->value_type = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
    field->value.ull = value;
    return NVML_SUCCESS;
}

static nvmlReturn_t nvlink_field(nvmlDevice_t device, nvmlFieldValue_t *field)
{
    if (device->nvlinks == 0 && nv_links_used(device) == 0)
        return NVML_ERROR_NOT_SUPPORTED;
    switch (field->field_id) {
    case FIELD_NVLINK_LINK_COUNT:
        return set(field, (unsigned)(device->nvlinks ? device->nvlinks : nv_links_used(device)));
    case FIELD_NVLINK_GET_STATE:
        return set(field, nv_link_peer(device, field->scope_id) != NULL);
    case FIELD_NVLINK_GET_SPEED:
        return set(field, nv_link_peer(device, field->scope_id) ? NVLINK_MBPS : 0);
    default:
        return set(field, nv_links_used(device) ? NVLINK_MBPS : 0);
    }
}

static nvmlReturn_t value_of(nvmlDevice_t device, nvmlFieldValue_t *field)
{
    const unsigned limit_mw = (unsigned)device->power_limit * 1000, id = field->field_id;
    unsigned long long energy = 0;
    if ((id >= FIELD_NVLINK_SPEED_L0 && id <= FIELD_NVLINK_LINK_COUNT) || id == FIELD_NVLINK_GET_SPEED ||
        id == FIELD_NVLINK_GET_STATE)
        return nvlink_field(device, field);
    if (id >= FIELD_ECC_FIRST_COUNTER && id <= FIELD_ECC_LAST_COUNTER)
        return set_long(field, 0);
    switch (id) {
    case FIELD_ECC_CURRENT:
    case FIELD_ECC_PENDING:
        return set(field, 1);
    case FIELD_RETIRED_PENDING:
    case FIELD_PCIE_REPLAY:
    case FIELD_PCIE_REPLAY_ROLLOVER:
        return set(field, 0);
    case FIELD_MEMORY_TEMP:
        return set(field, 35);
    case FIELD_TOTAL_ENERGY:
        nvmlDeviceGetTotalEnergyConsumption(device, &energy);
        return set_long(field, energy);
    case FIELD_POWER_AVERAGE:
    case FIELD_POWER_INSTANT:
        return set(field, nv_power_at(device, nv_busy_percent(device->index, -1)));
    case FIELD_POWER_MIN_LIMIT:
        return set(field, limit_mw / 4);
    case FIELD_POWER_MAX_LIMIT:
    case FIELD_POWER_DEFAULT_LIMIT:
    case FIELD_POWER_CURRENT_LIMIT:
    case FIELD_POWER_REQUESTED_LIMIT:
        return set(field, limit_mw);
    default:
        return NVML_ERROR_NOT_SUPPORTED;
    }
}

NVML_API nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    const nvmlReturn_t result = nv_check_card(device, fields && count > 0);
    if (result != NVML_SUCCESS)
        return result;
    const long long stamp = (long long)nv_wall_us(sim_now());
    for (int i = 0; i < count; i++) {
        memset(&fields[i].value, 0, sizeof fields[i].value);
        fields[i].time_stamp = stamp;
        fields[i].latency_us = 0;
        fields[i].value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
        fields[i].result = value_of(device, &fields[i]);
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceClearFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields)
{
    const nvmlReturn_t result = nv_check_card(device, fields && count > 0);
    return result == NVML_SUCCESS ? NVML_ERROR_NO_PERMISSION : result;
}
