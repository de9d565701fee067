/* The driver API's functions that the reference model calls, beside the product's own declarations of its types. */
#ifndef MODEL_CUDA_H
#define MODEL_CUDA_H

#include "vc_cuda.h"

typedef struct {
    CUmemLocation location;
    int flags;
} CUmemAccessDesc;

typedef struct {
    unsigned int numDevices;
    size_t size;
    unsigned long long handleTypes, flags;
} CUmulticastObjectProp;

typedef struct {
    CUfunction func;
    unsigned int gridDimX, gridDimY, gridDimZ, blockDimX, blockDimY, blockDimZ, sharedMemBytes;
    void **kernelParams, **extra;
    void *kern;
    CUcontext ctx;
} model_kernel_params;

typedef struct {
    CUdeviceptr dst;
    size_t pitch;
    unsigned int value, elementSize;
    size_t width, height;
} model_memset_params;

typedef struct {
    int result;
    CUgraphNode errorNode, errorFromNode;
} model_update_result;

typedef struct {
    int type, padding, fd, unused[3];
    unsigned long long size;
    unsigned int flags, reserved[17];
} model_external_memory; /* CUDA_EXTERNAL_MEMORY_HANDLE_DESC by descriptor */

typedef struct {
    unsigned long long offset, size;
    unsigned int flags, reserved[17];
} model_external_buffer; /* CUDA_EXTERNAL_MEMORY_BUFFER_DESC */

_Static_assert(sizeof(model_external_memory) == 104 && offsetof(model_external_memory, size) == 24, "ABI");
_Static_assert(sizeof(model_external_buffer) == 88, "ABI");

struct model_ipc_handle { /* CUipcMemHandle, and CUmemPoolPtrExportData */
    char data[64];
};

#define API(name, ...) extern int name(__VA_ARGS__);

API(cuInit, unsigned)
API(cuDeviceGetCount, int *)
API(cuDeviceTotalMem_v2, size_t *, int)
API(cuMemGetInfo_v2, size_t *, size_t *)

API(cuCtxCreate_v2, CUcontext *, unsigned, int)
API(cuCtxDestroy_v2, CUcontext)
API(cuCtxSetCurrent, CUcontext)
API(cuCtxGetCurrent, CUcontext *)
API(cuCtxPushCurrent_v2, CUcontext)
API(cuCtxPopCurrent_v2, CUcontext *)
API(cuCtxGetDevice, int *)
API(cuCtxSynchronize, void)
API(cuCtxSetLimit, int, size_t)
API(cuCtxGetLimit, size_t *, int)
API(cuDevicePrimaryCtxRetain, CUcontext *, int)
API(cuDevicePrimaryCtxRelease_v2, int)
API(cuDevicePrimaryCtxReset_v2, int)
API(cuDevicePrimaryCtxGetState, int, unsigned *, int *)
API(cuGreenCtxCreate, CUgreenCtx *, CUdevResourceDesc, int, unsigned)
API(cuGreenCtxDestroy, CUgreenCtx)

API(cuMemAlloc_v2, CUdeviceptr *, size_t)
API(cuMemAllocPitch_v2, CUdeviceptr *, size_t *, size_t, size_t, unsigned)
API(cuMemAllocManaged, CUdeviceptr *, size_t, unsigned)
API(cuMemFree_v2, CUdeviceptr)
API(cuMemHostAlloc, void **, size_t, unsigned)
API(cuMemFreeHost, void *)
API(cuMemGetAddressRange_v2, CUdeviceptr *, size_t *, CUdeviceptr)
API(cuPointerGetAttribute, void *, int, CUdeviceptr)
API(cuMemsetD8_v2, CUdeviceptr, unsigned char, size_t)
API(cuMemsetD8Async, CUdeviceptr, unsigned char, size_t, CUstream)
API(cuMemcpyDtoH_v2, void *, CUdeviceptr, size_t)
API(cuMemcpyDtoDAsync_v2, CUdeviceptr, CUdeviceptr, size_t, CUstream)
API(cuMemPrefetchAsync, CUdeviceptr, size_t, int, CUstream)

API(cuMemAllocAsync, CUdeviceptr *, size_t, CUstream)
API(cuMemAllocFromPoolAsync, CUdeviceptr *, size_t, CUmemoryPool, CUstream)
API(cuMemFreeAsync, CUdeviceptr, CUstream)
API(cuMemPoolCreate, CUmemoryPool *, const CUmemPoolProps *)
API(cuMemPoolDestroy, CUmemoryPool)
API(cuMemPoolTrimTo, CUmemoryPool, size_t)
API(cuMemPoolGetAttribute, CUmemoryPool, int, void *)
API(cuMemPoolSetAttribute, CUmemoryPool, int, void *)
API(cuDeviceGetDefaultMemPool, CUmemoryPool *, int)
API(cuDeviceGetMemPool, CUmemoryPool *, int)
API(cuDeviceSetMemPool, int, CUmemoryPool)

API(cuMemCreate, CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long)
API(cuMemRelease, CUmemGenericAllocationHandle)
API(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle *, void *)
API(cuMemExportToShareableHandle, void *, CUmemGenericAllocationHandle, int, unsigned long long)
API(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *, void *, int)
API(cuMemAddressReserve, CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long)
API(cuMemAddressFree, CUdeviceptr, size_t)
API(cuMemMap, CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
API(cuMemUnmap, CUdeviceptr, size_t)
API(cuMemSetAccess, CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)
API(cuMulticastCreate, CUmemGenericAllocationHandle *, const CUmulticastObjectProp *)
API(cuMulticastAddDevice, CUmemGenericAllocationHandle, int)
API(cuMulticastBindMem, CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t, unsigned long long)
API(cuMulticastUnbind, CUmemGenericAllocationHandle, int, size_t, size_t)

API(cuArrayCreate_v2, CUarray *, const CUDA_ARRAY_DESCRIPTOR_v2 *)
API(cuArray3DCreate_v2, CUarray *, const CUDA_ARRAY3D_DESCRIPTOR_v2 *)
API(cuArrayDestroy, CUarray)
API(cuMipmappedArrayCreate, CUmipmappedArray *, const CUDA_ARRAY3D_DESCRIPTOR_v2 *, unsigned)
API(cuMipmappedArrayDestroy, CUmipmappedArray)
API(cuMemMapArrayAsync, CUarrayMapInfo *, unsigned, CUstream)

API(cuModuleLoadData, CUmodule *, const void *)
API(cuModuleUnload, CUmodule)
API(cuModuleGetFunction, CUfunction *, CUmodule, const char *)
API(cuModuleGetGlobal_v2, CUdeviceptr *, size_t *, CUmodule, const char *)
API(cuLibraryLoadData, CUlibrary *, const void *, CUjit_option *, void **, unsigned, CUlibraryOption *, void **, unsigned)
API(cuLibraryUnload, CUlibrary)
API(cuLibraryGetModule, CUmodule *, CUlibrary)
API(cuLibraryGetKernel, CUkernel *, CUlibrary, const char *)
API(cuLibraryGetGlobal, CUdeviceptr *, size_t *, CUlibrary, const char *)
API(cuLaunchKernel, CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **)

API(cuStreamCreate, CUstream *, unsigned)
API(cuStreamDestroy_v2, CUstream)
API(cuStreamSynchronize, CUstream)
API(cuStreamBeginCapture_v2, CUstream, int)
API(cuStreamBeginCaptureToGraph, CUstream, CUgraph, const CUgraphNode *, const CUgraphEdgeData *, size_t, int)
API(cuStreamEndCapture, CUstream, CUgraph *)
API(cuStreamIsCapturing, CUstream, int *)
API(cuStreamWaitEvent, CUstream, CUevent, unsigned)
API(cuLaunchHostFunc, CUstream, void (*)(void *), void *)
API(cuEventCreate, CUevent *, unsigned)
API(cuEventDestroy_v2, CUevent)
API(cuEventRecord, CUevent, CUstream)
API(cuEventSynchronize, CUevent)

API(cuGraphCreate, CUgraph *, unsigned)
API(cuGraphDestroy, CUgraph)
API(cuGraphClone, CUgraph *, CUgraph)
API(cuGraphGetNodes, CUgraph, CUgraphNode *, size_t *)
API(cuGraphAddKernelNode_v2, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const model_kernel_params *)
API(cuGraphAddMemsetNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const model_memset_params *, CUcontext)
API(cuGraphAddMemAllocNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUDA_MEM_ALLOC_NODE_PARAMS *)
API(cuGraphAddMemFreeNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUdeviceptr)
API(cuGraphAddChildGraphNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t, CUgraph)
API(cuGraphAddEmptyNode, CUgraphNode *, CUgraph, const CUgraphNode *, size_t)
API(cuGraphInstantiateWithFlags, CUgraphExec *, CUgraph, unsigned long long)
API(cuGraphLaunch, CUgraphExec, CUstream)
API(cuGraphUpload, CUgraphExec, CUstream)
API(cuGraphExecUpdate_v2, CUgraphExec, CUgraph, model_update_result *)
API(cuGraphExecDestroy, CUgraphExec)
API(cuDeviceGraphMemTrim, int)
API(cuDeviceGetGraphMemAttribute, int, int, void *)

API(cuIpcGetMemHandle, void *, CUdeviceptr)
API(cuIpcOpenMemHandle_v2, CUdeviceptr *, struct model_ipc_handle, unsigned)
API(cuIpcCloseMemHandle, CUdeviceptr)
API(cuMemPoolExportToShareableHandle, void *, CUmemoryPool, int, unsigned long long)
API(cuMemPoolImportFromShareableHandle, CUmemoryPool *, void *, int, unsigned long long)
API(cuMemPoolExportPointer, void *, CUdeviceptr)
API(cuMemPoolImportPointer, CUdeviceptr *, CUmemoryPool, void *)
API(cuImportExternalMemory, void **, const model_external_memory *)
API(cuExternalMemoryGetMappedBuffer, CUdeviceptr *, void *, const model_external_buffer *)
API(cuDestroyExternalMemory, void *)

#undef API

#endif
