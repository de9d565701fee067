/* Plain, pitched and managed allocations, and the free that serves all kinds. */
#include "cuda/memory/charge.h"

/* What the pitched allocator may round a row up to: no card aligns rows to more. Trued up when the pitch is known. */
#define VC__PITCH_ALIGNMENT 512u

static CUresult end_allocation(struct vc_charge *charge, CUresult result, CUdeviceptr pointer, uint64_t bytes,
                               enum vc_memory_kind kind)
{
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(charge);
        return result;
    }
    if (vc_charge_keep(charge, pointer, bytes, kind))
        return CUDA_SUCCESS;
    vc_real.cuMemFree_v2(pointer);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* The physical part of an oversold share is full. */
static CUresult allocate_oversold(struct vc_charge *charge, CUdeviceptr *pointer, uint64_t bytes)
{
    CUresult result = vc_real.cuMemAllocManaged(pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    return end_allocation(charge, result, result == CUDA_SUCCESS ? *pointer : 0, bytes, VC_MEMORY_OVERSOLD);
}

CUresult vc_hook_cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    struct vc_charge charge;
    CUresult result = vc_charge_either(&charge, vc_round_up(bytes, VC_CHUNK));
    if (result != CUDA_SUCCESS)
        return result;
    if (VC_UNLIKELY(charge.managed))
        return allocate_oversold(&charge, pointer, bytes);
    result = vc_real.cuMemAlloc_v2(pointer, bytes);
    return end_allocation(&charge, result, result == CUDA_SUCCESS ? *pointer : 0, bytes, VC_MEMORY_PLAIN);
}

CUresult vc_hook_cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, vc_round_up(bytes, VC_CHUNK));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAlloc(pointer, bytes);
    return end_allocation(&charge, result, result == CUDA_SUCCESS ? *pointer : 0, bytes, VC_MEMORY_PLAIN);
}

static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t pitched_bytes(uint64_t width, uint64_t height)
{
    return vc_round_up(times(vc_round_up(width, VC__PITCH_ALIGNMENT), height), VC_CHUNK);
}

CUresult vc_hook_cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    struct vc_charge charge;
    bool possible = pointer && pitch && width && height && (element == 4 || element == 8 || element == 16);
    CUresult result = (possible ? vc_charge_either : vc_charge_current)(&charge, pitched_bytes(width, height));
    if (result != CUDA_SUCCESS)
        return result;
    if (VC_UNLIKELY(charge.managed)) {
        uint64_t row = vc_round_up(width, VC__PITCH_ALIGNMENT);
        result = allocate_oversold(&charge, pointer, row * height);
        if (result == CUDA_SUCCESS)
            *pitch = row;
        return result;
    }
    result = vc_real.cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    bool made = result == CUDA_SUCCESS;
    return end_allocation(&charge, result, made ? *pointer : 0, made ? times(*pitch, height) : 0, VC_MEMORY_PLAIN);
}

CUresult vc_hook_cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                                 unsigned int element)
{
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, pitched_bytes(width, height));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAllocPitch(pointer, pitch, width, height, element);
    bool made = result == CUDA_SUCCESS;
    return end_allocation(&charge, result, made ? *pointer : 0, made ? times(*pitch, height) : 0, VC_MEMORY_PLAIN);
}

/* Managed memory may lie on the host, but the tenant can bring all of it to the card at any time: charged in full. */
CUresult vc_hook_cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    struct vc_charge charge;
    CUresult result = vc_charge_managed(&charge, vc_round_up(bytes, VC_CHUNK));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAllocManaged(pointer, bytes, flags);
    return end_allocation(&charge, result, result == CUDA_SUCCESS ? *pointer : 0, bytes, VC_MEMORY_MANAGED);
}

CUresult vc_hook_cuMemFree_v2(CUdeviceptr pointer)
{
    struct vc_freeing freeing;
    bool known = vc_charge_take(pointer, &freeing);
    CUresult result = vc_real.cuMemFree_v2(pointer);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}

CUresult vc_hook_cuMemFree(CUdeviceptr_v1 pointer)
{
    struct vc_freeing freeing;
    bool known = vc_charge_take(pointer, &freeing);
    CUresult result = vc_real.cuMemFree(pointer);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}
