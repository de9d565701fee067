/* Arrays and mipmapped arrays: their layout is the driver's secret, so reserve an estimate, then hold the real size. */
#include "cuda/memory/binding.h"
#include "cuda/memory/charge.h"
#include "cuda/memory/small_array.h"

#define VC__TILE_ROWS 8u       /* rows and row bytes are padded to tiles */
#define VC__TILE_ROW_BYTES 64u

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

static uint64_t times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

static uint64_t estimate(const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    uint64_t row = vc_round_up(times(shape->Width, element_bytes(shape->Format, shape->NumChannels)), VC__TILE_ROW_BYTES);
    uint64_t rows = shape->Height ? vc_round_up(shape->Height, VC__TILE_ROWS) : 1;
    uint64_t bytes = times(times(row, rows), shape->Depth ? shape->Depth : 1);
    if (levels > 1)
        bytes = times(bytes, 2); /* 1 + 1/2 + 1/4 + … for one dimension; less for more */
    return bytes;
}

/* Sparse and deferred arrays get their memory from cuMemMapArrayAsync, by handles that were charged at cuMemCreate. */
static bool has_memory(unsigned int flags)
{
    return !(flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING));
}

static uint64_t real_array_bytes(CUarray array)
{
    CUDA_ARRAY_MEMORY_REQUIREMENTS requirements = {0};
    CUdevice device;
    if (!vc_real.cuArrayGetMemoryRequirements || vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        vc_real.cuArrayGetMemoryRequirements(&requirements, array, device) != CUDA_SUCCESS)
        return 0; /* the driver tells it of some arrays only: then the estimate stands */
    return requirements.size;
}

static uint64_t real_mipmap_bytes(CUmipmappedArray array)
{
    CUDA_ARRAY_MEMORY_REQUIREMENTS requirements = {0};
    CUdevice device;
    if (!vc_real.cuMipmappedArrayGetMemoryRequirements || vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        vc_real.cuMipmappedArrayGetMemoryRequirements(&requirements, array, device) != CUDA_SUCCESS)
        return 0;
    return requirements.size;
}

/* What is reserved for an array while the driver makes it. */
struct making {
    struct vc_charge charge;
    struct vc_small_array small;
    uint64_t bytes; /* estimated */
};

/* FNV-1a over what makes arrays alike. */
static uint64_t shape_name(const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    const uint64_t parts[] = {shape->Width, shape->Height, shape->Depth, (uint64_t)shape->Format, shape->NumChannels, shape->Flags, levels};
    uint64_t name = 0xcbf29ce484222325u;
    for (size_t part = 0; part < sizeof parts / sizeof parts[0]; part++) {
        for (int shift = 0; shift < 64; shift += 8)
            name = (name ^ (parts[part] >> shift & 0xff)) * 0x100000001b3u;
    }
    return name;
}

static CUresult begin_array(struct making *making, const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    making->bytes = estimate(shape, levels);
    if (making->bytes <= VC_SMALL_ARRAY)
        return vc_small_array_begin(&making->small, &making->charge, making->bytes, shape_name(shape, levels));
    return vc_charge_current(&making->charge, vc_round_up(making->bytes, VC_CHUNK));
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
    if (small && real <= VC_SMALL_ARRAY && real <= making->bytes)
        return vc_small_array_keep(&making->small, &making->charge, handle);
    if (small) { /* larger than it was taken for */
        drop_array(making);
        making->bytes = real > VC_SMALL_ARRAY ? real : VC_SMALL_ARRAY + 1;
        if (vc_charge_current(&making->charge, vc_round_up(making->bytes, VC_CHUNK)) != CUDA_SUCCESS)
            return false;
    } else if (real > 0 && !vc_charge_resize(&making->charge, vc_round_up(real, VC_CHUNK))) {
        drop_array(making);
        return false;
    }
    return vc_charge_keep_opaque(&making->charge, handle);
}

static CUresult end_array(struct making *making, CUresult result, CUarray *array)
{
    if (result != CUDA_SUCCESS) {
        drop_array(making);
        return result;
    }
    if (hold_array(making, real_array_bytes(*array), *array))
        return CUDA_SUCCESS;
    vc_real.cuArrayDestroy(*array);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v2 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArrayCreate_v2(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Format = descriptor->Format,
                                        .NumChannels = descriptor->NumChannels};
    struct making making;
    CUresult result = begin_array(&making, &shape, 1);
    return result != CUDA_SUCCESS ? result : end_array(&making, vc_real.cuArrayCreate_v2(array, descriptor), array);
}

CUresult vc_hook_cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArrayCreate(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Format = descriptor->Format,
                                        .NumChannels = descriptor->NumChannels};
    struct making making;
    CUresult result = begin_array(&making, &shape, 1);
    return result != CUDA_SUCCESS ? result : end_array(&making, vc_real.cuArrayCreate(array, descriptor), array);
}

CUresult vc_hook_cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor)
{
    if (!array || !descriptor || !has_memory(descriptor->Flags))
        return vc_real.cuArray3DCreate_v2(array, descriptor);
    struct making making;
    CUresult result = begin_array(&making, descriptor, 1);
    return result != CUDA_SUCCESS ? result : end_array(&making, vc_real.cuArray3DCreate_v2(array, descriptor), array);
}

CUresult vc_hook_cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
    if (!array || !descriptor || !has_memory(descriptor->Flags))
        return vc_real.cuArray3DCreate(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Depth = descriptor->Depth,
                                        .Format = descriptor->Format, .NumChannels = descriptor->NumChannels};
    struct making making;
    CUresult result = begin_array(&making, &shape, 1);
    return result != CUDA_SUCCESS ? result : end_array(&making, vc_real.cuArray3DCreate(array, descriptor), array);
}

CUresult vc_hook_cuArrayDestroy(CUarray array)
{
    struct vc_freeing freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)array, &freeing);
    CUresult result = vc_real.cuArrayDestroy(array);
    if (known)
        vc_charge_freed(&freeing, result);
    else if (result == CUDA_SUCCESS)
        vc_bindings_end(array);
    return result;
}

CUresult vc_hook_cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor, unsigned int levels)
{
    if (!array || !descriptor || !has_memory(descriptor->Flags))
        return vc_real.cuMipmappedArrayCreate(array, descriptor, levels);
    struct making making;
    CUresult result = begin_array(&making, descriptor, levels);
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMipmappedArrayCreate(array, descriptor, levels);
    if (result != CUDA_SUCCESS) {
        drop_array(&making);
        return result;
    }
    if (hold_array(&making, real_mipmap_bytes(*array), *array))
        return CUDA_SUCCESS;
    vc_real.cuMipmappedArrayDestroy(*array);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    struct vc_freeing freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)array, &freeing);
    CUresult result = vc_real.cuMipmappedArrayDestroy(array);
    if (known)
        vc_charge_freed(&freeing, result);
    else if (result == CUDA_SUCCESS)
        vc_bindings_end(array);
    return result;
}
