/* Steps: physical memory by handles, mapped into reserved addresses, shared by descriptors, bound to multicast objects; arrays. */
#include <string.h>
#include <unistd.h>

#include "model.h"

static struct physical *physical_of(struct dice *dice)
{
    return &world.physicals[roll(dice, HANDLES)];
}

static void handle(struct dice *dice)
{
    struct physical *one = physical_of(dice);
    if (one->held) {
        const int result = cuMemRelease(one->handle);
        say(" cuMemRelease = %d", result);
        one->held = result != 0;
        return;
    }
    CUmemAllocationProp properties = {.type = roll(dice, 30) ? 1 : (int)roll(dice, 3), .requestedHandleTypes = 1};
    properties.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, (int)roll(dice, (unsigned)world.devices)};
    const size_t bytes = roll(dice, 20) ? CHUNK * (1 + roll(dice, 3)) : roll_bytes(dice);
    const int result = cuMemCreate(&one->handle, bytes, &properties, 0);
    say(" cuMemCreate %zu on %d = %d", bytes, properties.location.id, result);
    books_judge(result, properties.location.id, bytes);
    one->held = !result;
    one->bytes = bytes;
    one->device = properties.location.id;
}

static void range(struct dice *dice)
{
    struct range *one = &world.ranges[roll(dice, RANGES)];
    if (one->reserved) {
        if (roll(dice, 3))
            return; /* it is worth keeping for a while */
        const int result = cuMemAddressFree(one->at, PARTS * CHUNK);
        say(" cuMemAddressFree = %d", result);
        if (!result)
            *one = (struct range){0};
        return;
    }
    const int result = cuMemAddressReserve(&one->at, PARTS * CHUNK, 0, 0, 0);
    say(" cuMemAddressReserve = %d", result);
    one->reserved = !result;
}

static void mapped(struct dice *dice)
{
    struct range *one = &world.ranges[roll(dice, RANGES)];
    const struct physical *memory = physical_of(dice);
    const unsigned part = roll(dice, PARTS);
    if (!one->reserved || !memory->held || part * CHUNK + memory->bytes > PARTS * CHUNK)
        return;
    const CUdeviceptr at = one->at + part * CHUNK;
    const int result = cuMemMap(at, memory->bytes, 0, memory->handle, 0);
    say(" cuMemMap part %u %zu = %d", part, memory->bytes, result);
    if (!result)
        one->mapped[part] = memory->bytes;
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, memory->device}, 3};
    if (!result && roll(dice, 2))
        say(", cuMemSetAccess = %d", cuMemSetAccess(at, memory->bytes, &access, 1));
}

/* One mapping, several at once, or a part of one, which the driver refuses. */
static void unmapped(struct dice *dice)
{
    struct range *one = &world.ranges[roll(dice, RANGES)];
    const unsigned part = roll(dice, PARTS);
    if (!one->reserved || !one->mapped[part])
        return;
    size_t bytes = one->mapped[part];
    while (part * CHUNK + bytes < PARTS * CHUNK && one->mapped[part + bytes / CHUNK] && roll(dice, 2))
        bytes += one->mapped[part + bytes / CHUNK];
    if (!roll(dice, 16))
        bytes -= bytes > CHUNK ? CHUNK : 0;
    const int result = cuMemUnmap(one->at + part * CHUNK, bytes);
    say(" cuMemUnmap part %u %zu = %d", part, bytes, result);
    /* A call that fails may have unmapped what came before. */
    for (unsigned each = part; each < part + bytes / CHUNK; each++)
        if (one->mapped[each] && (!result || each + one->mapped[each] / CHUNK <= part + bytes / CHUNK))
            one->mapped[each] = 0;
}

static void retained(struct dice *dice)
{
    struct range *one = &world.ranges[roll(dice, RANGES)];
    struct physical *memory = physical_of(dice);
    const unsigned part = roll(dice, PARTS);
    if (!one->reserved || !one->mapped[part] || memory->held)
        return;
    const int result = cuMemRetainAllocationHandle(&memory->handle, (void *)(uintptr_t)(one->at + part * CHUNK));
    say(" cuMemRetainAllocationHandle = %d", result);
    memory->held = !result;
    memory->bytes = one->mapped[part];
}

static void imported(struct dice *dice)
{
    const struct physical *from = physical_of(dice);
    struct physical *to = physical_of(dice);
    int file = -1;
    if (!from->held || to->held)
        return;
    const int out = cuMemExportToShareableHandle(&file, from->handle, 1, 0);
    const int in = out ? 0 : cuMemImportFromShareableHandle(&to->handle, (void *)(intptr_t)file, 1);
    say(" cuMemExportToShareableHandle = %d, cuMemImportFromShareableHandle = %d", out, in);
    if (file >= 0)
        close(file);
    to->held = !out && !in;
    to->bytes = from->bytes;
    to->device = from->device;
}

static void multicast(struct dice *dice)
{
    CUmemGenericAllocationHandle *one = &world.multicasts[roll(dice, MULTICASTS)];
    const struct physical *memory = physical_of(dice);
    if (!*one) {
        const CUmulticastObjectProp properties = {(unsigned)world.devices, PARTS * CHUNK, 0, 0};
        const int result = cuMulticastCreate(one, &properties);
        say(" cuMulticastCreate = %d", result);
        if (result)
            *one = 0;
        for (int device = 0; !result && device < world.devices; device++)
            say(" %d", cuMulticastAddDevice(*one, device));
        return;
    }
    const size_t offset = CHUNK * roll(dice, PARTS);
    switch (roll(dice, 6)) {
    case 0:
        say(" cuMemRelease = %d", cuMemRelease(*one));
        *one = 0;
        break;
    case 1:
    case 2:
        say(" cuMulticastUnbind %d %zu = %d", memory->device, offset, cuMulticastUnbind(*one, memory->device, offset, 4 * CHUNK));
        break;
    default:
        if (memory->held)
            say(" cuMulticastBindMem %zu %zu = %d", offset, memory->bytes,
                cuMulticastBindMem(*one, offset, memory->handle, 0, memory->bytes, 0));
    }
}

static void end_maps(void)
{
    for (int i = 0; i < RANGES; i++) {
        struct range *one = &world.ranges[i];
        for (unsigned part = 0; one->reserved && part < PARTS; part++)
            if (one->mapped[part])
                say(" %d", cuMemUnmap(one->at + part * CHUNK, one->mapped[part]));
        if (one->reserved)
            say(" %d", cuMemAddressFree(one->at, PARTS * CHUNK));
        *one = (struct range){0};
    }
    for (int i = 0; i < MULTICASTS; i++)
        if (world.multicasts[i])
            say(" %d", cuMemRelease(world.multicasts[i]));
    for (int i = 0; i < HANDLES; i++)
        if (world.physicals[i].held)
            say(" %d", cuMemRelease(world.physicals[i].handle));
    memset(world.multicasts, 0, sizeof world.multicasts);
    memset(world.physicals, 0, sizeof world.physicals);
}

const struct kind map_kinds[] = {
    {"handle", 12, false, handle, end_maps}, {"range", 4, false, range, NULL},       {"mapped", 12, false, mapped, NULL},
    {"unmapped", 10, false, unmapped, NULL}, {"retained", 3, false, retained, NULL}, {"imported", 3, true, imported, NULL},
    {"multicast", 6, false, multicast, NULL}, {0},
};

/* ---- arrays ---- */

static void drop_array(struct array *one)
{
    const int result = one->mipmap ? cuMipmappedArrayDestroy(one->mipmap) : cuArrayDestroy(one->array);
    say(" %s = %d", one->mipmap ? "cuMipmappedArrayDestroy" : "cuArrayDestroy", result);
    if (!result)
        *one = (struct array){0};
}

static void array(struct dice *dice)
{
    struct array *one = &world.arrays[roll(dice, ARRAYS)];
    if (one->held) {
        drop_array(one);
        return;
    }
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Format = 0x20, .NumChannels = roll(dice, 30) ? 1u << roll(dice, 3) : 3};
    shape.Width = roll(dice, 20) ? 1 + roll(dice, 1024) : roll(dice, 200000);
    shape.Height = roll(dice, roll(dice, 2) ? 40 : 1500);
    one->sparse = !roll(dice, 5);
    shape.Flags = one->sparse ? CUDA_ARRAY3D_SPARSE : 0;
    const CUDA_ARRAY_DESCRIPTOR_v2 flat = {shape.Width, shape.Height, shape.Format, shape.NumChannels};
    const unsigned levels = roll(dice, 5), how = roll(dice, 3);
    const int result = !how          ? cuMipmappedArrayCreate(&one->mipmap, &shape, levels)
                       : one->sparse ? cuArray3DCreate_v2(&one->array, &shape)
                                     : cuArrayCreate_v2(&one->array, &flat);
    say(" %s%s %zu x %zu x %u, levels %u = %d", one->sparse ? "sparse " : "", how ? "cuArrayCreate" : "cuMipmappedArrayCreate",
        shape.Width, shape.Height, shape.NumChannels, levels, result);
    if (result)
        *one = (struct array){0};
    one->held = !result;
    one->context = world.current;
}

static void tiles(struct dice *dice)
{
    const struct array *one = &world.arrays[roll(dice, ARRAYS)];
    const struct physical *memory = physical_of(dice);
    CUstream stream = some_stream(dice, NULL);
    const int operation = roll(dice, 3) ? CU_MEM_OPERATION_TYPE_MAP : CU_MEM_OPERATION_TYPE_UNMAP;
    const unsigned place = roll(dice, 3), wide = 1 + roll(dice, 2), high = 1 + roll(dice, 2);
    if (!one->held || !one->sparse || (operation == CU_MEM_OPERATION_TYPE_MAP && !memory->held))
        return;
    CUarrayMapInfo list = {.resourceType = one->mipmap != NULL, .memOperationType = operation, .deviceBitMask = 1};
    if (one->mipmap)
        list.resource.mipmap = one->mipmap;
    else
        list.resource.array = one->array;
    list.subresource.sparseLevel.offsetX = 64 * place;
    list.subresource.sparseLevel.extentWidth = 64 * wide;
    list.subresource.sparseLevel.extentHeight = 64 * high;
    list.subresource.sparseLevel.extentDepth = 1;
    list.memHandle.memHandle = operation == CU_MEM_OPERATION_TYPE_MAP ? memory->handle : 0;
    say(" cuMemMapArrayAsync %d at %u, %u x %u = %d", operation, place, wide, high, cuMemMapArrayAsync(&list, 1, stream));
}

static void end_arrays(void)
{
    for (int i = 0; i < ARRAYS; i++)
        if (world.arrays[i].held)
            drop_array(&world.arrays[i]);
}

const struct kind array_kinds[] = {
    {"array", 12, true, array, end_arrays},
    {"tiles", 5, true, tiles, NULL},
    {0},
};
