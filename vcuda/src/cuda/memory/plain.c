/* Plain, pitched and managed allocations, and the free that serves all kinds. */
#include "cuda/memory/account.h"

/* What the pitched allocator may round a row up to: no card aligns rows to more. Trued up when the pitch is known. */
#define VC__PITCH_ALIGNMENT 512u

/* What the driver gave is kept, or taken back: then the application's variable is what it was. */
static CUresult end_allocation(struct vc_charge *charge, CUresult result, CUdeviceptr *pointer, CUdeviceptr before,
                               uint64_t bytes, enum vc_memory_kind kind)
{
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(charge);
        return result;
    }
    if (vc_charge_keep(charge, *pointer, bytes, kind))
        return CUDA_SUCCESS;
    vc_real.cuMemFree_v2(*pointer);
    *pointer = before;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult end_allocation_v1(struct vc_charge *charge, CUresult result, CUdeviceptr_v1 *pointer, CUdeviceptr before,
                                  uint64_t bytes)
{
    CUdeviceptr made = *pointer;
    result = end_allocation(charge, result, &made, before, bytes, VC_MEMORY_PLAIN);
    *pointer = (CUdeviceptr_v1)made;
    return result;
}

/* The physical part of an oversold share is full. */
static CUresult allocate_oversold(struct vc_charge *charge, CUdeviceptr *pointer, uint64_t bytes)
{
    CUdeviceptr before = *pointer;
    CUresult result = vc_real.cuMemAllocManaged(pointer, bytes, CU_MEM_ATTACH_GLOBAL);
    return end_allocation(charge, result, pointer, before, bytes, VC_MEMORY_OVERSOLD);
}

CUresult vc_hook_cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    struct vc_charge charge;
    if (!pointer || bytes == 0)
        return vc_real.cuMemAlloc_v2(pointer, bytes); /* the driver says what is wrong */
    CUresult result = vc_charge_either(&charge, vc_round_up(bytes, VC_CHUNK));
    if (result != CUDA_SUCCESS)
        return result;
    if (VC_UNLIKELY(charge.managed))
        return allocate_oversold(&charge, pointer, bytes);
    CUdeviceptr before = *pointer;
    result = vc_real.cuMemAlloc_v2(pointer, bytes);
    return end_allocation(&charge, result, pointer, before, bytes, VC_MEMORY_PLAIN);
}

CUresult vc_hook_cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    struct vc_charge charge;
    if (!pointer || bytes == 0)
        return vc_real.cuMemAlloc(pointer, bytes);
    CUresult result = vc_charge_current(&charge, vc_round_up(bytes, VC_CHUNK));
    if (result != CUDA_SUCCESS)
        return result;
    CUdeviceptr_v1 before = *pointer;
    result = vc_real.cuMemAlloc(pointer, bytes);
    return end_allocation_v1(&charge, result, pointer, before, bytes);
}

static uint64_t pitched_bytes(uint64_t width, uint64_t height)
{
    return vc_round_up(vc_times(vc_round_up(width, VC__PITCH_ALIGNMENT), height), VC_CHUNK);
}

/* No other is allowed, so far. */
static bool is_element(unsigned int bytes)
{
    return bytes == 4 || bytes == 8 || bytes == 16;
}

CUresult vc_hook_cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    struct vc_charge charge;
    if (!pointer || !pitch || width == 0 || height == 0)
        return vc_real.cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    bool likely = is_element(element); /* what the driver will refuse is not refused for its size; what it gives is charged */
    CUresult result = (likely ? vc_charge_either : vc_charge_current)(&charge, likely ? pitched_bytes(width, height) : 0);
    if (result != CUDA_SUCCESS)
        return result;
    if (VC_UNLIKELY(charge.managed)) {
        uint64_t row = vc_round_up(width, VC__PITCH_ALIGNMENT);
        result = allocate_oversold(&charge, pointer, row * height);
        if (result == CUDA_SUCCESS)
            *pitch = row;
        return result;
    }
    CUdeviceptr before = *pointer;
    size_t pitch_before = *pitch;
    result = vc_real.cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    bool made = result == CUDA_SUCCESS;
    result = end_allocation(&charge, result, pointer, before, made ? vc_times(*pitch, height) : 0, VC_MEMORY_PLAIN);
    if (made && result != CUDA_SUCCESS)
        *pitch = pitch_before;
    return result;
}

CUresult vc_hook_cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                                 unsigned int element)
{
    struct vc_charge charge;
    if (!pointer || !pitch || width == 0 || height == 0)
        return vc_real.cuMemAllocPitch(pointer, pitch, width, height, element);
    CUresult result = vc_charge_current(&charge, is_element(element) ? pitched_bytes(width, height) : 0);
    if (result != CUDA_SUCCESS)
        return result;
    CUdeviceptr_v1 before = *pointer;
    unsigned int pitch_before = *pitch;
    result = vc_real.cuMemAllocPitch(pointer, pitch, width, height, element);
    bool made = result == CUDA_SUCCESS;
    result = end_allocation_v1(&charge, result, pointer, before, made ? vc_times(*pitch, height) : 0);
    if (made && result != CUDA_SUCCESS)
        *pitch = pitch_before;
    return result;
}

/* Managed memory may lie on the host, but the tenant can bring all of it to any card at any time: charged in full on each. */
CUresult vc_hook_cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    struct vc_charge charge;
    unsigned int attach = flags & ~(unsigned int)CU_MEM_ATTACH_SINGLE;
    bool likely = attach == CU_MEM_ATTACH_GLOBAL || attach == CU_MEM_ATTACH_HOST || flags == CU_MEM_ATTACH_SINGLE;
    if (!pointer || bytes == 0)
        return vc_real.cuMemAllocManaged(pointer, bytes, flags);
    CUresult result = vc_charge_managed(&charge, likely ? vc_round_up(bytes, VC_CHUNK) : 0);
    if (result != CUDA_SUCCESS)
        return result;
    CUdeviceptr before = *pointer;
    result = vc_real.cuMemAllocManaged(pointer, bytes, flags);
    return end_allocation(&charge, result, pointer, before, bytes, VC_MEMORY_MANAGED);
}

CUresult vc_hook_cuMemFree_v2(CUdeviceptr pointer)
{
    struct vc_allocation freeing;
    bool known = vc_charge_take(pointer, &freeing);
    CUresult result = vc_real.cuMemFree_v2(pointer);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}

CUresult vc_hook_cuMemFree(CUdeviceptr_v1 pointer)
{
    struct vc_allocation freeing;
    bool known = vc_charge_take(pointer, &freeing);
    CUresult result = vc_real.cuMemFree(pointer);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}
