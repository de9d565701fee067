/* Arrays and mipmapped arrays: their layout is the driver's secret, so reserve an estimate, then hold the real size. */
#include "charge.h"

#define VC__TILE_ROWS 8u       /* rows and row bytes are padded to tiles */
#define VC__TILE_ROW_BYTES 64u
#define VC__ARRAY_PAGE 65536u
#define VC__ARRAY_SMALL ((uint64_t)1 << 20) /* up to this, arrays share chunks with other small memory */

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

/* What an array of so many bytes takes from the card. Small ones have no address by which their chunk could be told, and
 * share it in places of a power of two: each is charged its place, the last chunk's free ones are not (less than 2 MiB). */
static uint64_t on_card(uint64_t bytes)
{
    uint64_t place = VC__ARRAY_PAGE;
    if (bytes > VC__ARRAY_SMALL)
        return vc_round_up(bytes, VC_CHUNK);
    while (place < bytes)
        place *= 2;
    return place;
}

static uint64_t estimate(const CUDA_ARRAY3D_DESCRIPTOR_v2 *shape, unsigned int levels)
{
    uint64_t row = vc_round_up(times(shape->Width, element_bytes(shape->Format, shape->NumChannels)), VC__TILE_ROW_BYTES);
    uint64_t rows = shape->Height ? vc_round_up(shape->Height, VC__TILE_ROWS) : 1;
    uint64_t bytes = times(times(row, rows), shape->Depth ? shape->Depth : 1);
    if (levels > 1)
        bytes = times(bytes, 2); /* 1 + 1/2 + 1/4 + … for one dimension; less for more */
    return on_card(bytes);
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
    return on_card(requirements.size);
}

static uint64_t real_mipmap_bytes(CUmipmappedArray array)
{
    CUDA_ARRAY_MEMORY_REQUIREMENTS requirements = {0};
    CUdevice device;
    if (!vc_real.cuMipmappedArrayGetMemoryRequirements || vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        vc_real.cuMipmappedArrayGetMemoryRequirements(&requirements, array, device) != CUDA_SUCCESS)
        return 0;
    return on_card(requirements.size);
}

static CUresult end_array(struct vc_charge *charge, CUresult result, CUarray *array)
{
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(charge);
        return result;
    }
    uint64_t bytes = real_array_bytes(*array);
    bool fits = bytes == 0 || vc_charge_resize(charge, bytes);
    if (fits && vc_charge_keep_opaque(charge, *array))
        return CUDA_SUCCESS;
    vc_real.cuArrayDestroy(*array);
    if (!fits)
        vc_charge_drop(charge);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v2 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArrayCreate_v2(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Format = descriptor->Format,
                                        .NumChannels = descriptor->NumChannels};
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, estimate(&shape, 1));
    return result != CUDA_SUCCESS ? result : end_array(&charge, vc_real.cuArrayCreate_v2(array, descriptor), array);
}

CUresult vc_hook_cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *descriptor)
{
    if (!array || !descriptor)
        return vc_real.cuArrayCreate(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Format = descriptor->Format,
                                        .NumChannels = descriptor->NumChannels};
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, estimate(&shape, 1));
    return result != CUDA_SUCCESS ? result : end_array(&charge, vc_real.cuArrayCreate(array, descriptor), array);
}

CUresult vc_hook_cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor)
{
    if (!array || !descriptor || !has_memory(descriptor->Flags))
        return vc_real.cuArray3DCreate_v2(array, descriptor);
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, estimate(descriptor, 1));
    return result != CUDA_SUCCESS ? result : end_array(&charge, vc_real.cuArray3DCreate_v2(array, descriptor), array);
}

CUresult vc_hook_cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *descriptor)
{
    if (!array || !descriptor || !has_memory(descriptor->Flags))
        return vc_real.cuArray3DCreate(array, descriptor);
    CUDA_ARRAY3D_DESCRIPTOR_v2 shape = {.Width = descriptor->Width, .Height = descriptor->Height, .Depth = descriptor->Depth,
                                        .Format = descriptor->Format, .NumChannels = descriptor->NumChannels};
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, estimate(&shape, 1));
    return result != CUDA_SUCCESS ? result : end_array(&charge, vc_real.cuArray3DCreate(array, descriptor), array);
}

CUresult vc_hook_cuArrayDestroy(CUarray array)
{
    struct vc_freeing freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)array, &freeing);
    CUresult result = vc_real.cuArrayDestroy(array);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}

CUresult vc_hook_cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR_v2 *descriptor, unsigned int levels)
{
    if (!array || !descriptor || !has_memory(descriptor->Flags))
        return vc_real.cuMipmappedArrayCreate(array, descriptor, levels);
    struct vc_charge charge;
    CUresult result = vc_charge_current(&charge, estimate(descriptor, levels));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuMipmappedArrayCreate(array, descriptor, levels);
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(&charge);
        return result;
    }
    uint64_t bytes = real_mipmap_bytes(*array);
    bool fits = bytes == 0 || vc_charge_resize(&charge, bytes);
    if (fits && vc_charge_keep_opaque(&charge, *array))
        return CUDA_SUCCESS;
    vc_real.cuMipmappedArrayDestroy(*array);
    if (!fits)
        vc_charge_drop(&charge);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    struct vc_freeing freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)array, &freeing);
    CUresult result = vc_real.cuMipmappedArrayDestroy(array);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}
