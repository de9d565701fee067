/* Questions about the machine, not a card: versions, process names, units, and nvidia-smi's private table. */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "nvml_internal.h"

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned size)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    return version ? nv_text(nv_state->config.driver_version, version, size) : NVML_ERROR_INVALID_ARGUMENT;
}

/* NVML's own version is the driver's behind the number of the interface's generation. Needs no initialisation. */
NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned size)
{
    return version ? nv_text("12." VC_SIM_DRIVER_VERSION, version, size) : NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!version)
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = nv_state->config.cuda_version;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
    return nvmlSystemGetCudaDriverVersion_v2(version);
}

NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *name, unsigned size)
{
    char path[64], text[1024];
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!name || size == 0)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    if (got <= 0)
        return NVML_ERROR_NOT_FOUND;
    text[got] = 0; /* the arguments are separated by zeros: this keeps the program */
    snprintf(name, size, "%s", text);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlUnitGetCount(unsigned *count)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetHicVersion(unsigned *count, void *entries)
{
    (void)entries;
    return nvmlUnitGetCount(count);
}

NVML_API nvmlReturn_t nvmlGetExcludedDeviceCount(unsigned *count)
{
    return nvmlUnitGetCount(count);
}

/* nvidia-smi asks for private function tables by UUID. A table that says it holds nothing but its own size keeps the
 * program on the public functions. */
NVML_API nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *uuid)
{
    static const unsigned long long only_size[2] = {sizeof(unsigned long long), 0};
    if (!table || !uuid)
        return NVML_ERROR_INVALID_ARGUMENT;
    *table = only_size;
    return NVML_SUCCESS;
}
