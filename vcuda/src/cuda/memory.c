/* Plain, pitched and managed allocations, and the free that serves all kinds. */
#include "charge.h"

/* What the pitched allocator may add to a row: no card aligns rows to more. Trued up when the pitch is known. */
#define VC__PITCH_ALIGNMENT 512u

static CUresult end_allocation(struct vc_charge *charge, CUresult result, CUdeviceptr pointer, enum vc_memory_kind kind)
{
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(charge);
        return result;
    }
    if (vc_charge_keep(charge, pointer, kind))
        return CUDA_SUCCESS;
    vc_real.cuMemFree_v2(pointer);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, vc_round_plain(bytes));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAlloc_v2(pointer, bytes);
    return end_allocation(&charge, result, result == CUDA_SUCCESS ? *pointer : 0, VC_MEMORY_PLAIN);
}

CUresult vc_hook_cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, vc_round_plain(bytes));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAlloc(pointer, bytes);
    return end_allocation(&charge, result, result == CUDA_SUCCESS ? *pointer : 0, VC_MEMORY_PLAIN);
}

static uint64_t pitched_bytes(uint64_t pitch, uint64_t height)
{
    uint64_t bytes;
    return __builtin_mul_overflow(pitch, height, &bytes) ? UINT64_MAX : vc_round_plain(bytes);
}

static uint64_t widest_row(uint64_t width)
{
    return width > UINT64_MAX - VC__PITCH_ALIGNMENT ? UINT64_MAX
                                                    : (width + VC__PITCH_ALIGNMENT - 1) & ~(uint64_t)(VC__PITCH_ALIGNMENT - 1);
}

/* The driver said the pitch: hold what rows of that pitch take, no more and no less. */
static CUresult end_pitched(struct vc_charge *charge, CUresult result, CUdeviceptr pointer, uint64_t pitch, uint64_t height)
{
    if (result == CUDA_SUCCESS && charge->card >= 0) {
        uint64_t exact = pitched_bytes(pitch, height);
        uint32_t card = (uint32_t)charge->card;
        if (exact < charge->bytes) {
            vc_quota_rollback(charge->region, card, charge->bytes - exact);
        } else if (exact > charge->bytes && !vc_quota_reserve(charge->region, card, exact - charge->bytes)) {
            vc_real.cuMemFree_v2(pointer);
            vc_charge_drop(charge);
            vc_quota_refused(charge->region, card);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        charge->bytes = exact;
    }
    return end_allocation(charge, result, pointer, VC_MEMORY_PLAIN);
}

CUresult vc_hook_cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, pitched_bytes(widest_row(width), height));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAllocPitch_v2(pointer, pitch, width, height, element);
    return result == CUDA_SUCCESS ? end_pitched(&charge, result, *pointer, *pitch, height) : end_pitched(&charge, result, 0, 0, 0);
}

CUresult vc_hook_cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                                 unsigned int element)
{
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, pitched_bytes(widest_row(width), height));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAllocPitch(pointer, pitch, width, height, element);
    return result == CUDA_SUCCESS ? end_pitched(&charge, result, *pointer, *pitch, height) : end_pitched(&charge, result, 0, 0, 0);
}

/* Managed memory may lie on the host, but the tenant can bring all of it to the card at any time: charged in full. */
CUresult vc_hook_cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, vc_round_plain(bytes));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMemAllocManaged(pointer, bytes, flags);
    return end_allocation(&charge, result, result == CUDA_SUCCESS ? *pointer : 0, VC_MEMORY_MANAGED);
}

CUresult vc_hook_cuMemFree_v2(CUdeviceptr pointer)
{
    struct vc_entry entry;
    bool known = vc_charge_take(pointer, &entry);
    CUresult result = vc_real.cuMemFree_v2(pointer);
    if (known)
        vc_charge_freed(&entry, result);
    return result;
}

CUresult vc_hook_cuMemFree(CUdeviceptr_v1 pointer)
{
    struct vc_entry entry;
    bool known = vc_charge_take(pointer, &entry);
    CUresult result = vc_real.cuMemFree(pointer);
    if (known)
        vc_charge_freed(&entry, result);
    return result;
}
