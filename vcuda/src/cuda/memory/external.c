/* Memory that another interface made (Vulkan, OpenGL, …), in which no shim stands: charged from its import until neither the object
 * nor anything that was mapped of it is left. */
#include <stdlib.h>
#include <sys/stat.h>

#include "cuda/driver/capture_mode.h"
#include "cuda/driver/owner.h"
#include "cuda/memory/account.h"
#include "cuda/memory/exported.h"

#define VC__OPAQUE_FD 1

struct external {
    uint32_t references; /* the object, mapped buffers and arrays */
    uint64_t bytes;
    struct vc_extent extent;
    bool held; /* it is of CUDA, and its exporter pays */
    struct vc_object *object; /* it is our own export, charged already; NULL: it is not */
};

/* Of what is not charged here. */
static void let_go(struct external *external)
{
    if (external->held)
        vc_shared_let(&external->extent);
    if (external->object)
        vc_object_drop(external->object);
    free(external);
}

static void freed(const struct vc_allocation *allocation)
{
    struct external *external = allocation->owner;
    if (vc_sub(&external->references, 1) > 0)
        return;
    vc_cards_release(allocation->cards, external->bytes, VC_QUOTA_PLAIN);
    let_go(external);
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

/* What there is to charge. The size that is said is a part's where the object is larger. What CUDA itself has exported is its exporter's,
 * while we hold it. */
static uint64_t look_at(const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor, struct external *external)
{
    struct vc_signature signature;
    struct stat status;
    uint64_t bytes = descriptor->size;
    if (descriptor->type != VC__OPAQUE_FD || vc_card_of_current(NULL) < 0)
        return bytes;
    if (fstat(descriptor->handle.fd, &status) == 0 && status.st_size > 0 && (uint64_t)status.st_size > bytes)
        bytes = (uint64_t)status.st_size;
    external->object = vc_exported_find(descriptor->handle.fd);
    if (external->object)
        return 0;
    if (!vc_signature_read(descriptor->handle.fd, &signature))
        return bytes;
    external->held = vc_signature_hold(&signature, &external->extent);
    uint64_t whole = signature.extent.chunks * VC_CHUNK;
    return external->held ? 0 : whole > bytes ? whole : bytes;
}

static bool is_one_card(void)
{
    const struct vc_regions *regions = vc_regions_get();
    return regions->card_count == 1 && !regions->lost;
}

/* Only an address can be asked about. What can't be mapped may lie anywhere. */
static vc_cards cards_of(CUexternalMemory memory, uint64_t bytes)
{
    CUdeviceptr pointer;
    CUDA_EXTERNAL_MEMORY_BUFFER_DESC whole = {.size = bytes};
    if (is_one_card())
        return 1;
    int mode = vc_capture_relax();
    vc_cards cards = vc_cards_all();
    if (vc_real.cuExternalMemoryGetMappedBuffer(&pointer, memory, &whole) == CUDA_SUCCESS) {
        cards = vc_cards_at(pointer);
        vc_real.cuMemFree_v2(pointer);
    }
    vc_capture_restore(mode);
    return cards;
}

/* It lies on these cards: hold it there, or pay there. False: there is no room. */
static bool settle(struct external *external, vc_cards cards, vc_cards *reserved)
{
    struct vc_charge charge;
    uint32_t within;
    if (external->held && vc_cards_region(cards, &within) == external->extent.region) {
        external->extent.cards = within;
        vc_shared_narrow(&external->extent);
    } else if (external->held) { /* his tag was met by chance */
        vc_shared_let(&external->extent);
        external->held = false;
        vc_cards_rollback(*reserved, external->bytes);
        *reserved = 0;
        external->bytes = external->extent.chunks * VC_CHUNK;
    }
    if ((cards & ~*reserved) == 0)
        *reserved &= ~cards;
    else if (vc_charge_cards(&charge, cards, external->bytes) != CUDA_SUCCESS)
        return false;
    return true;
}

static CUresult import(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor, struct external *external)
{
    struct vc_charge charge = {0};
    external->bytes = vc_round_up(look_at(descriptor, external), VC_CHUNK); /* the driver takes the descriptor */
    int current = vc_card_of_current(&charge.context);
    charge.context = vc_context_owner(charge.context);
    if (current == VC_CARD_UNKNOWN)
        return vc_real.cuImportExternalMemory(memory, descriptor);
    vc_cards reserved = vc_reserve_anywhere(external->bytes);
    if (!reserved)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUexternalMemory before = *memory;
    CUresult result = vc_real.cuImportExternalMemory(memory, descriptor);
    if (result == CUDA_SUCCESS) {
        charge.cards = cards_of(*memory, descriptor->size);
        bool fits = settle(external, charge.cards, &reserved);
        if (fits && record(external, &charge, (uint64_t)(uintptr_t)*memory)) {
            vc_cards_commit(charge.cards, external->bytes, VC_QUOTA_PLAIN);
        } else {
            if (fits)
                vc_cards_rollback(charge.cards, external->bytes);
            vc_real.cuDestroyExternalMemory(*memory);
            *memory = before;
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    vc_cards_rollback(reserved, external->bytes);
    return result;
}

CUresult vc_hook_cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
    if (!memory || !descriptor)
        return vc_real.cuImportExternalMemory(memory, descriptor);
    struct external *external = calloc(1, sizeof *external);
    if (!external)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = import(memory, descriptor, external);
    if (external->references == 0)
        let_go(external);
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
