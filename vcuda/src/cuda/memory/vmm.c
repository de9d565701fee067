/* Virtual memory management: physical memory is charged from cuMemCreate until neither a handle nor a mapping is left.
 *
 * Recorded are handles (counted references), mappings (address ranges) and the physical object behind both. Calls are
 * few (some per segment), so one mutex guards all three; it is never held across a call of the driver. What a call is about to give back is taken out before it, and put back if it fails,
 * because the driver reuses handles and addresses at once. */
#include <stdlib.h>

#include "cuda/memory/vmm.h"

#include "cuda/memory/binding.h"
#include "cuda/memory/charge.h"

struct vc_object {
    uint32_t references; /* handles, mappings and bindings that keep it */
    int card;            /* VC_CARD_NONE: not memory of ours, nothing is charged */
    CUdevice device;
    uint64_t bytes;
};

struct handle {
    CUmemGenericAllocationHandle value;
    uint32_t count;
    struct vc_object *object;
};

struct mapping {
    CUdeviceptr address;
    size_t bytes;
    struct vc_object *object;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct handle *handles;
static size_t handle_count, handle_room;
static struct mapping *mappings; /* sorted by address: segments make thousands */
static size_t mapping_count, mapping_room;

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    handles = NULL;
    mappings = NULL;
    handle_count = handle_room = mapping_count = mapping_room = 0;
}

static void lock(void)
{
    static uint32_t watching;
    vc_region_get(); /* a forked child forgets first */
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    pthread_mutex_lock(&mutex);
}

static bool make_room(void **items, size_t *room, size_t count, size_t bytes)
{
    if (count < *room)
        return true;
    size_t larger = *room ? *room * 2 : 32;
    void *moved = realloc(*items, larger * bytes);
    if (!moved)
        return false;
    *items = moved;
    *room = larger;
    return true;
}

static struct handle *find_handle(CUmemGenericAllocationHandle value)
{
    for (size_t index = handle_count; index-- > 0;) {
        if (handles[index].value == value)
            return &handles[index];
    }
    return NULL;
}

/* Pre: locked. Count one more reference by this handle value. */
static bool add_handle(CUmemGenericAllocationHandle value, struct vc_object *object)
{
    struct handle *known = find_handle(value);
    if (!known) {
        if (!make_room((void **)&handles, &handle_room, handle_count, sizeof *handles))
            return false;
        known = &handles[handle_count++];
        *known = (struct handle){.value = value, .object = object};
    }
    known->count++;
    object->references++;
    return true;
}

/* Index of the first mapping whose address is not below `address`. Pre: locked. */
static size_t first_mapping(CUdeviceptr address)
{
    size_t low = 0, high = mapping_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (mappings[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool add_mapping(struct mapping added)
{
    if (!make_room((void **)&mappings, &mapping_room, mapping_count, sizeof *mappings))
        return false;
    size_t place = first_mapping(added.address);
    for (size_t index = mapping_count; index > place; index--)
        mappings[index] = mappings[index - 1];
    mappings[place] = added;
    mapping_count++;
    return true;
}

/* Drop one reference after the driver has; the last one returns the memory to the quota. */
void vc_object_drop(struct vc_object *object)
{
    lock();
    bool last = --object->references == 0;
    pthread_mutex_unlock(&mutex);
    if (!last)
        return;
    if (object->card >= 0)
        vc_quota_release(vc_region_get(), (uint32_t)object->card, object->bytes, VC_QUOTA_PLAIN);
    vc_bindings_end(object);
    free(object);
}

struct vc_object *vc_object_hold(CUmemGenericAllocationHandle value)
{
    lock();
    struct handle *known = find_handle(value);
    struct vc_object *object = known ? known->object : NULL;
    if (object)
        object->references++;
    pthread_mutex_unlock(&mutex);
    return object;
}

/* The mapping that contains an address, or NULL. Pre: locked. */
static struct mapping *find_mapping(CUdeviceptr inside)
{
    size_t place = first_mapping(inside);
    if ((place == mapping_count || mappings[place].address != inside) && place > 0)
        place--;
    return place < mapping_count && inside - mappings[place].address < mappings[place].bytes ? &mappings[place] : NULL;
}

struct vc_object *vc_object_hold_at(CUdeviceptr address)
{
    lock();
    struct mapping *mapping = find_mapping(address);
    struct vc_object *object = mapping ? mapping->object : NULL;
    if (object)
        object->references++;
    pthread_mutex_unlock(&mutex);
    return object;
}

CUdevice vc_object_device(const struct vc_object *object)
{
    return object->device;
}

void vc_object_add_foreign(CUmemGenericAllocationHandle value)
{
    struct vc_object *made = calloc(1, sizeof *made);
    if (made)
        made->card = VC_CARD_NONE;
    lock();
    struct handle *known = find_handle(value); /* the driver may give one handle for what is imported twice */
    bool used = known ? add_handle(value, known->object) && false : made && add_handle(value, made);
    pthread_mutex_unlock(&mutex);
    if (!used)
        free(made);
}

CUresult vc_hook_cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *properties,
                             unsigned long long flags)
{
    if (!properties || properties->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return vc_real.cuMemCreate(handle, bytes, properties, flags); /* host memory, or the driver's own error */
    struct vc_charge charge;
    CUresult result = vc_charge_device(&charge, properties->location.id, bytes);
    if (result != CUDA_SUCCESS)
        return result;
    struct vc_object *object = charge.card >= 0 ? calloc(1, sizeof *object) : NULL;
    if (charge.card >= 0 && !object) {
        vc_charge_drop(&charge);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    result = vc_real.cuMemCreate(handle, bytes, properties, flags);
    if (result != CUDA_SUCCESS || !object) {
        vc_charge_drop(&charge);
        free(object);
        return result;
    }
    *object = (struct vc_object){.card = charge.card, .device = properties->location.id, .bytes = bytes};
    lock();
    bool recorded = add_handle(*handle, object);
    pthread_mutex_unlock(&mutex);
    if (!recorded) {
        vc_real.cuMemRelease(*handle);
        vc_charge_drop(&charge);
        free(object);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    vc_quota_commit(charge.region, (uint32_t)charge.card, bytes, VC_QUOTA_PLAIN);
    return CUDA_SUCCESS;
}

CUresult vc_hook_cuMemRelease(CUmemGenericAllocationHandle handle)
{
    lock();
    struct handle *known = find_handle(handle);
    struct vc_object *object = known ? known->object : NULL;
    if (known && --known->count == 0)
        *known = handles[--handle_count];
    pthread_mutex_unlock(&mutex);
    CUresult result = vc_real.cuMemRelease(handle);
    if (!object)
        return result;
    if (result == CUDA_SUCCESS) {
        vc_object_drop(object);
    } else {
        lock();
        if (add_handle(handle, object)) /* there was room a moment ago */
            object->references--;
        pthread_mutex_unlock(&mutex);
    }
    return result;
}

CUresult vc_hook_cuMemMap(CUdeviceptr address, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                          unsigned long long flags)
{
    struct vc_object *object = vc_object_hold(handle); /* before the driver knows of it: it may be released meanwhile */
    CUresult result = vc_real.cuMemMap(address, bytes, offset, handle, flags);
    if (!object)
        return result;
    bool recorded = false;
    if (result == CUDA_SUCCESS) {
        lock();
        recorded = add_mapping((struct mapping){address, bytes, object});
        pthread_mutex_unlock(&mutex);
        if (!recorded) {
            vc_real.cuMemUnmap(address, bytes);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    if (!recorded)
        vc_object_drop(object);
    return result;
}

CUresult vc_hook_cuMemUnmap(CUdeviceptr address, size_t bytes)
{
    lock();
    size_t first = first_mapping(address), last = first;
    while (last < mapping_count && mappings[last].address - address < bytes)
        last++;
    size_t count = last - first;
    struct mapping *taken = count ? malloc(count * sizeof *taken) : NULL;
    if (taken) {
        for (size_t index = 0; index < count; index++)
            taken[index] = mappings[first + index];
        for (size_t index = last; index < mapping_count; index++)
            mappings[index - count] = mappings[index];
        mapping_count -= count;
    }
    pthread_mutex_unlock(&mutex);
    if (count && !taken)
        return CUDA_ERROR_OUT_OF_MEMORY; /* not without a record of it: it would stay charged for ever */
    CUresult result = vc_real.cuMemUnmap(address, bytes);
    for (size_t index = 0; index < count; index++) {
        if (result == CUDA_SUCCESS) {
            vc_object_drop(taken[index].object);
        } else {
            lock();
            add_mapping(taken[index]); /* its place is still there */
            pthread_mutex_unlock(&mutex);
        }
    }
    free(taken);
    return result;
}

CUresult vc_hook_cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    CUresult result = vc_real.cuMemRetainAllocationHandle(handle, address);
    if (result != CUDA_SUCCESS)
        return result;
    lock();
    struct mapping *mapping = find_mapping((CUdeviceptr)(uintptr_t)address);
    bool recorded = mapping ? add_handle(*handle, mapping->object) : true;
    pthread_mutex_unlock(&mutex);
    if (!recorded) {
        vc_real.cuMemRelease(*handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}
