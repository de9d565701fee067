/* Devices: count, names, properties, attributes, peers. */
#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "cu_client.h"

CUresult cu_device_of(CUdevice device, cu_device **found)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    if (device < 0 || device >= cu_process.device_count)
        return CUDA_ERROR_INVALID_DEVICE;
    *found = &cu_process.devices[device];
    return CUDA_SUCCESS;
}

static CUresult config_of(CUdevice device, const sim_card_config **config)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (!bad)
        *config = &cu_process.state->config.cards[found->card];
    return bad;
}

CU_EXPORT CUresult cuDeviceGetCount(int *count)
{
    const CUresult bad = cu_initialised();
    if (bad || !count)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *count = cu_process.device_count;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceGet(CUdevice *device, int ordinal)
{
    cu_device *found;
    const CUresult bad = cu_device_of(ordinal, &found);
    if (bad || !device)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceGetName(char *name, int length, CUdevice device)
{
    const sim_card_config *config;
    const CUresult bad = config_of(device, &config);
    if (bad || !name || length <= 0)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (config->parent >= 0)
        snprintf(name, (size_t)length, "%s MIG %s", config->model, config->profile);
    else
        snprintf(name, (size_t)length, "%s", config->model);
    return CUDA_SUCCESS;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : c >= 'A' && c <= 'F' ? c - 'A' + 10 : -1;
}

static void uuid_bytes(const char *text, CUuuid *uuid)
{
    int digits = 0;
    memset(uuid, 0, sizeof *uuid);
    for (text = strlen(text) > 4 ? text + 4 : text; *text && digits < 32; text++) {
        const int value = hex_digit(*text);
        if (value < 0)
            continue;
        uuid->bytes[digits / 2] = (char)((unsigned char)uuid->bytes[digits / 2] | (value << (digits % 2 ? 0 : 4)));
        digits++;
    }
}

/* The first version gives a MIG instance its parent's UUID, the second its own. */
CU_EXPORT CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    const sim_card_config *config;
    const CUresult bad = config_of(device, &config);
    if (bad || !uuid)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    uuid_bytes(config->parent >= 0 ? cu_process.state->config.cards[config->parent].uuid : config->uuid, uuid);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    const sim_card_config *config;
    const CUresult bad = config_of(device, &config);
    if (bad || !uuid)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    uuid_bytes(config->uuid, uuid);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    const sim_card_config *config;
    const CUresult bad = config_of(device, &config);
    if (bad || !bytes)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *bytes = config->memory_bytes;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    size_t all = 0;
    const CUresult bad = bytes ? cuDeviceTotalMem_v2(&all, device) : CUDA_ERROR_INVALID_VALUE;
    if (!bad)
        *bytes = all > 0xffffffffu ? 0xffffffffu : (unsigned)all;
    return bad;
}

CU_EXPORT CUresult cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    const sim_card_config *config;
    const CUresult bad = config_of(device, &config);
    if (bad || !major || !minor)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *major = config->cc_major;
    *minor = config->cc_minor;
    return CUDA_SUCCESS;
}

/* Attributes that are the same on every simulated card; numbers as in CUdevice_attribute, values as of an A100. */
static const struct {
    short first, last;
    int value;
} attributes[] = {
    {1, 1, 1024},         {2, 3, 1024},         {4, 4, 64},          {5, 5, 0x7fffffff},  {6, 7, 65535},
    {8, 8, 49152},        {9, 9, 65536},        {10, 10, 32},        {11, 11, 0x7fffffff}, {12, 12, 65536},
    {13, 13, 1410000},    {14, 14, 512},        {15, 15, 1},         {19, 19, 1},         {21, 21, 131072},
    {22, 22, 131072},     {23, 23, 65536},      {24, 26, 16384},     {27, 28, 32768},     {29, 29, 2048},
    {30, 30, 512},        {31, 32, 1},          {36, 36, 1215000},   {37, 37, 5120},      {38, 38, 41943040},
    {39, 39, 2048},       {40, 40, 3},          {41, 41, 1},         {42, 42, 32768},     {43, 43, 2048},
    {44, 44, 1},          {45, 46, 32768},      {47, 48, 8192},      {49, 49, 32768},     {51, 51, 32},
    {52, 53, 32768},      {54, 54, 2046},       {55, 55, 32768},     {56, 56, 131072},    {57, 57, 65536},
    {58, 60, 16384},      {61, 61, 32768},      {62, 62, 2048},      {63, 64, 32768},     {65, 65, 2048},
    {66, 67, 32768},      {68, 68, 2046},       {69, 69, 268435456}, {70, 70, 131072},    {71, 71, 65000},
    {72, 72, 2097120},    {73, 74, 32768},      {77, 77, 32768},     {78, 80, 1},         {81, 81, 167936},
    {82, 82, 65536},      {83, 83, 1},          {87, 87, 2},         {89, 91, 1},         {92, 94, 1},
    {95, 95, 1},          {97, 97, 166912},     {98, 99, 1},         {102, 103, 1},       {106, 106, 32},
    {108, 108, 31457280}, {109, 109, 134213632}, {111, 111, 1024},   {113, 115, 1},       {119, 119, 1},
    {122, 123, 1},        {125, 126, 1},        {129, 129, 1},
};

CU_EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    const sim_card_config *config;
    const CUresult bad = config_of(device, &config);
    if (bad || !value)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    unsigned domain = 0, bus = 0, slot = 0;
    sscanf(config->pci, "%x:%x:%x", &domain, &bus, &slot);
    switch ((int)attribute) {
    case 16:
        *value = config->sms;
        return CUDA_SUCCESS;
    case 33:
        *value = (int)bus;
        return CUDA_SUCCESS;
    case 34:
        *value = (int)slot;
        return CUDA_SUCCESS;
    case 50:
        *value = (int)domain;
        return CUDA_SUCCESS;
    case 75:
        *value = config->cc_major;
        return CUDA_SUCCESS;
    case 76:
        *value = config->cc_minor;
        return CUDA_SUCCESS;
    case 120: /* clusters and tensor maps came with Hopper */
    case 127:
        *value = config->cc_major >= 9;
        return CUDA_SUCCESS;
    case 131:
    case 134:
        *value = config->numa;
        return CUDA_SUCCESS;
    default:
        break;
    }
    *value = 0;
    for (size_t i = 0; i < sizeof attributes / sizeof *attributes; i++)
        if ((int)attribute >= attributes[i].first && (int)attribute <= attributes[i].last)
            *value = attributes[i].value;
    return (int)attribute >= 1 && (int)attribute <= 134 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuDeviceGetProperties(CUdevprop *properties, CUdevice device)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad || !properties)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *properties = (CUdevprop){1024, {1024, 1024, 64}, {0x7fffffff, 65535, 65535}, 49152, 65536, 32, 0x7fffffff, 65536,
                              1410000, 512};
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceGetPCIBusId(char *text, int length, CUdevice device)
{
    const sim_card_config *config;
    const CUresult bad = config_of(device, &config);
    if (bad || !text || length <= 0)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    snprintf(text, (size_t)length, "%s", config->pci);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceGetByPCIBusId(CUdevice *device, const char *text)
{
    unsigned wanted[3] = {0}, have[3];
    const CUresult bad = cu_initialised();
    if (bad || !device || !text)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (sscanf(text, "%x:%x:%x", &wanted[0], &wanted[1], &wanted[2]) != 3) {
        wanted[0] = 0;
        if (sscanf(text, "%x:%x", &wanted[1], &wanted[2]) != 2)
            return CUDA_ERROR_INVALID_VALUE;
    }
    for (int i = 0; i < cu_process.device_count; i++) {
        const sim_card_config *config = &cu_process.state->config.cards[cu_process.devices[i].card];
        if (sscanf(config->pci, "%x:%x:%x", &have[0], &have[1], &have[2]) == 3 && !memcmp(wanted, have, sizeof have)) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

CU_EXPORT CUresult cuDeviceGetLuid(char *luid, unsigned int *mask, CUdevice device)
{
    (void)luid, (void)mask, (void)device;
    return CUDA_ERROR_NOT_SUPPORTED; /* Windows only */
}

CU_EXPORT CUresult cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType type, CUdevice device)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad || !supported || type != 0)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *supported = 0;
    return CUDA_SUCCESS;
}

/* ---- peers: memory of all cards lies in one address space here ---- */

CU_EXPORT CUresult cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    cu_device *first, *second;
    CUresult bad = cu_device_of(device, &first);
    if (!bad)
        bad = cu_device_of(peer, &second);
    if (bad || !can)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *can = first != second;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice device, CUdevice peer)
{
    int can;
    const CUresult bad = cuDeviceCanAccessPeer(&can, device, peer);
    if (bad || !value || !can)
        return bad ? bad : !value ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_DEVICE;
    *value = (int)attribute == 2; /* access is supported; performance rank 0, no native atomics */
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (!bad)
        bad = cu_usable(peer);
    if (bad || flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (peer->device == ctx->device)
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    const uint32_t bit = 1u << peer->device;
    if (ctx->peers & bit)
        return CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED;
    ctx->peers |= bit;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxDisablePeerAccess(CUcontext peer)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (!bad)
        bad = cu_usable(peer);
    if (bad)
        return bad;
    const uint32_t bit = 1u << peer->device;
    if (!(ctx->peers & bit))
        return CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
    ctx->peers &= ~bit;
    return CUDA_SUCCESS;
}
