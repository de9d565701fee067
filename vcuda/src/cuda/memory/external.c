/* Memory that another interface made (Vulkan, OpenGL, …), in which no shim stands: charged from its import until neither the object
 * nor anything that was mapped of it is left. */
#include <stdlib.h>

#include "cuda/memory/account.h"

struct external {
    uint32_t references; /* the object, mapped buffers and arrays */
    uint64_t bytes;
};

static void freed(const struct vc_allocation *allocation)
{
    struct external *external = allocation->owner;
    if (vc_sub(&external->references, 1) > 0)
        return;
    vc_cards_release(vc_region_get(), allocation->cards, external->bytes, VC_QUOTA_PLAIN);
    free(external);
}

static const struct vc_source external_memory = {.freed = freed};
VC_SOURCE(external_memory);

/* One more thing that keeps it. False: no host memory. */
static bool record(struct external *external, const struct vc_charge *charge, uint64_t key)
{
    struct vc_allocation allocation = {.key = key, .context = charge->context, .owner = external, .source = &external_memory,
                                       .cards = charge->cards, .kind = VC_MEMORY_OPAQUE};
    vc_add(&external->references, 1);
    if (vc_account_record(&allocation))
        return true;
    vc_sub(&external->references, 1);
    return false;
}

CUresult vc_hook_cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
    struct vc_charge charge;
    if (!memory || !descriptor)
        return vc_real.cuImportExternalMemory(memory, descriptor);
    CUresult result = vc_charge_current(&charge, vc_round_up(descriptor->size, VC_CHUNK));
    if (result != CUDA_SUCCESS)
        return result;
    struct external *external = charge.cards ? calloc(1, sizeof *external) : NULL;
    result = charge.cards && !external ? CUDA_ERROR_OUT_OF_MEMORY : vc_real.cuImportExternalMemory(memory, descriptor);
    if (result == CUDA_SUCCESS && external) {
        external->bytes = charge.reserved;
        if (record(external, &charge, (uint64_t)(uintptr_t)*memory)) {
            vc_cards_commit(charge.region, charge.cards, charge.reserved, VC_QUOTA_PLAIN);
            return result;
        }
        vc_real.cuDestroyExternalMemory(*memory);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    vc_charge_drop(&charge);
    free(external);
    return result;
}

CUresult vc_hook_cuDestroyExternalMemory(CUexternalMemory memory)
{
    struct vc_allocation freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)memory, &freeing);
    CUresult result = vc_real.cuDestroyExternalMemory(memory);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}

/* Something was mapped of it; without host memory, what it keeps is charged no longer than the object. */
static void mapped(CUexternalMemory memory, uint64_t key)
{
    struct vc_allocation object;
    if (!vc_account_get((uint64_t)(uintptr_t)memory, &object) || object.source != &external_memory)
        return;
    record(object.owner, &(struct vc_charge){.context = object.context, .cards = object.cards}, key);
}

CUresult vc_hook_cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory, const void *descriptor)
{
    CUresult result = vc_real.cuExternalMemoryGetMappedBuffer(pointer, memory, descriptor);
    if (result == CUDA_SUCCESS)
        mapped(memory, *pointer);
    return result;
}

CUresult vc_hook_cuExternalMemoryGetMappedMipmappedArray(CUmipmappedArray *array, CUexternalMemory memory, const void *descriptor)
{
    CUresult result = vc_real.cuExternalMemoryGetMappedMipmappedArray(array, memory, descriptor);
    if (result == CUDA_SUCCESS)
        mapped(memory, (uint64_t)(uintptr_t)*array);
    return result;
}
