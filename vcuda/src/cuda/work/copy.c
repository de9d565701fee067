/* Hooks of copies within the card and of sets: they occupy it like kernels do, the small ones by their number. */
#include "cuda/work/work.h"

bool vc_work_on_device(CUdeviceptr pointer)
{
    unsigned int type = 0;
    return vc_real.cuPointerGetAttribute &&
           vc_real.cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, pointer) == CUDA_SUCCESS &&
           type == CU_MEMORYTYPE_DEVICE;
}

/* A copy whose direction only its pointers tell. */
static bool begin_copy(struct vc_work *work, CUstream stream, bool per_thread, CUdeviceptr destination, CUdeviceptr source,
                       uint64_t bytes)
{
    if (bytes == 0 || !vc_work_gated())
        return false;
    if (!vc_work_on_device(destination) || !vc_work_on_device(source))
        return vc_work_leaves(stream, per_thread);
    return vc_work_begin_sized(work, stream, per_thread, VC_WORK_COPY, bytes);
}

#define VC__COPY(name, per_thread)                                                                          \
    VC_WORK_HOOK(name, (CUdeviceptr destination, CUdeviceptr source, size_t bytes), (destination, source, bytes), \
             begin_copy(&work, NULL, per_thread, destination, source, bytes))
#define VC__COPY_ASYNC(name, per_thread)                                                                     \
    VC_WORK_HOOK(name, (CUdeviceptr destination, CUdeviceptr source, size_t bytes, CUstream stream),             \
             (destination, source, bytes, stream), begin_copy(&work, stream, per_thread, destination, source, bytes))
#define VC__SET(name, per_thread, value_type)                                                                \
    VC_WORK_HOOK(name, (CUdeviceptr destination, value_type value, size_t count), (destination, value, count),   \
             vc_work_begin_sized(&work, NULL, per_thread, VC_WORK_SET, (uint64_t)count * sizeof value))
#define VC__SET_ASYNC(name, per_thread, value_type)                                                          \
    VC_WORK_HOOK(name, (CUdeviceptr destination, value_type value, size_t count, CUstream stream),               \
             (destination, value, count, stream),                                                            \
             vc_work_begin_sized(&work, stream, per_thread, VC_WORK_SET, (uint64_t)count * sizeof value))
#define VC__SET_2D(name, per_thread, value_type)                                                             \
    VC_WORK_HOOK(name, (CUdeviceptr destination, size_t pitch, value_type value, size_t width, size_t height),   \
             (destination, pitch, value, width, height),                                                     \
             vc_work_begin_sized(&work, NULL, per_thread, VC_WORK_SET, (uint64_t)width * height * sizeof value))
#define VC__SET_2D_ASYNC(name, per_thread, value_type)                                                       \
    VC_WORK_HOOK(name,                                                                                           \
             (CUdeviceptr destination, size_t pitch, value_type value, size_t width, size_t height, CUstream stream), \
             (destination, pitch, value, width, height, stream),                                             \
             vc_work_begin_sized(&work, stream, per_thread, VC_WORK_SET, (uint64_t)width * height * sizeof value))

VC__COPY(cuMemcpy, false)
VC__COPY(cuMemcpy_ptds, true)
VC__COPY(cuMemcpyDtoD_v2, false)
VC__COPY(cuMemcpyDtoD_v2_ptds, true)
VC__COPY_ASYNC(cuMemcpyAsync, false)
VC__COPY_ASYNC(cuMemcpyAsync_ptsz, true)
VC__COPY_ASYNC(cuMemcpyDtoDAsync_v2, false)
VC__COPY_ASYNC(cuMemcpyDtoDAsync_v2_ptsz, true)

#define VC__SETS(bits, value_type)                            \
    VC__SET(cuMemsetD##bits##_v2, false, value_type)          \
    VC__SET(cuMemsetD##bits##_v2_ptds, true, value_type)      \
    VC__SET_ASYNC(cuMemsetD##bits##Async, false, value_type)  \
    VC__SET_ASYNC(cuMemsetD##bits##Async_ptsz, true, value_type) \
    VC__SET_2D(cuMemsetD2D##bits##_v2, false, value_type)     \
    VC__SET_2D(cuMemsetD2D##bits##_v2_ptds, true, value_type) \
    VC__SET_2D_ASYNC(cuMemsetD2D##bits##Async, false, value_type) \
    VC__SET_2D_ASYNC(cuMemsetD2D##bits##Async_ptsz, true, value_type)

VC__SETS(8, unsigned char)
VC__SETS(16, unsigned short)
VC__SETS(32, unsigned int)

/* Before CUDA 3.2: 32-bit pointers and sizes. */
VC_WORK_HOOK(cuMemcpyDtoD, (CUdeviceptr_v1 destination, CUdeviceptr_v1 source, unsigned int bytes), (destination, source, bytes),
         begin_copy(&work, NULL, false, destination, source, bytes))
VC_WORK_HOOK(cuMemcpyDtoDAsync, (CUdeviceptr_v1 destination, CUdeviceptr_v1 source, unsigned int bytes, CUstream stream),
         (destination, source, bytes, stream), begin_copy(&work, stream, false, destination, source, bytes))

#define VC__SET_V1(name, value_type)                                                                               \
    VC_WORK_HOOK(name, (CUdeviceptr_v1 destination, value_type value, unsigned int count), (destination, value, count), \
             vc_work_begin_sized(&work, NULL, false, VC_WORK_SET, (uint64_t)count * sizeof value))
#define VC__SET_2D_V1(name, value_type)                                                                            \
    VC_WORK_HOOK(name,                                                                                                 \
             (CUdeviceptr_v1 destination, unsigned int pitch, value_type value, unsigned int width, unsigned int height), \
             (destination, pitch, value, width, height),                                                           \
             vc_work_begin_sized(&work, NULL, false, VC_WORK_SET, (uint64_t)width * height * sizeof value))

VC__SET_V1(cuMemsetD8, unsigned char)
VC__SET_V1(cuMemsetD16, unsigned short)
VC__SET_V1(cuMemsetD32, unsigned int)
VC__SET_2D_V1(cuMemsetD2D8, unsigned char)
VC__SET_2D_V1(cuMemsetD2D16, unsigned short)
VC__SET_2D_V1(cuMemsetD2D32, unsigned int)

/* --- copies between contexts --- */

/* The device of a context; the current one stays what it is. */
static bool device_of(CUcontext context, CUdevice *device)
{
    CUcontext before;
    if (!vc_real.cuCtxGetDevice || vc_real.cuCtxGetCurrent(&before) != CUDA_SUCCESS || vc_real.cuCtxSetCurrent(context) != CUDA_SUCCESS)
        return false;
    CUresult result = vc_real.cuCtxGetDevice(device);
    vc_real.cuCtxSetCurrent(before);
    return result == CUDA_SUCCESS;
}

/* Whether a copy between them stays on one card; what is between two cards goes by the copy engines. */
static bool one_card(CUcontext one, CUcontext other)
{
    CUdevice device, same;
    return one == other || (device_of(one, &device) && device_of(other, &same) && device == same);
}

static bool begin_peer(struct vc_work *work, CUstream stream, bool per_thread, CUcontext to, CUcontext from, uint64_t bytes)
{
    if (bytes == 0 || !vc_work_gated())
        return false;
    return one_card(to, from) ? vc_work_begin_sized(work, stream, per_thread, VC_WORK_COPY, bytes) : vc_work_leaves(stream, per_thread);
}

#define VC__PEER CUdeviceptr destination, CUcontext to, CUdeviceptr source, CUcontext from, size_t bytes
#define VC__PEER_COPY(name, per_thread) \
    VC_WORK_HOOK(name, (VC__PEER), (destination, to, source, from, bytes), begin_peer(&work, NULL, per_thread, to, from, bytes))
#define VC__PEER_COPY_ASYNC(name, per_thread)                                               \
    VC_WORK_HOOK(name, (VC__PEER, CUstream stream), (destination, to, source, from, bytes, stream), \
                 begin_peer(&work, stream, per_thread, to, from, bytes))

VC__PEER_COPY(cuMemcpyPeer, false)
VC__PEER_COPY(cuMemcpyPeer_ptds, true)
VC__PEER_COPY_ASYNC(cuMemcpyPeerAsync, false)
VC__PEER_COPY_ASYNC(cuMemcpyPeerAsync_ptsz, true)

/* --- copies with extents --- */

static bool side_on_device(unsigned int type, CUdeviceptr pointer)
{
    return type == CU_MEMORYTYPE_DEVICE || type == CU_MEMORYTYPE_ARRAY ||
           (type == CU_MEMORYTYPE_UNIFIED && vc_work_on_device(pointer));
}

/* All versions of these structures name the same things. */
#define VC__STAYS(copy)                                                                                     \
    (side_on_device((copy)->srcMemoryType, (copy)->srcDevice) && side_on_device((copy)->dstMemoryType, (copy)->dstDevice))
#define VC__BEGIN(work, stream, per_thread, copy, bytes)                                                    \
    (vc_work_gated() && (copy) &&                                                                           \
     (VC__STAYS(copy) ? vc_work_begin_sized(work, stream, per_thread, VC_WORK_COPY, bytes) : vc_work_leaves(stream, per_thread)))
#define VC__BEGIN_2D(work, stream, per_thread, copy) \
    VC__BEGIN(work, stream, per_thread, copy, (uint64_t)(copy)->WidthInBytes * (copy)->Height)
#define VC__BEGIN_3D(work, stream, per_thread, copy) \
    VC__BEGIN(work, stream, per_thread, copy, (uint64_t)(copy)->WidthInBytes * (copy)->Height * (copy)->Depth)
#define VC__BEGIN_2D_v1 VC__BEGIN_2D
#define VC__BEGIN_3D_v1 VC__BEGIN_3D
#define VC__BEGIN_3D_PEER(work, stream, per_thread, copy) \
    (vc_work_gated() && (copy) &&                 \
     (one_card((copy)->srcContext, (copy)->dstContext) ? VC__BEGIN_3D(work, stream, per_thread, copy) : vc_work_leaves(stream, per_thread)))

#define VC__EXTENT(name, dimensions, per_thread)                              \
    VC_WORK_HOOK(name, (const CUDA_MEMCPY##dimensions *copy), (copy), VC__BEGIN_##dimensions(&work, NULL, per_thread, copy))
#define VC__EXTENT_ASYNC(name, dimensions, per_thread)                        \
    VC_WORK_HOOK(name, (const CUDA_MEMCPY##dimensions *copy, CUstream stream), (copy, stream), \
             VC__BEGIN_##dimensions(&work, stream, per_thread, copy))

VC__EXTENT(cuMemcpy2D_v2, 2D, false)
VC__EXTENT(cuMemcpy2D_v2_ptds, 2D, true)
VC__EXTENT(cuMemcpy2DUnaligned_v2, 2D, false)
VC__EXTENT(cuMemcpy2DUnaligned_v2_ptds, 2D, true)
VC__EXTENT_ASYNC(cuMemcpy2DAsync_v2, 2D, false)
VC__EXTENT_ASYNC(cuMemcpy2DAsync_v2_ptsz, 2D, true)
VC__EXTENT(cuMemcpy3D_v2, 3D, false)
VC__EXTENT(cuMemcpy3D_v2_ptds, 3D, true)
VC__EXTENT_ASYNC(cuMemcpy3DAsync_v2, 3D, false)
VC__EXTENT_ASYNC(cuMemcpy3DAsync_v2_ptsz, 3D, true)
VC__EXTENT(cuMemcpy3DPeer, 3D_PEER, false)
VC__EXTENT(cuMemcpy3DPeer_ptds, 3D_PEER, true)
VC__EXTENT_ASYNC(cuMemcpy3DPeerAsync, 3D_PEER, false)
VC__EXTENT_ASYNC(cuMemcpy3DPeerAsync_ptsz, 3D_PEER, true)
VC__EXTENT(cuMemcpy2D, 2D_v1, false)
VC__EXTENT(cuMemcpy2DUnaligned, 2D_v1, false)
VC__EXTENT_ASYNC(cuMemcpy2DAsync, 2D_v1, false)
VC__EXTENT(cuMemcpy3D, 3D_v1, false)
VC__EXTENT_ASYNC(cuMemcpy3DAsync, 3D_v1, false)
