/* cuGetProcAddress: from name, version and kind of default stream to the address of an export. */
#include "cu_table.h"

CU_EXPORT CUresult cuGetProcAddress_v2(const char *name, void **address, int version, cuuint64_t flags,
                                       CUdriverProcAddressQueryResult *status)
{
    int found = CU_LOOKUP_NOT_FOUND;
    const CUresult result = cu_look_up(name, address, version, flags, &found);
    if (status && !result)
        *status = (CUdriverProcAddressQueryResult)found;
    return result;
}

/* The first version tells a missing name by its result and leaves the pointer alone. */
CU_EXPORT CUresult cuGetProcAddress(const char *name, void **address, int version, cuuint64_t flags)
{
    int status = CU_LOOKUP_NOT_FOUND;
    void *found;
    const CUresult bad = cu_look_up(name, &found, version, flags, &status);
    if (bad || !address)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (status != CU_LOOKUP_FOUND)
        return CUDA_ERROR_NOT_FOUND;
    *address = found;
    return CUDA_SUCCESS;
}
