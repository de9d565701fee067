/* Counting cards, finding them, and what they are: names, numbers, PCI. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "nvml_internal.h"

/* Prototypes of what other functions here call through the procedure linkage table. */
NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count);
NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device);
NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device);
NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci);

NVML_API nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (*count = 0; nv_visible(-1, (int)*count);)
        ++*count;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCount(unsigned *count)
{
    return nvmlDeviceGetCount_v2(count);
}

/* A handle is only given for a card that answers. */
static nvmlReturn_t give(nvmlDevice_t found, nvmlDevice_t *device)
{
    if (!found)
        return NVML_ERROR_NOT_FOUND;
    const nvmlReturn_t result = nv_check(found, 1);
    if (result == NVML_SUCCESS)
        *device = found;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!device || index >= SIM_MAX_CARDS || !nv_visible(-1, (int)index))
        return NVML_ERROR_INVALID_ARGUMENT;
    return give(nv_visible(-1, (int)index), device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByIndex(unsigned index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    nvmlDevice_t found = NULL;
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!uuid || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; i < nv_card_count; i++)
        if (nv_cards[i].visible && strcasecmp(nv_config(&nv_cards[i])->uuid, uuid) == 0)
            found = &nv_cards[i];
    return give(found, device);
}

/* Boards have 13 digits; ours follow from the UUID. */
static void serial_of(nvmlDevice_t device, char *text, size_t size)
{
    unsigned long long hash = 0;
    for (const char *c = nv_config(nv_card_of(device))->uuid; *c; c++)
        hash = hash * 31 + (unsigned char)*c;
    snprintf(text, size, "1%012llu", hash % 1000000000000ull);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    nvmlDevice_t found = NULL;
    char text[32];
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!serial || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (int i = 0; nv_visible(-1, i); i++) {
        serial_of(nv_visible(-1, i), text, sizeof text);
        if (strcmp(text, serial) == 0)
            found = nv_visible(-1, i);
    }
    return give(found, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId_v2(const char *bus_id, nvmlDevice_t *device)
{
    nvmlDevice_t found = NULL;
    unsigned domain = 0, bus = 0, slot = 0;
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!bus_id || !device)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (sscanf(bus_id, "%x:%x:%x", &domain, &bus, &slot) != 3) { /* the domain may be left out */
        domain = 0;
        if (sscanf(bus_id, "%x:%x", &bus, &slot) != 2)
            return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (int i = 0; nv_visible(-1, i); i++) {
        const nvmlDevice_t card = nv_visible(-1, i);
        if (card->domain == domain && card->bus == bus && card->device == slot)
            found = card;
    }
    return give(found, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetHandleByPciBusId(const char *bus_id, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByPciBusId_v2(bus_id, device);
}

NVML_API nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned *index)
{
    const nvmlReturn_t result = nv_check(device, index != NULL);
    if (result == NVML_SUCCESS)
        *index = (unsigned)device->nvml_index;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned *minor)
{
    const nvmlReturn_t result = nv_check_card(device, minor != NULL);
    if (result == NVML_SUCCESS)
        *minor = (unsigned)nv_config(device)->minor;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetModuleId(nvmlDevice_t device, unsigned *module)
{
    const nvmlReturn_t result = nv_check_card(device, module != NULL);
    if (result == NVML_SUCCESS)
        *module = (unsigned)device->index;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned size)
{
    const nvmlReturn_t result = nv_check(device, uuid != NULL);
    return result == NVML_SUCCESS ? nv_text(nv_config(device)->uuid, uuid, size) : result;
}

NVML_API nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned size)
{
    char text[2 * SIM_TEXT];
    const nvmlReturn_t result = nv_check(device, name != NULL);
    if (result != NVML_SUCCESS)
        return result;
    const sim_card_config *config = nv_config(device);
    snprintf(text, sizeof text, device->parent < 0 ? "%s" : "%s MIG %s", config->model, config->profile);
    return nv_text(text, name, size);
}

NVML_API nvmlReturn_t nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned size)
{
    char text[32];
    const nvmlReturn_t result = nv_check_card(device, serial != NULL);
    if (result != NVML_SUCCESS)
        return result;
    serial_of(device, text, sizeof text);
    return nv_text(text, serial, size);
}

NVML_API nvmlReturn_t nvmlDeviceGetBrand(nvmlDevice_t device, int *brand)
{
    const nvmlReturn_t result = nv_check(device, brand != NULL);
    if (result == NVML_SUCCESS)
        *brand = strncmp(nv_config(device)->model, "Tesla", 5) == 0 ? NVML_BRAND_TESLA : NVML_BRAND_NVIDIA;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetArchitecture(nvmlDevice_t device, unsigned *architecture)
{
    const nvmlReturn_t result = nv_check(device, architecture != NULL);
    if (result != NVML_SUCCESS)
        return result;
    const sim_card_config *config = nv_config(device);
    switch (config->cc_major * 10 + config->cc_minor) {
    case 75:
        *architecture = NVML_DEVICE_ARCH_TURING;
        break;
    case 80:
    case 86:
        *architecture = NVML_DEVICE_ARCH_AMPERE;
        break;
    case 89:
        *architecture = NVML_DEVICE_ARCH_ADA;
        break;
    default:
        *architecture = config->cc_major >= 9 ? NVML_DEVICE_ARCH_HOPPER : NVML_DEVICE_ARCH_VOLTA;
    }
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    const nvmlReturn_t result = nv_check(device, major && minor);
    if (result == NVML_SUCCESS) {
        *major = nv_config(device)->cc_major;
        *minor = nv_config(device)->cc_minor;
    }
    return result;
}

/* The PCI functions differ in what the caller's structure has room for: version 3 has the long bus name too. */
static nvmlReturn_t pci_info(nvmlDevice_t device, nvmlPciInfo_t *pci, int with_long_name)
{
    const nvmlReturn_t result = nv_check(device, pci != NULL);
    if (result != NVML_SUCCESS)
        return result;
    const nvmlDevice_t card = nv_card_of(device);
    snprintf(pci->legacy_bus_id, sizeof pci->legacy_bus_id, "%04X:%02X:%02X.0", card->domain & 0xFFFF,
             card->bus & 0xFF, card->device & 0xFF);
    pci->domain = card->domain;
    pci->bus = card->bus;
    pci->device = card->device;
    pci->pci_device_id = (unsigned)card->pci_device << 16 | 0x10DE;
    pci->pci_subsystem_id = 0x134F10DE;
    if (with_long_name)
        snprintf(pci->bus_id, sizeof pci->bus_id, "%08X:%02X:%02X.0", card->domain, card->bus & 0xFF,
                 card->device & 0xFF);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return pci_info(device, pci, 1);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return pci_info(device, pci, 0);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetPciInfo_v2(device, pci);
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfoExt(nvmlDevice_t device, nvmlPciInfoExt_v1_t *pci)
{
    nvmlPciInfo_t plain;
    const nvmlReturn_t result = nv_check(device, pci != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (pci->version != NVML_STRUCT_VERSION(nvmlPciInfoExt_v1_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    pci_info(device, &plain, 1);
    *pci = (nvmlPciInfoExt_v1_t){
        .version = pci->version,
        .domain = plain.domain,
        .bus = plain.bus,
        .device = plain.device,
        .pci_device_id = plain.pci_device_id,
        .pci_subsystem_id = plain.pci_subsystem_id,
        .base_class = 3,
        .sub_class = 2,
    };
    memcpy(pci->bus_id, plain.bus_id, sizeof pci->bus_id);
    return NVML_SUCCESS;
}
