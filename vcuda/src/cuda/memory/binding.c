/* Multicast objects and sparse arrays: memory bound to one stays on the card when its handle is released and nothing is mapped.
 *
 * Each binding keeps the physical object behind it (vmm.c). A multicast object gives it back when it is unbound, or when the
 * object itself is gone; an array when other memory, or none, takes its place in full, as soon as the stream got there, or
 * when it is destroyed. One mutex guards the list; it is never held across a call of the driver. */
#include "cuda/memory/binding.h"

#include <stdlib.h>

#include "cuda/driver/cards.h"
#include "cuda/memory/vmm.h"

/* A place in a holder: bytes of a multicast object (by device) or of a mip tail, else a box of a level and layer. */
struct place {
    uint32_t kind, level, layer;
    uint64_t from[3], to[3];
};

enum { PLACE_MULTICAST, PLACE_BOX, PLACE_TAIL };

struct binding {
    const void *holder; /* NULL: let go of, waiting for `left` */
    struct place place;
    struct vc_object *memory;
    CUevent left;
    CUcontext context; /* that the array or the event dies with; NULL: a multicast object's */
    uint32_t round;    /* in which it was asked about */
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct binding *bindings;
static size_t count, room;

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    bindings = NULL;
    count = room = 0;
}

static void lock(void)
{
    static uint32_t watching;
    vc_region_get(); /* a forked child forgets first */
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    pthread_mutex_lock(&mutex);
}

/* Makes room for `more` bindings that will be added while the lock is not held in between. Pre: locked. */
static bool make_room(size_t more)
{
    if (room - count >= more)
        return true;
    size_t larger = (count + more) * 2;
    struct binding *moved = realloc(bindings, larger * sizeof *moved);
    if (!moved)
        return false;
    bindings = moved;
    room = larger;
    return true;
}

static bool add(struct binding added)
{
    lock();
    bool fits = make_room(1);
    if (fits)
        bindings[count++] = added;
    pthread_mutex_unlock(&mutex);
    return fits;
}

static bool within(const struct binding *one, const void *holder, const struct place *place)
{
    if (one->holder != holder || one->place.kind != place->kind || one->place.level != place->level ||
        one->place.layer != place->layer)
        return false;
    for (int axis = 0; axis < 3; axis++) {
        if (one->place.from[axis] < place->from[axis] || one->place.to[axis] > place->to[axis])
            return false;
    }
    return true;
}

/* Take out one binding that lies within a place (NULL: anywhere in the holder). */
static bool take(const void *holder, const struct place *place, struct binding *taken)
{
    lock();
    size_t index = 0;
    while (index < count && !(place ? within(&bindings[index], holder, place) : bindings[index].holder == holder))
        index++;
    bool found = index < count;
    if (found) {
        *taken = bindings[index];
        bindings[index] = bindings[--count]; /* its place stays free: it can be put back */
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

void vc_bindings_end(const void *holder)
{
    struct binding taken;
    while (vc_load_relaxed(&count) > 0 && take(holder, NULL, &taken))
        vc_object_drop(taken.memory);
}

/* Multicast objects. */

static CUresult end_bind(CUresult result, CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes,
                         struct vc_object *memory)
{
    struct vc_object *multicast = memory && result == CUDA_SUCCESS ? vc_object_hold(handle) : NULL;
    if (!multicast) {
        if (memory)
            vc_object_drop(memory);
        return result;
    }
    struct binding made = {.holder = multicast, .memory = memory,
                           .place = {.kind = PLACE_MULTICAST, .layer = (uint32_t)device, .from = {offset}, .to = {offset + bytes}}};
    if (!add(made)) {
        vc_real.cuMulticastUnbind(handle, device, offset, bytes);
        vc_object_drop(memory);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    vc_object_drop(multicast); /* the binding lives only as long as it: see vc_object_drop */
    return result;
}

static CUdevice device_of(const struct vc_object *memory)
{
    return memory ? vc_object_device(memory) : 0;
}

CUresult vc_hook_cuMulticastBindMem(CUmemGenericAllocationHandle multicast, size_t offset, CUmemGenericAllocationHandle handle,
                                    size_t from, size_t bytes, unsigned long long flags)
{
    struct vc_object *memory = vc_object_hold(handle);
    CUresult result = vc_real.cuMulticastBindMem(multicast, offset, handle, from, bytes, flags);
    return end_bind(result, multicast, device_of(memory), offset, bytes, memory);
}

CUresult vc_hook_cuMulticastBindMem_v2(CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset,
                                       CUmemGenericAllocationHandle handle, size_t from, size_t bytes, unsigned long long flags)
{
    struct vc_object *memory = vc_object_hold(handle);
    CUresult result = vc_real.cuMulticastBindMem_v2(multicast, device, offset, handle, from, bytes, flags);
    return end_bind(result, multicast, device, offset, bytes, memory);
}

CUresult vc_hook_cuMulticastBindAddr(CUmemGenericAllocationHandle multicast, size_t offset, CUdeviceptr address, size_t bytes,
                                     unsigned long long flags)
{
    struct vc_object *memory = vc_object_hold_at(address);
    CUresult result = vc_real.cuMulticastBindAddr(multicast, offset, address, bytes, flags);
    return end_bind(result, multicast, device_of(memory), offset, bytes, memory);
}

CUresult vc_hook_cuMulticastBindAddr_v2(CUmemGenericAllocationHandle multicast, CUdevice device, size_t offset,
                                        CUdeviceptr address, size_t bytes, unsigned long long flags)
{
    struct vc_object *memory = vc_object_hold_at(address);
    CUresult result = vc_real.cuMulticastBindAddr_v2(multicast, device, offset, address, bytes, flags);
    return end_bind(result, multicast, device, offset, bytes, memory);
}

CUresult vc_hook_cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t bytes)
{
    const struct place place = {.kind = PLACE_MULTICAST, .layer = (uint32_t)device, .from = {offset}, .to = {offset + bytes}};
    struct vc_object *multicast = vc_object_hold(handle);
    CUresult result = vc_real.cuMulticastUnbind(handle, device, offset, bytes);
    struct binding taken;
    while (multicast && result == CUDA_SUCCESS && take(multicast, &place, &taken))
        vc_object_drop(taken.memory);
    if (multicast)
        vc_object_drop(multicast);
    return result;
}

CUresult vc_hook_cuMulticastCreate(CUmemGenericAllocationHandle *handle, const void *properties)
{
    CUresult result = vc_real.cuMulticastCreate(handle, properties);
    if (result == CUDA_SUCCESS)
        vc_object_add_foreign(*handle);
    return result;
}

/* Imported memory is its exporter's, but an imported multicast object may get memory of ours. */
CUresult vc_hook_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    CUresult result = vc_real.cuMemImportFromShareableHandle(handle, shareable, type);
    if (result == CUDA_SUCCESS)
        vc_object_add_foreign(*handle);
    return result;
}

/* Sparse arrays. */

static struct place place_of(const CUarrayMapInfo *info)
{
    if (info->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL) {
        uint64_t from = info->subresource.miptail.offset;
        return (struct place){.kind = PLACE_TAIL, .layer = info->subresource.miptail.layer, .from = {from},
                              .to = {from + info->subresource.miptail.size}};
    }
    const uint64_t x = info->subresource.sparseLevel.offsetX, y = info->subresource.sparseLevel.offsetY,
                   z = info->subresource.sparseLevel.offsetZ;
    return (struct place){.kind = PLACE_BOX,
                          .level = info->subresource.sparseLevel.level,
                          .layer = info->subresource.sparseLevel.layer,
                          .from = {x, y, z},
                          .to = {x + info->subresource.sparseLevel.extentWidth, y + info->subresource.sparseLevel.extentHeight,
                                 z + info->subresource.sparseLevel.extentDepth}};
}

/* The array lets go of this memory when the stream gets to where it is now. Without an event it is known never: then the
 * memory stays charged until the process ends. */
static void let_go(struct binding one, CUstream stream, CUresult (*record)(CUevent, CUstream))
{
    one.holder = NULL;
    one.left = NULL;
    if (vc_real.cuEventCreate && record && vc_real.cuEventCreate(&one.left, CU_EVENT_DISABLE_TIMING) == CUDA_SUCCESS &&
        record(one.left, stream) != CUDA_SUCCESS) {
        vc_real.cuEventDestroy_v2(one.left);
        one.left = NULL;
    }
    add(one);
}

/* Take out one that was let go of and was not asked about in this round. */
static bool take_leaving(uint32_t round, struct binding *taken)
{
    lock();
    size_t index = 0;
    while (index < count && (bindings[index].holder || !bindings[index].left || bindings[index].round == round))
        index++;
    bool found = index < count;
    if (found) {
        *taken = bindings[index];
        bindings[index] = bindings[--count];
    }
    pthread_mutex_unlock(&mutex);
    return found;
}

bool vc_bindings_settle(void)
{
    static uint32_t rounds;
    if (VC_LIKELY(vc_load_relaxed(&count) == 0))
        return false;
    uint32_t round = vc_add_relaxed(&rounds, 1);
    bool any = false;
    struct binding one;
    while (take_leaving(round, &one)) {
        if (vc_real.cuEventQuery(one.left) == CUDA_SUCCESS) {
            vc_real.cuEventDestroy_v2(one.left);
            vc_object_drop(one.memory);
            any = true;
        } else {
            one.round = round;
            add(one);
        }
    }
    return any;
}

void vc_bindings_context_ended(CUcontext context)
{
    for (size_t index = 0; index < vc_load_relaxed(&count);) {
        lock();
        bool dead = index < count && bindings[index].context == context;
        struct binding one = dead ? bindings[index] : (struct binding){0};
        if (dead)
            bindings[index] = bindings[--count];
        pthread_mutex_unlock(&mutex);
        if (dead)
            vc_object_drop(one.memory);
        else
            index++;
    }
}

static CUresult map(CUarrayMapInfo *list, unsigned int number, CUstream stream, CUresult (*call)(CUarrayMapInfo *, unsigned int, CUstream),
                    CUresult (*record)(CUevent, CUstream))
{
    struct vc_object **memory = list && number ? calloc(number, sizeof *memory) : NULL;
    if (list && number && !memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    lock();
    bool fits = make_room(2 * (size_t)number);
    pthread_mutex_unlock(&mutex);
    for (unsigned int index = 0; memory && index < number; index++) {
        if (list[index].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            memory[index] = vc_object_hold(list[index].memHandle.memHandle);
    }
    CUresult result = fits ? call(list, number, stream) : CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned int index = 0; memory && index < number; index++) {
        struct binding old, made = {.holder = list[index].resource.array, .place = place_of(&list[index]), .memory = memory[index]};
        vc_card_of_current(vc_region_get(), &made.context);
        while (result == CUDA_SUCCESS && take(made.holder, &made.place, &old))
            let_go(old, stream, record);
        if (memory[index] && result != CUDA_SUCCESS)
            vc_object_drop(memory[index]);
        else if (memory[index])
            add(made); /* there was room; if it is gone, the memory stays charged until the process ends */
    }
    free(memory);
    vc_bindings_settle();
    return result;
}

CUresult vc_hook_cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int number, CUstream stream)
{
    return map(list, number, stream, vc_real.cuMemMapArrayAsync, vc_real.cuEventRecord);
}

CUresult vc_hook_cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int number, CUstream stream)
{
    return map(list, number, stream, vc_real.cuMemMapArrayAsync_ptsz, vc_real.cuEventRecord_ptsz);
}
