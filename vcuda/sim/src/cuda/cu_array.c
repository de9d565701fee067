/* Arrays and mipmapped arrays: plain memory with a shape. */
#include "cu_array.h"

#include <stdlib.h>
#include <string.h>

#include "cu_capture.h"
#include "cu_memory.h"

enum { LEVELS = 16, LAYERED = 1, CUBEMAP = 4, SPARSE = 0x40 };

struct CUmipmappedArray_st {
    int magic;
    CUdeviceptr pointer;
    unsigned levels;
    struct CUarray_st level[LEVELS];
};

CUcontext cu_array_context(const void *array, int mipmapped)
{
    const struct CUarray_st *one = mipmapped ? ((const struct CUmipmappedArray_st *)array)->level : array;
    return one && one->magic == CU_MAGIC_ARRAY ? one->ctx : NULL;
}

static size_t format_bytes(int format)
{
    switch (format) {
    case 0x01: /* 8-bit integers */
    case 0x08:
        return 1;
    case 0x02: /* 16-bit integers and halves */
    case 0x09:
    case 0x10:
        return 2;
    case 0x03: /* 32-bit integers and floats */
    case 0x0a:
    case 0x20:
        return 4;
    default:
        return 0;
    }
}

static size_t most(size_t value)
{
    return value ? value : 1;
}

/* The card keeps rows in blocks of tiles: of 8 rows, as many as hold all rows, up to 128 (seen on an H100: 700 rows take as much as
 * 768). Here only the place is as large. */
static size_t block_rows(size_t rows)
{
    size_t block = 8;
    while (block < rows && block < 128)
        block *= 2;
    return rows ? (rows + block - 1) / block * block : 1;
}

static CUresult shape(const CUDA_ARRAY3D_DESCRIPTOR *descriptor, struct CUarray_st *array, size_t *bytes)
{
    const size_t element = format_bytes((int)descriptor->Format) * descriptor->NumChannels;
    if (!descriptor->Width || !element || (descriptor->NumChannels != 1 && descriptor->NumChannels != 2 &&
                                           descriptor->NumChannels != 4))
        return CUDA_ERROR_INVALID_VALUE;
    if (descriptor->Width > 131072 || descriptor->Height > 131072 || descriptor->Depth > 16384)
        return CUDA_ERROR_INVALID_VALUE;
    array->magic = CU_MAGIC_ARRAY;
    array->descriptor = *descriptor;
    array->row = descriptor->Width * element;
    array->height = descriptor->Height;
    array->depth = descriptor->Depth;
    *bytes = ((array->row + 63) & ~(size_t)63) * block_rows(array->height) * most(array->depth);
    return CUDA_SUCCESS;
}

/* Arrays share chunks with whatever is small, or (`texels` of the card) with arrays of as large texels only, as on an H100. */
static int drawer_of(const struct CUctx_st *ctx, size_t texel)
{
    int drawer = 1;
    if (!cu_card(ctx)->config.texels)
        return 0;
    while (texel > 1 && drawer < 5) {
        texel /= 2;
        drawer++;
    }
    return drawer;
}

/* A sparse array's memory is what is mapped into it; here it has addresses all the same, which no card pays for. */
static CUresult allocate(size_t bytes, size_t texel, unsigned flags, CUdeviceptr *pointer)
{
    CUcontext ctx;
    cu_block *block;
    CUresult bad = cu_current(&ctx);
    if (!bad)
        bad = cu_capture_forbids();
    if (!bad)
        bad = cu_alloc_fault(ctx);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    bad = cu_place_in(ctx, ctx->device, bytes, CU_BLOCK_PLAIN, !(flags & SPARSE), drawer_of(ctx, texel), &block);
    if (!bad)
        *pointer = block->start;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *descriptor)
{
    struct CUarray_st made = {.magic = 0};
    CUdeviceptr pointer;
    size_t bytes;
    CUresult bad = cu_initialised();
    if (bad || !array || !descriptor)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    bad = shape(descriptor, &made, &bytes);
    if (!bad)
        bad = allocate(bytes, format_bytes((int)descriptor->Format) * descriptor->NumChannels, descriptor->Flags, &pointer);
    if (bad)
        return bad;
    *array = malloc(sizeof made);
    if (!*array) {
        cu_free_block(pointer, NULL);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made.start = (uintptr_t)pointer;
    cu_current(&made.ctx);
    **array = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *descriptor)
{
    if (!descriptor)
        return CUDA_ERROR_INVALID_VALUE;
    const CUDA_ARRAY3D_DESCRIPTOR all = {descriptor->Width, descriptor->Height, 0, descriptor->Format,
                                         descriptor->NumChannels, 0};
    return cuArray3DCreate_v2(array, &all);
}

static CUresult array_of(CUarray array)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return array && array->magic == CU_MAGIC_ARRAY ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CU_EXPORT CUresult cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *descriptor, CUarray array)
{
    const CUresult bad = array_of(array);
    if (bad || !descriptor)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *descriptor = array->descriptor;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *descriptor, CUarray array)
{
    const CUresult bad = array_of(array);
    if (bad || !descriptor)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *descriptor = (CUDA_ARRAY_DESCRIPTOR){array->descriptor.Width, array->descriptor.Height, array->descriptor.Format,
                                          array->descriptor.NumChannels};
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuArrayDestroy(CUarray array)
{
    CUcontext ctx;
    CUresult bad = array_of(array);
    if (!bad)
        bad = cu_current(&ctx);
    if (bad || array->level)
        return bad ? bad : CUDA_ERROR_INVALID_HANDLE; /* a level goes with its mipmapped array */
    bad = cu_context_wait(ctx);
    if (!bad)
        bad = cu_free_block(array->start, NULL);
    if (!bad) {
        pthread_mutex_lock(&cu_lock);
        cu_sparse_ended(array);
        pthread_mutex_unlock(&cu_lock);
        array->magic = 0;
        free(array);
    }
    return bad;
}

CU_EXPORT CUresult cuMipmappedArrayCreate(CUmipmappedArray *mipmapped, const CUDA_ARRAY3D_DESCRIPTOR *descriptor,
                                          unsigned int levels)
{
    CUresult bad = cu_initialised();
    if (bad || !mipmapped || !descriptor || !levels)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    CUmipmappedArray made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t total = 0, bytes;
    CUDA_ARRAY3D_DESCRIPTOR one = *descriptor;
    for (unsigned i = 0; !bad && i < levels && i < LEVELS; i++) {
        bad = shape(&one, &made->level[i], &bytes);
        made->level[i].level = (int)i + 1;
        made->level[i].start = total;
        total += (bytes + 511) & ~(size_t)511;
        made->levels = i + 1;
        if (one.Width == 1 && one.Height <= 1)
            break;
        one.Width = most(one.Width / 2);
        one.Height = one.Height ? most(one.Height / 2) : 0;
        if (!(one.Flags & (LAYERED | CUBEMAP)))
            one.Depth = one.Depth ? most(one.Depth / 2) : 0;
    }
    if (!bad)
        bad = allocate(total, format_bytes((int)descriptor->Format) * descriptor->NumChannels, descriptor->Flags, &made->pointer);
    if (bad) {
        free(made);
        return bad;
    }
    cu_current(&made->level[0].ctx);
    for (unsigned i = 0; i < made->levels; i++)
        made->level[i].start += (uintptr_t)made->pointer;
    made->magic = CU_MAGIC_ARRAY;
    *mipmapped = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMipmappedArrayGetLevel(CUarray *array, CUmipmappedArray mipmapped, unsigned int level)
{
    const CUresult bad = cu_initialised();
    if (bad || !array || !mipmapped || mipmapped->magic != CU_MAGIC_ARRAY || level >= mipmapped->levels)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *array = &mipmapped->level[level];
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMipmappedArrayDestroy(CUmipmappedArray mipmapped)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (bad || !mipmapped || mipmapped->magic != CU_MAGIC_ARRAY)
        return bad ? bad : CUDA_ERROR_INVALID_HANDLE;
    bad = cu_context_wait(ctx);
    if (!bad)
        bad = cu_free_block(mipmapped->pointer, NULL);
    if (!bad) {
        pthread_mutex_lock(&cu_lock);
        cu_sparse_ended(mipmapped);
        pthread_mutex_unlock(&cu_lock);
        free(mipmapped);
    }
    return bad;
}
