/* Sets: fills of 1, 2 or 4 byte elements, in one or two dimensions. */
#include <string.h>
#include <sys/mman.h>

#include "cu_array.h"
#include "cu_memory.h"

enum { SET_BYTES_PER_NS = 900, SET_LATENCY_NS = 1500, PAGE = 4096 };

/* Zeroing whole pages of the arena gives them back to the host: they read as zero again. */
static size_t drop_pages(unsigned char *start, size_t bytes)
{
    unsigned char *first = (unsigned char *)(((uintptr_t)start + PAGE - 1) & ~(uintptr_t)(PAGE - 1));
    const size_t skipped = (size_t)(first - start);
    if (bytes < skipped + 16 * PAGE)
        return 0;
    const size_t whole = (bytes - skipped) & ~(size_t)(PAGE - 1);
    if (madvise(first, whole, MADV_DONTNEED))
        return 0;
    memset(start, 0, skipped);
    memset(first + whole, 0, bytes - skipped - whole);
    return bytes;
}

static void fill(unsigned char *start, unsigned value, unsigned element, size_t count)
{
    if (element == 1) {
        memset(start, (int)value, count);
    } else if (element == 2) {
        const uint16_t half = (uint16_t)value;
        for (size_t i = 0; i < count; i++)
            memcpy(start + 2 * i, &half, 2);
    } else {
        for (size_t i = 0; i < count; i++)
            memcpy(start + 4 * i, &value, 4);
    }
}

CUresult cu_set_effect(const CUDA_MEMSET_NODE_PARAMS *set, sim_op *op)
{
    const size_t rows = set->height ? set->height : 1, line = set->width * set->elementSize;
    const size_t pitch = rows == 1 ? line : set->pitch;
    if ((set->elementSize != 1 && set->elementSize != 2 && set->elementSize != 4) || pitch < line ||
        set->dst % set->elementSize)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)set->dst);
    const int inside = block && set->dst + (rows - 1) * pitch + line <= block->start + block->bytes;
    const int arena = block && block->kind <= CU_BLOCK_GRAPH && !cu_arena_is_shared((uintptr_t)set->dst);
    pthread_mutex_unlock(&cu_lock);
    if (!inside)
        return CUDA_ERROR_INVALID_VALUE;
    unsigned char *start = (unsigned char *)(uintptr_t)set->dst;
    for (size_t row = 0; row < rows; row++) {
        const int zero = arena && set->value == 0;
        if (!zero || !drop_pages(start + row * pitch, line))
            fill(start + row * pitch, set->value, set->elementSize, set->width);
    }
    *op = (sim_op){.kind = SIM_OP_WORK, .ns = SET_LATENCY_NS + (uint64_t)rows * line / SET_BYTES_PER_NS};
    return CUDA_SUCCESS;
}

static CUresult submit(CUdeviceptr to, size_t pitch, unsigned value, unsigned element, size_t width, size_t height,
                       CUstream handle)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !width || !height)
        return bad;
    sim_slow_call(cu_process.state, stream->ctx->card);
    cu_work work = {.kind = CU_GRAPH_NODE_TYPE_MEMSET};
    work.set = (CUDA_MEMSET_NODE_PARAMS){to, pitch, value, element, width, height};
    return cu_submit(stream, &work);
}

/* Each element size has eight exports: one or two dimensions, with and without a stream, both kinds of default
 * stream. */
#define SETS(bits, c_type)                                                                                              \
    CU_EXPORT CUresult cuMemsetD##bits##_v2(CUdeviceptr to, c_type value, size_t count)                                 \
    {                                                                                                                   \
        return submit(to, 0, value, bits / 8, count, 1, CU_STREAM_LEGACY);                                              \
    }                                                                                                                   \
    CU_EXPORT CUresult cuMemsetD##bits##_v2_ptds(CUdeviceptr to, c_type value, size_t count)                            \
    {                                                                                                                   \
        return submit(to, 0, value, bits / 8, count, 1, CU_STREAM_PER_THREAD);                                          \
    }                                                                                                                   \
    CU_EXPORT CUresult cuMemsetD##bits##Async(CUdeviceptr to, c_type value, size_t count, CUstream stream)              \
    {                                                                                                                   \
        return submit(to, 0, value, bits / 8, count, 1, stream);                                                        \
    }                                                                                                                   \
    CU_EXPORT CUresult cuMemsetD##bits##Async_ptsz(CUdeviceptr to, c_type value, size_t count, CUstream stream)         \
    {                                                                                                                   \
        return submit(to, 0, value, bits / 8, count, 1, stream ? stream : CU_STREAM_PER_THREAD);                        \
    }                                                                                                                   \
    CU_EXPORT CUresult cuMemsetD2D##bits##_v2(CUdeviceptr to, size_t pitch, c_type value, size_t width, size_t height)  \
    {                                                                                                                   \
        return submit(to, pitch, value, bits / 8, width, height, CU_STREAM_LEGACY);                                     \
    }                                                                                                                   \
    CU_EXPORT CUresult cuMemsetD2D##bits##_v2_ptds(CUdeviceptr to, size_t pitch, c_type value, size_t width,            \
                                                   size_t height)                                                       \
    {                                                                                                                   \
        return submit(to, pitch, value, bits / 8, width, height, CU_STREAM_PER_THREAD);                                 \
    }                                                                                                                   \
    CU_EXPORT CUresult cuMemsetD2D##bits##Async(CUdeviceptr to, size_t pitch, c_type value, size_t width,               \
                                                size_t height, CUstream stream)                                         \
    {                                                                                                                   \
        return submit(to, pitch, value, bits / 8, width, height, stream);                                               \
    }                                                                                                                   \
    CU_EXPORT CUresult cuMemsetD2D##bits##Async_ptsz(CUdeviceptr to, size_t pitch, c_type value, size_t width,          \
                                                     size_t height, CUstream stream)                                    \
    {                                                                                                                   \
        return submit(to, pitch, value, bits / 8, width, height, stream ? stream : CU_STREAM_PER_THREAD);               \
    }

SETS(8, unsigned char)
SETS(16, unsigned short)
SETS(32, unsigned int)
