/* How cards reach each other and the processors: PCI ancestors, NVLink, peer access, NUMA. */
#include <string.h>
#include <unistd.h>

#include "nvml_internal.h"

#define BITS_PER_WORD (8 * sizeof(unsigned long))

static int level_between(nvmlDevice_t first, nvmlDevice_t second)
{
    if (first == second)
        return NVML_TOPOLOGY_INTERNAL;
    if (first->peers[second->index].level >= 0)
        return first->peers[second->index].level;
    return nv_config(first)->numa == nv_config(second)->numa ? NVML_TOPOLOGY_NODE : NVML_TOPOLOGY_SYSTEM;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyCommonAncestor(nvmlDevice_t first, nvmlDevice_t second, unsigned *level)
{
    nvmlReturn_t result = nv_check_card(first, level != NULL);
    if (result == NVML_SUCCESS)
        result = nv_check_card(second, 1);
    if (result == NVML_SUCCESS)
        *level = (unsigned)level_between(first, second);
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, unsigned level, unsigned *count,
                                                       nvmlDevice_t *devices)
{
    unsigned found = 0;
    const nvmlReturn_t result = nv_check_card(device, count != NULL);
    if (result != NVML_SUCCESS)
        return result;
    for (int i = 0; nv_visible(-1, i); i++) {
        const nvmlDevice_t other = nv_visible(-1, i);
        if (other == device || (unsigned)level_between(device, other) > level)
            continue;
        if (devices && found < *count)
            devices[found] = other;
        found++;
    }
    *count = found;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceOnSameBoard(nvmlDevice_t first, nvmlDevice_t second, int *same)
{
    nvmlReturn_t result = nv_check_card(first, same != NULL);
    if (result == NVML_SUCCESS)
        result = nv_check_card(second, 1);
    if (result == NVML_SUCCESS)
        *same = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t first, nvmlDevice_t second, unsigned what, unsigned *status)
{
    nvmlReturn_t result = nv_check_card(first, status && what < NVML_P2P_CAPS_INDEX_COUNT);
    if (result == NVML_SUCCESS)
        result = nv_check_card(second, 1);
    if (result != NVML_SUCCESS)
        return result;
    const int linked = first->peers[second->index].links > 0;
    const int near = level_between(first, second) <= NVML_TOPOLOGY_NODE;
    *status = linked || (near && what != NVML_P2P_CAPS_INDEX_NVLINK) ? NVML_P2P_STATUS_OK
                                                                     : NVML_P2P_STATUS_NOT_SUPPORTED;
    return NVML_SUCCESS;
}

/* ---- NVLink ---- */

/* A link of a card that has NVLink at all; cards without it answer "not supported", as the genuine library does. */
static nvmlReturn_t check_link(nvmlDevice_t device, unsigned link, int arguments_ok)
{
    const nvmlReturn_t result = nv_check_card(device, arguments_ok && link < NVML_NVLINK_MAX_LINKS);
    if (result != NVML_SUCCESS)
        return result;
    const int links = nv_links_used(device) > device->nvlinks ? nv_links_used(device) : device->nvlinks;
    return link < (unsigned)links ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkState(nvmlDevice_t device, unsigned link, unsigned *active)
{
    const nvmlReturn_t result = check_link(device, link, active != NULL);
    if (result == NVML_SUCCESS)
        *active = nv_link_peer(device, link) != NULL;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkVersion(nvmlDevice_t device, unsigned link, unsigned *version)
{
    const nvmlReturn_t result = check_link(device, link, version != NULL);
    if (result == NVML_SUCCESS)
        *version = nv_config(device)->cc_major >= 9 ? 6 : 4; /* the enumeration: 4.0 and 3.0 */
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkCapability(nvmlDevice_t device, unsigned link, unsigned what, unsigned *value)
{
    const nvmlReturn_t result = check_link(device, link, value && what < 6);
    if (result == NVML_SUCCESS)
        *value = what != 4; /* all but the SLI bridge */
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkErrorCounter(nvmlDevice_t device, unsigned link, unsigned what,
                                                      unsigned long long *value)
{
    const nvmlReturn_t result = check_link(device, link, value && what < 5);
    if (result == NVML_SUCCESS)
        *value = 0;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemoteDeviceType(nvmlDevice_t device, unsigned link, unsigned *type)
{
    const nvmlReturn_t result = check_link(device, link, type != NULL);
    if (result == NVML_SUCCESS)
        *type = 0; /* a GPU */
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci);

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo_v2(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci)
{
    const nvmlReturn_t result = check_link(device, link, pci != NULL);
    if (result != NVML_SUCCESS)
        return result;
    const nvmlDevice_t peer = nv_link_peer(device, link);
    return peer && peer->visible ? nvmlDeviceGetPciInfo_v3(peer, pci) : NVML_ERROR_NOT_SUPPORTED;
}

NVML_API nvmlReturn_t nvmlDeviceGetNvLinkRemotePciInfo(nvmlDevice_t device, unsigned link, nvmlPciInfo_t *pci)
{
    return nvmlDeviceGetNvLinkRemotePciInfo_v2(device, link, pci);
}

/* ---- processors and NUMA ---- */

/* All processors of this host: the simulated node has no say over them. */
NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinity(nvmlDevice_t device, unsigned words, unsigned long *set)
{
    const nvmlReturn_t result = nv_check_card(device, words && set);
    if (result != NVML_SUCCESS)
        return result;
    const long processors = sysconf(_SC_NPROCESSORS_CONF);
    memset(set, 0, words * sizeof *set);
    for (long i = 0; i < processors && i < (long)(words * BITS_PER_WORD); i++)
        set[i / (long)BITS_PER_WORD] |= 1ul << (i % (long)BITS_PER_WORD);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetCpuAffinityWithinScope(nvmlDevice_t device, unsigned words, unsigned long *set,
                                                          unsigned scope)
{
    return scope < 2 ? nvmlDeviceGetCpuAffinity(device, words, set) : NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlDeviceGetMemoryAffinity(nvmlDevice_t device, unsigned words, unsigned long *set,
                                                  unsigned scope)
{
    const nvmlReturn_t result = nv_check_card(device, words && set && scope < 2);
    if (result != NVML_SUCCESS)
        return result;
    const int node = nv_config(device)->numa;
    if (node < 0 || (unsigned)node >= words * BITS_PER_WORD)
        return NVML_ERROR_NOT_SUPPORTED;
    memset(set, 0, words * sizeof *set);
    set[(unsigned)node / BITS_PER_WORD] |= 1ul << ((unsigned)node % BITS_PER_WORD);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetNumaNodeId(nvmlDevice_t device, unsigned *node)
{
    const nvmlReturn_t result = nv_check_card(device, node != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (nv_config(device)->numa < 0)
        return NVML_ERROR_NOT_SUPPORTED;
    *node = (unsigned)nv_config(device)->numa;
    return NVML_SUCCESS;
}
