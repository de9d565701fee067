/* Hooks of batches of copies, of copies with attributes, of decompression and of the arrays' own copies: one operation each.
 *
 * A batch is charged for those of its copies that stay on the card: what they cost is measured, their size is only the key.
 */
#include "cuda/work/work.h"

static bool begin_batch(struct vc_work *work, CUstream stream, bool per_thread, const CUdeviceptr *destinations,
                        const CUdeviceptr *sources, const size_t *sizes, size_t count)
{
    if (!vc_work_gated() || !destinations || !sources || !sizes)
        return false;
    uint64_t bytes = 0;
    for (size_t i = 0; i < count; i++)
        if (vc_work_on_device(destinations[i]) && vc_work_on_device(sources[i]))
            bytes += sizes[i];
    if (bytes == 0)
        return vc_work_leaves(stream, per_thread);
    return vc_work_begin_sized(work, stream, per_thread, VC_WORK_BATCH, bytes);
}

static bool operand_on_device(const CUmemcpy3DOperand *operand)
{
    return operand->type == CU_MEMCPY_OPERAND_TYPE_ARRAY || vc_work_on_device(operand->op.ptr.ptr);
}

/* Extents are in elements of a size that only the driver knows: at least a byte each. */
static bool begin_extents(struct vc_work *work, CUstream stream, bool per_thread, const CUDA_MEMCPY3D_BATCH_OP *copies,
                          size_t count)
{
    if (!vc_work_gated() || !copies)
        return false;
    uint64_t elements = 0;
    for (size_t i = 0; i < count; i++)
        if (operand_on_device(&copies[i].src) && operand_on_device(&copies[i].dst))
            elements += (uint64_t)copies[i].extent.width * copies[i].extent.height * copies[i].extent.depth;
    if (elements == 0)
        return vc_work_leaves(stream, per_thread);
    return vc_work_begin_sized(work, stream, per_thread, VC_WORK_BATCH, elements);
}

static bool begin_decompress(struct vc_work *work, CUstream stream, bool per_thread, const CUmemDecompressParams *blocks,
                             size_t count)
{
    uint64_t bytes = 0;
    for (size_t i = 0; blocks && i < count; i++)
        bytes += blocks[i].dstNumBytes;
    return vc_work_begin_sized(work, stream, per_thread, VC_WORK_DECOMPRESS, bytes);
}

static bool begin_linear(struct vc_work *work, CUstream stream, bool per_thread, CUdeviceptr destination, CUdeviceptr source,
                         uint64_t bytes)
{
    if (bytes == 0 || !vc_work_gated())
        return false;
    if (!vc_work_on_device(destination) || !vc_work_on_device(source))
        return vc_work_leaves(stream, per_thread);
    return vc_work_begin_sized(work, stream, per_thread, VC_WORK_COPY, bytes);
}

#define VC__BATCHES(suffix, per_thread)                                                                                     \
    VC_WORK_HOOK(cuMemcpyBatchAsync##suffix,                                                                                \
                 (CUdeviceptr * destinations, CUdeviceptr * sources, size_t *sizes, size_t count,                           \
                  CUmemcpyAttributes *attributes, size_t *attribute_indices, size_t attribute_count, size_t *fail_index,    \
                  CUstream stream),                                                                                         \
                 (destinations, sources, sizes, count, attributes, attribute_indices, attribute_count, fail_index, stream), \
                 begin_batch(&work, stream, per_thread, destinations, sources, sizes, count))                               \
    VC_WORK_HOOK(cuMemcpyBatchAsync_v2##suffix,                                                                             \
                 (CUdeviceptr * destinations, CUdeviceptr * sources, size_t *sizes, size_t count,                           \
                  CUmemcpyAttributes *attributes, size_t *attribute_indices, size_t attribute_count, CUstream stream),      \
                 (destinations, sources, sizes, count, attributes, attribute_indices, attribute_count, stream),             \
                 begin_batch(&work, stream, per_thread, destinations, sources, sizes, count))                               \
    VC_WORK_HOOK(cuMemcpy3DBatchAsync##suffix,                                                                              \
                 (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, size_t *fail_index, unsigned long long flags,               \
                  CUstream stream),                                                                                         \
                 (count, copies, fail_index, flags, stream), begin_extents(&work, stream, per_thread, copies, count))       \
    VC_WORK_HOOK(cuMemcpy3DBatchAsync_v2##suffix,                                                                           \
                 (size_t count, CUDA_MEMCPY3D_BATCH_OP *copies, unsigned long long flags, CUstream stream),                 \
                 (count, copies, flags, stream), begin_extents(&work, stream, per_thread, copies, count))                   \
    VC_WORK_HOOK(cuMemcpyWithAttributesAsync##suffix,                                                                       \
                 (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUmemcpyAttributes *attributes,                \
                  CUstream stream),                                                                                         \
                 (destination, source, bytes, attributes, stream),                                                          \
                 begin_linear(&work, stream, per_thread, destination, source, bytes))                                       \
    VC_WORK_HOOK(cuMemcpy3DWithAttributesAsync##suffix,                                                                     \
                 (CUDA_MEMCPY3D_BATCH_OP * copy, unsigned long long flags, CUstream stream), (copy, flags, stream),         \
                 begin_extents(&work, stream, per_thread, copy, 1))                                                         \
    VC_WORK_HOOK(cuMemBatchDecompressAsync##suffix,                                                                         \
                 (CUmemDecompressParams * blocks, size_t count, unsigned int flags, size_t *error_index, CUstream stream),  \
                 (blocks, count, flags, error_index, stream), begin_decompress(&work, stream, per_thread, blocks, count))

VC__BATCHES(, false)
VC__BATCHES(_ptsz, true)

#define VC__ARRAYS(suffix, per_thread, pointer, number)                                                             \
    VC_WORK_HOOK(cuMemcpyAtoA##suffix, (CUarray destination, number to, CUarray source, number from, number bytes), \
                 (destination, to, source, from, bytes),                                                            \
                 vc_work_begin_sized(&work, NULL, per_thread, VC_WORK_COPY, bytes))                                 \
    VC_WORK_HOOK(cuMemcpyAtoD##suffix, (pointer destination, CUarray source, number from, number bytes),            \
                 (destination, source, from, bytes),                                                                \
                 vc_work_begin_sized(&work, NULL, per_thread, VC_WORK_COPY, bytes))                                 \
    VC_WORK_HOOK(cuMemcpyDtoA##suffix, (CUarray destination, number to, pointer source, number bytes),              \
                 (destination, to, source, bytes),                                                                  \
                 vc_work_begin_sized(&work, NULL, per_thread, VC_WORK_COPY, bytes))

VC__ARRAYS(, false, CUdeviceptr_v1, unsigned int)
VC__ARRAYS(_v2, false, CUdeviceptr, size_t)
VC__ARRAYS(_v2_ptds, true, CUdeviceptr, size_t)
