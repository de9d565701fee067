/* Multicast objects and sparse arrays: memory bound to one stays on the card when its handle is released and nothing is mapped.
 *
 * Each binding keeps the physical object behind it. A multicast object gives it back when it is unbound, or when the object
 * itself is gone; an array when other memory, or none, takes its place in full, as soon as the stream got there, or when it is
 * destroyed. */
#include "cuda/memory/binding.h"

#include <stdlib.h>

#include "cuda/driver/owner.h"
#include "cuda/memory/departure.h"
#include "cuda/memory/holder.h"
#include "cuda/memory/object.h"

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
    const struct vc_place place = {.kind = VC_PLACE_MULTICAST, .layer = (uint32_t)device, .from = {offset}, .to = {offset + bytes}};
    if (!vc_holder_bind(multicast, &place, memory)) {
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
    const struct vc_place place = {.kind = VC_PLACE_MULTICAST, .layer = (uint32_t)device, .from = {offset}, .to = {offset + bytes}};
    struct vc_object *multicast = vc_object_hold(handle);
    CUresult result = vc_real.cuMulticastUnbind(handle, device, offset, bytes);
    size_t count = 0;
    struct vc_object **kept = multicast && result == CUDA_SUCCESS ? vc_holder_let_go(multicast, &place, &count) : NULL;
    while (count-- > 0)
        vc_object_drop(kept[count]);
    free(kept);
    if (multicast)
        vc_object_drop(multicast);
    return result;
}

CUresult vc_hook_cuMulticastCreate(CUmemGenericAllocationHandle *handle, const void *properties)
{
    CUresult result = vc_real.cuMulticastCreate(handle, properties);
    if (result == CUDA_SUCCESS)
        vc_object_add_uncharged(*handle, true);
    return result;
}

/* Sparse arrays. */

static struct vc_place place_of(const CUarrayMapInfo *info)
{
    if (info->subresourceType == CU_ARRAY_SPARSE_SUBRESOURCE_TYPE_MIPTAIL) {
        uint64_t from = info->subresource.miptail.offset;
        return (struct vc_place){.kind = VC_PLACE_TAIL, .layer = info->subresource.miptail.layer, .from = {from},
                              .to = {from + info->subresource.miptail.size}};
    }
    const uint64_t x = info->subresource.sparseLevel.offsetX, y = info->subresource.sparseLevel.offsetY,
                   z = info->subresource.sparseLevel.offsetZ;
    return (struct vc_place){.kind = VC_PLACE_BOX,
                          .level = info->subresource.sparseLevel.level,
                          .layer = info->subresource.sparseLevel.layer,
                          .from = {x, y, z},
                          .to = {x + info->subresource.sparseLevel.extentWidth, y + info->subresource.sparseLevel.extentHeight,
                                 z + info->subresource.sparseLevel.extentDepth}};
}

void vc_sparse_array_made(const void *array)
{
    CUcontext context = NULL;
    vc_card_of_current(&context);
    vc_holder_made(array, vc_context_owner(context));
}

void vc_sparse_array_ended(const void *array)
{
    size_t count;
    struct vc_object **kept = vc_holder_let_go(array, NULL, &count);
    while (count-- > 0)
        vc_object_drop(kept[count]);
    free(kept);
}

static void context_ended(CUcontext context)
{
    size_t count;
    const void **ended = vc_holders_of(context, &count);
    while (count-- > 0)
        vc_sparse_array_ended(ended[count]);
    free(ended);
}

static const struct vc_source sparse_arrays = {.context_ended = context_ended};
VC_SOURCE(sparse_arrays);

/* Objects that an array lets go of when a stream gets there. */
struct leaving {
    size_t count;
    struct vc_object *objects[];
};

static void left(void *what)
{
    struct leaving *leaving = what;
    while (leaving->count-- > 0)
        vc_object_drop(leaving->objects[leaving->count]);
    free(leaving);
}

/* Add to what leaves with this call. Without host memory it stays charged until the process ends. */
static struct leaving *add_leaving(struct leaving *leaving, struct vc_object **objects, size_t count)
{
    size_t had = leaving ? leaving->count : 0;
    struct leaving *larger = count ? realloc(leaving, sizeof *leaving + (had + count) * sizeof *leaving->objects) : NULL;
    if (larger) {
        for (size_t index = 0; index < count; index++)
            larger->objects[had + index] = objects[index];
        larger->count = had + count;
    }
    free(objects);
    return larger ? larger : leaving;
}

static CUresult map(CUarrayMapInfo *list, unsigned int number, CUstream stream, bool per_thread,
                    CUresult (*call)(CUarrayMapInfo *, unsigned int, CUstream))
{
    struct vc_object **memory = list && number ? calloc(number, sizeof *memory) : NULL;
    if (list && number && !memory)
        return CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned int index = 0; memory && index < number; index++) {
        if (list[index].memOperationType == CU_MEM_OPERATION_TYPE_MAP)
            memory[index] = vc_object_hold(list[index].memHandle.memHandle);
    }
    CUresult result = call(list, number, stream);
    struct leaving *leaving = NULL;
    for (unsigned int index = 0; memory && index < number; index++) {
        const void *array = list[index].resource.array;
        const struct vc_place place = place_of(&list[index]);
        size_t count = 0;
        struct vc_object **old = result == CUDA_SUCCESS ? vc_holder_let_go(array, &place, &count) : NULL;
        leaving = add_leaving(leaving, old, count);
        if (memory[index] && result != CUDA_SUCCESS)
            vc_object_drop(memory[index]);
        else if (memory[index])
            vc_holder_bind(array, &place, memory[index]); /* without host memory it stays charged until the process ends */
    }
    free(memory);
    if (leaving)
        vc_depart(vc_stream_handle(stream, per_thread), left, leaving);
    return result;
}

CUresult vc_hook_cuMemMapArrayAsync(CUarrayMapInfo *list, unsigned int number, CUstream stream)
{
    return map(list, number, stream, false, vc_real.cuMemMapArrayAsync);
}

CUresult vc_hook_cuMemMapArrayAsync_ptsz(CUarrayMapInfo *list, unsigned int number, CUstream stream)
{
    return map(list, number, stream, true, vc_real.cuMemMapArrayAsync_ptsz);
}
