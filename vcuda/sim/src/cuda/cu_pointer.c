/* What may be asked about a pointer. */
#include <string.h>

#include "cu_memory.h"

static CUresult attribute_of(const cu_block *block, int attribute, CUdeviceptr pointer, void *data)
{
    const int host = block->kind == CU_BLOCK_HOST;
    switch (attribute) {
    case 1: /* context; blocks of pools and mappings belong to none */
        *(CUcontext *)data = block->ctx;
        return CUDA_SUCCESS;
    case 2: /* memory type */
        *(unsigned *)data = host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return CUDA_SUCCESS;
    case 3: /* device pointer */
        *(CUdeviceptr *)data = pointer;
        return CUDA_SUCCESS;
    case 4: /* host pointer */
        if (!host && block->kind != CU_BLOCK_MANAGED)
            return CUDA_ERROR_INVALID_VALUE;
        *(void **)data = (void *)(uintptr_t)pointer;
        return CUDA_SUCCESS;
    case 6: /* sync memops */
        *(int *)data = 0;
        return CUDA_SUCCESS;
    case 7: /* buffer id */
    case 20:
        *(unsigned long long *)data = block->id;
        return CUDA_SUCCESS;
    case 8: /* managed */
        *(int *)data = block->kind == CU_BLOCK_MANAGED;
        return CUDA_SUCCESS;
    case 9: /* device ordinal */
        *(int *)data = block->device;
        return CUDA_SUCCESS;
    case 10: /* IPC capable */
        *(int *)data = block->kind == CU_BLOCK_PLAIN;
        return CUDA_SUCCESS;
    case 11: /* range */
    case 19:
        *(CUdeviceptr *)data = block->start;
        return CUDA_SUCCESS;
    case 12:
    case 18:
        *(size_t *)data = block->bytes;
        return CUDA_SUCCESS;
    case 13: /* mapped */
        *(int *)data = 1;
        return CUDA_SUCCESS;
    case 14: /* handle types */
        *(cuuint64_t *)data = 0;
        return CUDA_SUCCESS;
    case 15: /* GPUDirect RDMA */
        *(int *)data = 0;
        return CUDA_SUCCESS;
    case 16: /* access flags */
        *(int *)data = CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        return CUDA_SUCCESS;
    case 17: /* pool */
        *(CUmemoryPool *)data = block->pool;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CU_EXPORT CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    CUresult bad = cu_initialised();
    if (bad || !data)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)pointer);
    bad = block ? attribute_of(block, (int)attribute, pointer, data) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

static size_t attribute_bytes(int attribute)
{
    return attribute == 1 || attribute == 3 || attribute == 4 || attribute == 7 || attribute == 11 || attribute == 12 ||
                   attribute == 14 || attribute >= 17
               ? 8
               : 4;
}

/* Unlike the single query this one succeeds for any pointer: what is unknown becomes zero. */
CU_EXPORT CUresult cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data,
                                          CUdeviceptr pointer)
{
    const CUresult bad = cu_initialised();
    if (bad || !count || !attributes || !data)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++) {
        const int attribute = (int)attributes[i];
        if (attribute < 1 || attribute > 20 || attribute == 5)
            return CUDA_ERROR_INVALID_VALUE;
        if (cuPointerGetAttribute(data[i], attributes[i], pointer)) {
            memset(data[i], 0, attribute_bytes(attribute));
            if (attribute == 9)
                *(int *)data[i] = -2; /* no device, as the real driver says */
        }
    }
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    int unused;
    if (!value || (int)attribute != 6)
        return CUDA_ERROR_INVALID_VALUE;
    return cuPointerGetAttribute(&unused, attribute, pointer);
}

CU_EXPORT CUresult cuMemRangeGetAttribute(void *data, size_t bytes, CUmem_range_attribute attribute, CUdeviceptr pointer,
                                          size_t count)
{
    int is_managed = 0;
    CUresult bad = cuPointerGetAttribute(&is_managed, (CUpointer_attribute)8, pointer);
    if (bad || !data || !count || !is_managed)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    switch ((int)attribute) {
    case 1: /* read mostly */
        *(int *)data = 0;
        return bytes == 4 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case 2: /* preferred and last prefetched location: none */
    case 4:
        *(int *)data = -2;
        return bytes == 4 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case 3: /* accessed by: nobody */
        for (size_t i = 0; i < bytes / 4; i++)
            ((int *)data)[i] = -2;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CU_EXPORT CUresult cuMemRangeGetAttributes(void **data, size_t *bytes, CUmem_range_attribute *attributes, size_t number,
                                           CUdeviceptr pointer, size_t count)
{
    if (!data || !bytes || !attributes || !number)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < number; i++) {
        const CUresult bad = cuMemRangeGetAttribute(data[i], bytes[i], attributes[i], pointer, count);
        if (bad)
            return bad;
    }
    return CUDA_SUCCESS;
}
