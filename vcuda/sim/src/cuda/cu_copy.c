/* Copies: every form becomes one three-dimensional copy, done at once for the data and later for the clock. */
#include <string.h>

#include "cu_array.h"
#include "cu_memory.h"

enum { HOST_BYTES_PER_NS = 20, DEVICE_BYTES_PER_NS = 700, COPY_LATENCY_NS = 2000, DEVICE_LATENCY_NS = 1500 };

typedef struct {
    unsigned char *start;
    size_t row, plane; /* bytes from one row and plane to the next */
    int on_host;
    int device; /* which card, unless on the host */
} side;

static int find_side(CUmemorytype type, const void *host, CUdeviceptr device, CUarray array, size_t x, size_t y, size_t z,
                     size_t pitch, size_t height, size_t bytes, side *found)
{
    if ((int)type == CU_MEMORYTYPE_ARRAY) {
        if (!array || array->magic != CU_MAGIC_ARRAY)
            return -1;
        found->row = array->row;
        found->plane = array->row * (array->height ? array->height : 1);
        found->start = (unsigned char *)array->start + x + y * found->row + z * found->plane;
        found->on_host = 0;
        found->device = array->ctx ? array->ctx->device : 0;
        return 0;
    }
    found->row = pitch;
    found->plane = pitch * height;
    found->start = (unsigned char *)((int)type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : (uintptr_t)device) + x +
                   y * found->row + z * found->plane;
    const cu_block *block = cu_find((uintptr_t)found->start);
    found->device = block ? block->device : 0;
    found->on_host = (int)type == CU_MEMORYTYPE_HOST || !block || block->kind == CU_BLOCK_HOST;
    if ((int)type != CU_MEMORYTYPE_DEVICE)
        return found->start || !bytes ? 0 : -1;
    return block && (uintptr_t)found->start + bytes <= block->start + block->bytes ? 0 : -1;
}

static CUresult copy_effect(const CUDA_MEMCPY3D *copy, sim_op *op)
{
    side from, to;
    const size_t rows = copy->Height ? copy->Height : 1, planes = copy->Depth ? copy->Depth : 1;
    const size_t line = rows == 1 && planes == 1 ? copy->WidthInBytes : 1;
    pthread_mutex_lock(&cu_lock);
    const int bad = find_side(copy->srcMemoryType, copy->srcHost, copy->srcDevice, copy->srcArray, copy->srcXInBytes,
                              copy->srcY, copy->srcZ, copy->srcPitch, copy->srcHeight, line, &from) ||
                    find_side(copy->dstMemoryType, copy->dstHost, copy->dstDevice, copy->dstArray, copy->dstXInBytes,
                              copy->dstY, copy->dstZ, copy->dstPitch, copy->dstHeight, line, &to);
    pthread_mutex_unlock(&cu_lock);
    if (bad)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t z = 0; z < planes; z++)
        for (size_t y = 0; y < rows; y++)
            memmove(to.start + z * to.plane + y * to.row, from.start + z * from.plane + y * from.row, copy->WidthInBytes);
    const uint64_t bytes = (uint64_t)copy->WidthInBytes * rows * planes;
    if (from.on_host || to.on_host)
        *op = (sim_op){.kind = from.on_host ? SIM_OP_COPY_IN : SIM_OP_COPY_OUT,
                       .ns = COPY_LATENCY_NS + bytes / HOST_BYTES_PER_NS};
    else if (from.device != to.device) /* from card to card: an engine beside the compute, over the bus */
        *op = (sim_op){.kind = SIM_OP_COPY_OUT, .ns = COPY_LATENCY_NS + bytes / HOST_BYTES_PER_NS};
    else
        *op = (sim_op){.kind = SIM_OP_WORK, .ns = DEVICE_LATENCY_NS + 2 * bytes / DEVICE_BYTES_PER_NS};
    return CUDA_SUCCESS;
}

CUresult cu_effect(CUcontext ctx, const cu_work *work, sim_op *op)
{
    CUresult bad;
    switch ((int)work->kind) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        bad = cu_kernel_memory(ctx, &work->kernel);
        if (bad)
            return bad;
        *op = (sim_op){.kind = SIM_OP_WORK, .event = 1, .ns = cu_kernel_op_ns(&work->kernel)};
        cu_kernel_touch(ctx, &work->kernel);
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return copy_effect(&work->copy, op);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return cu_set_effect(&work->set, op);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

/* Submit a copy; wait for it if the call is one of the synchronous ones that the driver waits in. */
static CUresult submit(const CUDA_MEMCPY3D *copy, CUstream handle, int synchronous)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || (copy->WidthInBytes && (!copy->Height || !copy->Depth)))
        return bad;
    if (synchronous)
        bad = cu_capture_forbids();
    if (bad || !copy->WidthInBytes)
        return bad;
    sim_slow_call(cu_process.state, stream->ctx->card);
    const cu_work work = {.kind = CU_GRAPH_NODE_TYPE_MEMCPY, .copy = *copy};
    if (!synchronous)
        return cu_submit(stream, &work);
    sim_ticket ticket;
    bad = cu_run(stream, &work, &ticket);
    return bad ? bad : cu_wait(stream->ctx, &ticket);
}

static CUDA_MEMCPY3D linear(CUmemorytype to_type, CUdeviceptr to, CUmemorytype from_type, CUdeviceptr from, size_t bytes)
{
    CUDA_MEMCPY3D copy = {.WidthInBytes = bytes, .Height = 1, .Depth = 1};
    copy.srcMemoryType = from_type;
    copy.srcDevice = from;
    copy.srcHost = (const void *)(uintptr_t)from;
    copy.dstMemoryType = to_type;
    copy.dstDevice = to;
    copy.dstHost = (void *)(uintptr_t)to;
    return copy;
}

enum { H = CU_MEMORYTYPE_HOST, D = CU_MEMORYTYPE_DEVICE, U = CU_MEMORYTYPE_UNIFIED };

static CUresult copy_linear(CUmemorytype to_type, const void *to, CUmemorytype from_type,
                            const void *from, size_t bytes, CUstream stream, int waits)
{
    const CUDA_MEMCPY3D copy = linear(to_type, (uintptr_t)to, from_type, (uintptr_t)from, bytes);
    return submit(&copy, stream, waits);
}

/* A linear copy has four exports: synchronous and asynchronous, each for both kinds of default stream. */
#define LINEAR(name, async_name, to_c, from_c, to_type, from_type, waits)                                       \
    CU_EXPORT CUresult name(to_c to, from_c from, size_t bytes)                                                \
    {                                                                                                          \
        return copy_linear(to_type, (void *)to, from_type, (const void *)from, bytes, CU_STREAM_LEGACY, waits); \
    }                                                                                                          \
    CU_EXPORT CUresult name##_ptds(to_c to, from_c from, size_t bytes)                                         \
    {                                                                                                          \
        return copy_linear(to_type, (void *)to, from_type, (const void *)from, bytes, CU_STREAM_PER_THREAD,    \
                           waits);                                                                             \
    }                                                                                                          \
    CU_EXPORT CUresult async_name(to_c to, from_c from, size_t bytes, CUstream stream)                         \
    {                                                                                                          \
        return copy_linear(to_type, (void *)to, from_type, (const void *)from, bytes, stream, 0);              \
    }                                                                                                          \
    CU_EXPORT CUresult async_name##_ptsz(to_c to, from_c from, size_t bytes, CUstream stream)                  \
    {                                                                                                          \
        return async_name(to, from, bytes, stream ? stream : CU_STREAM_PER_THREAD);                            \
    }

LINEAR(cuMemcpy, cuMemcpyAsync, CUdeviceptr, CUdeviceptr, U, U, 1)
LINEAR(cuMemcpyHtoD_v2, cuMemcpyHtoDAsync_v2, CUdeviceptr, const void *, D, H, 1)
LINEAR(cuMemcpyDtoH_v2, cuMemcpyDtoHAsync_v2, void *, CUdeviceptr, H, D, 1)
LINEAR(cuMemcpyDtoD_v2, cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, D, D, 0)

static CUDA_MEMCPY3D from_2d(const CUDA_MEMCPY2D *two)
{
    return (CUDA_MEMCPY3D){
        .srcXInBytes = two->srcXInBytes,
        .srcY = two->srcY,
        .srcMemoryType = two->srcMemoryType,
        .srcHost = two->srcHost,
        .srcDevice = two->srcDevice,
        .srcArray = two->srcArray,
        .srcPitch = two->srcPitch ? two->srcPitch : two->WidthInBytes,
        .dstXInBytes = two->dstXInBytes,
        .dstY = two->dstY,
        .dstMemoryType = two->dstMemoryType,
        .dstHost = two->dstHost,
        .dstDevice = two->dstDevice,
        .dstArray = two->dstArray,
        .dstPitch = two->dstPitch ? two->dstPitch : two->WidthInBytes,
        .WidthInBytes = two->WidthInBytes,
        .Height = two->Height,
        .Depth = 1,
    };
}

static CUresult copy_2d(const CUDA_MEMCPY2D *two, CUstream stream, int synchronous)
{
    if (!two)
        return CUDA_ERROR_INVALID_VALUE;
    const CUDA_MEMCPY3D copy = from_2d(two);
    return submit(&copy, stream, synchronous);
}

#define COPY_2D(name, stream)                              \
    CU_EXPORT CUresult name(const CUDA_MEMCPY2D *copy)     \
    {                                                      \
        return copy_2d(copy, stream, 1);                   \
    }

COPY_2D(cuMemcpy2D_v2, CU_STREAM_LEGACY)
COPY_2D(cuMemcpy2D_v2_ptds, CU_STREAM_PER_THREAD)
COPY_2D(cuMemcpy2DUnaligned_v2, CU_STREAM_LEGACY)
COPY_2D(cuMemcpy2DUnaligned_v2_ptds, CU_STREAM_PER_THREAD)

CU_EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D *copy, CUstream stream)
{
    return copy_2d(copy, stream, 0);
}

CU_EXPORT CUresult cuMemcpy2DAsync_v2_ptsz(const CUDA_MEMCPY2D *copy, CUstream stream)
{
    return copy_2d(copy, stream ? stream : CU_STREAM_PER_THREAD, 0);
}

CU_EXPORT CUresult cuMemcpy3D_v2(const CUDA_MEMCPY3D *copy)
{
    return copy ? submit(copy, CU_STREAM_LEGACY, 1) : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemcpy3D_v2_ptds(const CUDA_MEMCPY3D *copy)
{
    return copy ? submit(copy, CU_STREAM_PER_THREAD, 1) : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D *copy, CUstream stream)
{
    return copy ? submit(copy, stream, 0) : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemcpy3DAsync_v2_ptsz(const CUDA_MEMCPY3D *copy, CUstream stream)
{
    return cuMemcpy3DAsync_v2(copy, stream ? stream : CU_STREAM_PER_THREAD);
}

/* ---- between devices: one address space, so the contexts only have to be valid ---- */

static CUresult peer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes, CUstream stream)
{
    CUresult bad = cu_usable(to_ctx);
    if (!bad)
        bad = cu_usable(from_ctx);
    const CUDA_MEMCPY3D copy = linear(D, to, D, from, bytes);
    return bad ? bad : submit(&copy, stream, 0);
}

CU_EXPORT CUresult cuMemcpyPeer(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes)
{
    return peer(to, to_ctx, from, from_ctx, bytes, CU_STREAM_LEGACY);
}

CU_EXPORT CUresult cuMemcpyPeer_ptds(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes)
{
    return peer(to, to_ctx, from, from_ctx, bytes, CU_STREAM_PER_THREAD);
}

CU_EXPORT CUresult cuMemcpyPeerAsync(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx, size_t bytes,
                                     CUstream stream)
{
    return peer(to, to_ctx, from, from_ctx, bytes, stream);
}

CU_EXPORT CUresult cuMemcpyPeerAsync_ptsz(CUdeviceptr to, CUcontext to_ctx, CUdeviceptr from, CUcontext from_ctx,
                                          size_t bytes, CUstream stream)
{
    return peer(to, to_ctx, from, from_ctx, bytes, stream ? stream : CU_STREAM_PER_THREAD);
}

static CUresult peer_3d(const CUDA_MEMCPY3D_PEER *given, CUstream stream, int synchronous)
{
    CUDA_MEMCPY3D copy;
    if (!given)
        return CUDA_ERROR_INVALID_VALUE;
    _Static_assert(sizeof copy == sizeof *given, "the same layout");
    memcpy(&copy, given, sizeof copy);
    return submit(&copy, stream, synchronous);
}

CU_EXPORT CUresult cuMemcpy3DPeer(const CUDA_MEMCPY3D_PEER *copy)
{
    return peer_3d(copy, CU_STREAM_LEGACY, 1);
}

CU_EXPORT CUresult cuMemcpy3DPeer_ptds(const CUDA_MEMCPY3D_PEER *copy)
{
    return peer_3d(copy, CU_STREAM_PER_THREAD, 1);
}

CU_EXPORT CUresult cuMemcpy3DPeerAsync(const CUDA_MEMCPY3D_PEER *copy, CUstream stream)
{
    return peer_3d(copy, stream, 0);
}

CU_EXPORT CUresult cuMemcpy3DPeerAsync_ptsz(const CUDA_MEMCPY3D_PEER *copy, CUstream stream)
{
    return peer_3d(copy, stream ? stream : CU_STREAM_PER_THREAD, 0);
}
