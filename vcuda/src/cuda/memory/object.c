/* Handles and mappings, each a table of its own, and the objects behind them.
 *
 * What a call is about to give back is taken out before it, and put back if it fails, because the driver reuses handles and
 * addresses at once. A reference is only added under the lock of the record that holds one already. */
#include "cuda/memory/object.h"

#include <stdlib.h>

#include "base/table.h"
#include "cuda/memory/holder.h"

#define VC__GRANULARITY 4096u /* no driver has a smaller one */

struct vc_object {
    uint32_t references; /* handles, mappings and bindings that keep it */
    vc_cards cards;      /* none: nothing is charged to us */
    CUdevice device;
    uint64_t bytes;
    struct vc_import *import; /* NULL: not imported */
    struct vc_extent extent;  /* of our own; no chunks: it has none */
    bool is_nothing;
};

struct handle {
    uint64_t key; /* the handle + 1 */
    uint64_t count;
    struct vc_object *object;
};
VC_TABLE(handles, struct handle);

struct mapping {
    uint64_t key; /* its first address */
    uint64_t bytes;
    struct vc_object *object;
};
VC_TABLE(mappings, struct mapping);
static uint64_t largest_mapping;

static void hold(struct vc_object *object)
{
    vc_add_relaxed(&object->references, 1);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards what an object is found out to be later: its extent, its size */

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
}
VC_AT_FORK(forget);

static void end_import(struct vc_import *import)
{
    if (import && import->held)
        vc_shared_let(&import->extent);
    free(import);
}

const struct vc_extent *vc_object_extent(struct vc_object *object)
{
    if (object->import && object->import->held)
        return &object->import->extent;
    pthread_mutex_lock(&mutex);
    bool has = object->extent.chunks > 0;
    uint32_t within;
    struct vc_region *region = vc_cards_region(object->cards, &within);
    if (!has && region && vc_shared_new(region, within, object->bytes, &object->extent)) {
        vc_cards_share(object->cards, (int64_t)object->bytes);
        has = true;
    } else if (!has) {
        object->extent = (struct vc_extent){0};
    }
    pthread_mutex_unlock(&mutex);
    return has ? &object->extent : NULL;
}

void vc_object_drop(struct vc_object *object)
{
    size_t count;
    if (vc_sub(&object->references, 1) > 0)
        return;
    bool over = object->extent.chunks == 0 || vc_shared_end(&object->extent);
    if (object->extent.chunks > 0 && over)
        vc_cards_share(object->cards, -(int64_t)object->bytes);
    if (object->cards && over) /* else it stays charged until the process ends */
        vc_cards_release(object->cards, object->bytes, VC_QUOTA_PLAIN);
    struct vc_object **kept = vc_holder_let_go(object, NULL, &count);
    while (count-- > 0)
        vc_object_drop(kept[count]);
    free(kept);
    end_import(object->import);
    free(object);
}

CUdevice vc_object_device(const struct vc_object *object)
{
    return object->device;
}

/* Handles. */

static enum vc_table_edit hold_handle(void *record, void *object)
{
    *(struct vc_object **)object = ((struct handle *)record)->object;
    hold(((struct handle *)record)->object);
    return VC_TABLE_KEEP;
}

struct vc_object *vc_object_hold(CUmemGenericAllocationHandle value)
{
    struct vc_object *object = NULL;
    vc_regions_get(); /* a forked child forgets first */
    vc_table_edit(&handles, value + 1, false, hold_handle, &object);
    return object;
}

static enum vc_table_edit count_handle(void *record, void *object)
{
    struct handle *handle = record;
    if (!handle->object)
        handle->object = object;
    handle->count++;
    return VC_TABLE_KEEP;
}

/* One more reference by this handle, which the caller holds. False: no host memory. */
static bool add_handle(CUmemGenericAllocationHandle value, struct vc_object *object)
{
    return vc_table_edit(&handles, value + 1, true, count_handle, object);
}

/* One that is counted less; NULL: not ours. Its reference is the caller's then. */
static enum vc_table_edit uncount_handle(void *record, void *object)
{
    struct handle *handle = record;
    *(struct vc_object **)object = handle->object;
    return --handle->count == 0 ? VC_TABLE_ERASE : VC_TABLE_KEEP;
}

struct vc_object *vc_object_held(struct vc_object *object)
{
    hold(object);
    return object;
}

bool vc_object_is_ours(const struct vc_object *object)
{
    return object->cards != 0;
}

void vc_object_add_handle(CUmemGenericAllocationHandle value, struct vc_object *object)
{
    add_handle(value, object);
}

bool vc_object_is_nothing(const struct vc_object *object)
{
    return object->is_nothing;
}

void vc_object_add_uncharged(CUmemGenericAllocationHandle value, bool is_nothing)
{
    struct vc_object *known = vc_object_hold(value); /* the driver may give one handle for what is imported twice */
    struct vc_object *object = known ? known : calloc(1, sizeof *object);
    if (object && !known)
        *object = (struct vc_object){.references = 1, .is_nothing = is_nothing};
    if (object && !add_handle(value, object))
        vc_object_drop(object);
}

/* We pay for what was imported: out of what is reserved for it, if that is where it lies. False: that is over the limit. */
static bool pay(struct vc_object *object, vc_cards *reserved)
{
    struct vc_charge charge;
    const struct vc_import *import = object->import;
    if ((import->cards & ~*reserved) == 0)
        *reserved &= ~import->cards;
    else if (vc_charge_cards(&charge, import->cards, import->bytes) != CUDA_SUCCESS)
        return false;
    object->cards = import->cards;
    vc_cards_commit(import->cards, import->bytes, VC_QUOTA_PLAIN);
    return true;
}

CUresult vc_object_add_import(CUmemGenericAllocationHandle value, const struct vc_import *made)
{
    struct vc_object *known = vc_object_hold(value), *object = known ? known : calloc(1, sizeof *object);
    struct vc_import *import = malloc(sizeof *import);
    vc_cards reserved = made->reserved;
    bool fits = object && import;
    if (import)
        *import = *made;
    if (known) { /* the driver gave one handle for what is imported twice */
        end_import(import);
    } else if (object && import) {
        *object = (struct vc_object){.references = 1, .device = made->device, .bytes = made->bytes, .import = import};
        fits = made->held || pay(object, &reserved);
    }
    vc_cards_rollback(reserved, made->bytes);
    if (fits && add_handle(value, object))
        return CUDA_SUCCESS;
    if (object)
        vc_object_drop(object);
    vc_real.cuMemRelease(value);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

bool vc_is_pinned_on_host(const CUmemAllocationProp *properties)
{
    bool on_host = properties->location.type == CU_MEM_LOCATION_TYPE_HOST ||
                   properties->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
                   properties->location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    return on_host && properties->type == CU_MEM_ALLOCATION_TYPE_PINNED;
}

/* Where a handle's memory lies: what is neither on a device nor pinned on the host may come to any card. */
static CUresult begin_create(struct vc_charge *charge, const CUmemAllocationProp *properties, uint64_t bytes)
{
    if (properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        return vc_charge_device(charge, properties->location.id, bytes);
    return vc_charge_cards(charge, vc_is_pinned_on_host(properties) ? 0 : vc_cards_all(), bytes);
}

CUresult vc_hook_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                             unsigned long long flags)
{
    struct vc_charge charge;
    if (!handle || !properties || bytes == 0 || bytes % VC__GRANULARITY != 0)
        return vc_real.cuMemCreate(handle, bytes, properties, flags); /* the driver's own error */
    CUresult result = begin_create(&charge, properties, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    struct vc_object *object = charge.cards ? calloc(1, sizeof *object) : NULL;
    CUmemGenericAllocationHandle before = *handle;
    result = charge.cards && !object ? CUDA_ERROR_OUT_OF_MEMORY : vc_real.cuMemCreate(handle, bytes, properties, flags);
    if (result != CUDA_SUCCESS || !object) {
        vc_charge_drop(&charge);
        free(object);
        return result;
    }
    *object = (struct vc_object){.references = 1, .cards = charge.cards, .device = properties->location.id, .bytes = bytes};
    if (!add_handle(*handle, object)) {
        vc_real.cuMemRelease(*handle);
        *handle = before;
        vc_charge_drop(&charge);
        free(object);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    vc_cards_commit(charge.cards, bytes, VC_QUOTA_PLAIN);
    return CUDA_SUCCESS;
}

CUresult vc_hook_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    struct vc_object *object = NULL;
    vc_regions_get();
    vc_table_edit(&handles, handle + 1, false, uncount_handle, &object);
    CUresult result = vc_real.cuMemRelease(handle);
    if (object && result == CUDA_SUCCESS)
        vc_object_drop(object);
    else if (object)
        add_handle(handle, object); /* there was room a moment ago */
    return result;
}

/* Mappings. */

CUresult vc_hook_cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags)
{
    struct vc_object *object = vc_object_hold(handle); /* before the driver knows of it: it may be released meanwhile */
    CUresult result = vc_real.cuMemMap(address, bytes, offset, handle, flags);
    if (!object)
        return result;
    struct mapping mapping = {.key = address, .bytes = bytes, .object = object};
    if (result == CUDA_SUCCESS && vc_table_put(&mappings, &mapping)) {
        vc_raise_to(&largest_mapping, bytes);
        return result;
    }
    if (result == CUDA_SUCCESS) {
        vc_real.cuMemUnmap(address, bytes);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    vc_object_drop(object);
    return result;
}

/* Take out the mappings that begin in a range: they lie one behind the other, or in steps of a chunk. */
static bool take_mappings(CUdeviceptr address, size_t bytes, struct mapping **taken, size_t *count)
{
    size_t room = 0;
    struct mapping one;
    *taken = NULL;
    *count = 0;
    for (uint64_t at = 0; at < bytes; at += one.bytes ? one.bytes : VC_CHUNK) {
        one.bytes = VC_CHUNK;
        if (*count == room) {
            struct mapping *moved = realloc(*taken, (room ? room * 2 : 8) * sizeof **taken);
            if (!moved)
                return false;
            *taken = moved;
            room = room ? room * 2 : 8;
        }
        if (vc_table_take(&mappings, address + at, &one))
            (*taken)[(*count)++] = one;
        else
            one.bytes = VC_CHUNK;
    }
    return true;
}

CUresult vc_hook_cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    struct mapping *taken;
    size_t count;
    vc_regions_get();
    bool fits = take_mappings(address, bytes, &taken, &count);
    /* Without a record of it, it would stay charged for ever. */
    CUresult result = fits ? vc_real.cuMemUnmap(address, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t index = 0; index < count; index++) {
        if (result == CUDA_SUCCESS)
            vc_object_drop(taken[index].object);
        else
            vc_table_put(&mappings, &taken[index]); /* its place is still there */
    }
    free(taken);
    return result;
}

struct inside {
    uint64_t offset; /* from the mapping's first address */
    struct vc_object *object;
};

static enum vc_table_edit hold_mapping(void *record, void *argument)
{
    struct mapping *mapping = record;
    struct inside *inside = argument;
    inside->object = inside->offset < mapping->bytes ? mapping->object : NULL;
    if (inside->object)
        hold(inside->object);
    return VC_TABLE_KEEP;
}

struct vc_object *vc_object_hold_at(CUdeviceptr address)
{
    uint64_t last = vc_load_relaxed(&largest_mapping);
    vc_regions_get();
    for (uint64_t back = address % VC_CHUNK; back < last && back <= address; back += VC_CHUNK) {
        struct inside inside = {.offset = back};
        if (vc_table_edit(&mappings, address - back, false, hold_mapping, &inside))
            return inside.object;
    }
    return NULL;
}

CUresult vc_hook_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    CUresult result = vc_real.cuMemRetainAllocationHandle(handle, address);
    if (result != CUDA_SUCCESS)
        return result;
    struct vc_object *object = vc_object_hold_at((CUdeviceptr)(uintptr_t)address);
    if (object && !add_handle(*handle, object)) {
        vc_real.cuMemRelease(*handle);
        vc_object_drop(object);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}
