/* Arrays and mipmapped arrays: their layout is the driver's secret, so reserve an estimate, then hold the real size. */
#include "cuda/memory/binding.h"
#include "cuda/memory/small_array.h"

/* Rows are padded to blocks of tiles of 8 rows, of up to 16 tiles: the smallest power of two that holds all rows, or 128 (seen on an H100). */
#define VC__TILE_ROWS 8u
#define VC__BLOCK_ROWS 128u
#define VC__TILE_ROW_BYTES 64u
#define VC__LEVEL_ALIGNMENT 512u
#define VC__LARGEST_EXTENT 131072u /* of any card, in any direction */

/* CUarray_format → bytes per element, for those of the public header that are not one byte; block formats count one. */
static uint64_t element_bytes(int format, unsigned int channels)
{
    switch (format) {
    case 0x02: case 0x09: case 0x10: /* 16-bit integers, half */
    case 0xc3: case 0xc4: case 0xc5: case 0xc9: case 0xca: case 0xcb:
        return 2ull * channels;
    case 0x03: case 0x0a: case 0x20: /* 32-bit integers, float */
        return 4ull * channels;
    default:
        return channels ? channels : 1;
    }
}

static uint64_t extent_of(uint64_t whole, unsigned int level)
{
    uint64_t extent = level < 64 ? whole >> level : 0;
    return extent ? extent : 1;
}

static uint64_t padded_rows(uint64_t rows)
{
    uint64_t block = VC__TILE_ROWS;
    while (block < rows && block < VC__BLOCK_ROWS)
        block *= 2;
    return vc_round_up(rows, block);
}

static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int level)
{
    bool layers = shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    uint64_t element = element_bytes(shape->Format, shape->NumChannels);
    uint64_t row = vc_round_up(vc_times(extent_of(shape->Width, level), element), VC__TILE_ROW_BYTES);
    uint64_t rows = shape->Height ? padded_rows(extent_of(shape->Height, level)) : 1;
    uint64_t depth = layers ? extent_of(shape->Depth, 0) : extent_of(shape->Depth, level);
    return vc_times(vc_times(row, rows), depth);
}

static uint64_t estimate(const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    uint64_t bytes = level_bytes(shape, 0);
    for (unsigned int level = 1; level < levels && level < 32; level++) {
        uint64_t more = vc_round_up(level_bytes(shape, level), VC__LEVEL_ALIGNMENT);
        bytes = more > UINT64_MAX - bytes - VC__LEVEL_ALIGNMENT ? UINT64_MAX : vc_round_up(bytes, VC__LEVEL_ALIGNMENT) + more;
    }
    return bytes;
}

/* What the driver can't do with less. */
static uint64_t least(const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    uint64_t bytes = 0, element = element_bytes(shape->Format, shape->NumChannels);
    bool layers = shape->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
    for (unsigned int level = 0; level < levels && level < 32; level++)
        bytes += extent_of(shape->Width, level) * extent_of(shape->Height, level) * extent_of(shape->Depth, layers ? 0 : level) * element;
    return bytes;
}

/* Sparse and deferred arrays get their memory from cuMemMapArrayAsync, by handles that were charged at cuMemCreate. */
static bool has_memory(unsigned int flags)
{
    return !(flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING));
}

/* Whether the driver may make it at all. If not, it says what is wrong: that it is too large is not what the share has to say. */
static bool is_possible(const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    return levels > 0 && shape->Width > 0 && shape->Width <= VC__LARGEST_EXTENT && shape->Height <= VC__LARGEST_EXTENT &&
           shape->Depth <= VC__LARGEST_EXTENT && (shape->NumChannels == 1 || shape->NumChannels == 2 || shape->NumChannels == 4);
}

/* 0: the driver tells it of some arrays only; then the estimate stands. */
static uint64_t real_bytes(CUarray array, CUmipmappedArray mipmap)
{
    CUDA_ARRAY_MEMORY_REQUIREMENTS requirements = {0};
    CUdevice device;
    if (vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS)
        return 0;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (array && vc_real.cuArrayGetMemoryRequirements)
        result = vc_real.cuArrayGetMemoryRequirements(&requirements, array, device);
    else if (mipmap && vc_real.cuMipmappedArrayGetMemoryRequirements)
        result = vc_real.cuMipmappedArrayGetMemoryRequirements(&requirements, mipmap, device);
    return result == CUDA_SUCCESS ? requirements.size : 0;
}

/* What is reserved for an array while the driver makes it. */
struct making {
    struct vc_charge charge;
    struct vc_small_array small;
    uint64_t bytes; /* estimated */
};

static CUresult begin_array(struct making *making, const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    making->bytes = is_possible(shape, levels) ? estimate(shape, levels) : VC_SMALL_ARRAY + 1;
    if (making->bytes <= VC_SMALL_ARRAY)
        return vc_small_array_begin(&making->small, &making->charge, element_bytes(shape->Format, shape->NumChannels), least(shape, levels),
                                    making->bytes);
    /* An impossible one is held to its real size, should the driver make it all the same. */
    return vc_charge_current(&making->charge, is_possible(shape, levels) ? vc_round_up(making->bytes, VC_CHUNK) : 0);
}

/* The driver did not make it, or it was taken back. */
static void drop_array(struct making *making)
{
    if (making->bytes <= VC_SMALL_ARRAY)
        vc_small_array_drop(&making->small, &making->charge);
    else
        vc_charge_drop(&making->charge);
}

/* Hold what the array really takes. `real`: 0 if the driver does not say. False: over the limit, nothing is charged. */
static bool hold_array(struct making *making, uint64_t real, const void *handle)
{
    bool small = making->bytes <= VC_SMALL_ARRAY;
    if (small && real <= making->bytes)
        return vc_small_array_keep(&making->small, &making->charge, handle);
    if (small) { /* larger than it was taken for */
        drop_array(making);
        making->bytes = real > VC_SMALL_ARRAY ? real : VC_SMALL_ARRAY + 1;
        if (vc_charge_current(&making->charge, vc_round_up(making->bytes, VC_CHUNK)) != CUDA_SUCCESS)
            return false;
    } else if (!vc_charge_resize(&making->charge, vc_round_up(real > 0 ? real : making->bytes, VC_CHUNK))) {
        drop_array(making);
        return false;
    }
    return vc_charge_keep_opaque(&making->charge, handle);
}

static CUresult end_array(struct making *making, CUresult result, CUarray *array, CUarray before)
{
    if (result != CUDA_SUCCESS) {
        drop_array(making);
        return result;
    }
    if (hold_array(making, real_bytes(*array, NULL), *array))
        return CUDA_SUCCESS;
    vc_real.cuArrayDestroy(*array);
    *array = before;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* `call` makes what `shape` describes. */
#define VC__MAKE_ARRAY(shape, call)                                                                                  \
    do {                                                                                                             \
        struct making making;                                                                                        \
        CUarray before = *array;                                                                                     \
        CUresult result = begin_array(&making, shape, 1);                                                            \
        return result != CUDA_SUCCESS ? result : end_array(&making, call, array, before);                            \
    } while (0)

CUresult vc_hook_cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v2 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArrayCreate_v2(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Format = descriptor->Format,
                                        .NumChannels = descriptor->NumChannels};
    VC__MAKE_ARRAY(&shape, vc_real.cuArrayCreate_v2(array, descriptor));
}

CUresult vc_hook_cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArrayCreate(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Format = descriptor->Format,
                                        .NumChannels = descriptor->NumChannels};
    VC__MAKE_ARRAY(&shape, vc_real.cuArrayCreate(array, descriptor));
}

/* An array without memory of its own dies with its context all the same, and with it what was mapped into it. */
static CUresult end_sparse(CUresult result, void *const *array)
{
    if (result == CUDA_SUCCESS)
        vc_sparse_array_made(*array);
    return result;
}

CUresult vc_hook_cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArray3DCreate_v2(array, descriptor);
    if (!has_memory(descriptor->Flags))
        return end_sparse(vc_real.cuArray3DCreate_v2(array, descriptor), (void *const *)array);
    VC__MAKE_ARRAY(descriptor, vc_real.cuArray3DCreate_v2(array, descriptor));
}

CUresult vc_hook_cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArray3DCreate(array, descriptor);
    if (!has_memory(descriptor->Flags))
        return end_sparse(vc_real.cuArray3DCreate(array, descriptor), (void *const *)array);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Depth = descriptor->Depth,
                                        .Format = descriptor->Format, .NumChannels = descriptor->NumChannels,
                                        .Flags = descriptor->Flags};
    VC__MAKE_ARRAY(&shape, vc_real.cuArray3DCreate(array, descriptor));
}

static CUresult end_destroy(CUresult result, bool known, const struct vc_allocation *freeing, const void *array)
{
    if (known)
        vc_charge_freed(freeing, result);
    else if (result == CUDA_SUCCESS)
        vc_sparse_array_ended(array);
    return result;
}

CUresult vc_hook_cuArrayDestroy(CUarray array)
{
    struct vc_allocation freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)array, &freeing);
    return end_destroy(vc_real.cuArrayDestroy(array), known, &freeing, array);
}

CUresult vc_hook_cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor, unsigned int levels)
{
    if (!array || !descriptor)
        return vc_real.cuMipmappedArrayCreate(array, descriptor, levels);
    if (!has_memory(descriptor->Flags))
        return end_sparse(vc_real.cuMipmappedArrayCreate(array, descriptor, levels), (void *const *)array);
    struct making making;
    CUmipmappedArray before = *array;
    CUresult result = begin_array(&making, descriptor, levels);
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMipmappedArrayCreate(array, descriptor, levels);
    if (result != CUDA_SUCCESS) {
        drop_array(&making);
        return result;
    }
    if (hold_array(&making, real_bytes(NULL, *array), *array))
        return CUDA_SUCCESS;
    vc_real.cuMipmappedArrayDestroy(*array);
    *array = before;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    struct vc_allocation freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)array, &freeing);
    return end_destroy(vc_real.cuMipmappedArrayDestroy(array), known, &freeing, array);
}
