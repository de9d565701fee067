/* Hooks of what takes time on a stream and none of the card's: copies from and to the host, callbacks, waits for other work. */
#include "cuda/work/work.h"

#define VC__ELSEWHERE(name, stream, per_thread, parameters, arguments) \
    CUresult vc_hook_##name parameters                                 \
    {                                                                  \
        vc_work_elsewhere(vc_work_stream(stream, per_thread));         \
        return vc_real.name arguments;                                 \
    }

VC__ELSEWHERE(cuMemcpyHtoD, NULL, false,
              (CUdeviceptr_v1 destination, const void *source, unsigned int bytes), (destination, source, bytes))
VC__ELSEWHERE(cuMemcpyDtoH, NULL, false,
              (void *destination, CUdeviceptr_v1 source, unsigned int bytes), (destination, source, bytes))
VC__ELSEWHERE(cuMemcpyHtoA, NULL, false,
              (CUarray destination, unsigned int to, const void *source, unsigned int bytes), (destination, to, source, bytes))
VC__ELSEWHERE(cuMemcpyAtoH, NULL, false,
              (void *destination, CUarray source, unsigned int from, unsigned int bytes), (destination, source, from, bytes))
VC__ELSEWHERE(cuMemcpyHtoDAsync, stream, false,
              (CUdeviceptr_v1 destination, const void *source, unsigned int bytes, CUstream stream), (destination, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyDtoHAsync, stream, false,
              (void *destination, CUdeviceptr_v1 source, unsigned int bytes, CUstream stream), (destination, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyHtoAAsync, stream, false,
              (CUarray destination, unsigned int to, const void *source, unsigned int bytes, CUstream stream), (destination, to, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyAtoHAsync, stream, false,
              (void *destination, CUarray source, unsigned int from, unsigned int bytes, CUstream stream), (destination, source, from, bytes, stream))
VC__ELSEWHERE(cuMemcpyHtoD_v2, NULL, false,
              (CUdeviceptr destination, const void *source, size_t bytes), (destination, source, bytes))
VC__ELSEWHERE(cuMemcpyDtoH_v2, NULL, false,
              (void *destination, CUdeviceptr source, size_t bytes), (destination, source, bytes))
VC__ELSEWHERE(cuMemcpyHtoA_v2, NULL, false,
              (CUarray destination, size_t to, const void *source, size_t bytes), (destination, to, source, bytes))
VC__ELSEWHERE(cuMemcpyAtoH_v2, NULL, false,
              (void *destination, CUarray source, size_t from, size_t bytes), (destination, source, from, bytes))
VC__ELSEWHERE(cuMemcpyHtoDAsync_v2, stream, false,
              (CUdeviceptr destination, const void *source, size_t bytes, CUstream stream), (destination, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyDtoHAsync_v2, stream, false,
              (void *destination, CUdeviceptr source, size_t bytes, CUstream stream), (destination, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyHtoAAsync_v2, stream, false,
              (CUarray destination, size_t to, const void *source, size_t bytes, CUstream stream), (destination, to, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyAtoHAsync_v2, stream, false,
              (void *destination, CUarray source, size_t from, size_t bytes, CUstream stream), (destination, source, from, bytes, stream))
VC__ELSEWHERE(cuMemcpyHtoD_v2_ptds, NULL, true,
              (CUdeviceptr destination, const void *source, size_t bytes), (destination, source, bytes))
VC__ELSEWHERE(cuMemcpyDtoH_v2_ptds, NULL, true,
              (void *destination, CUdeviceptr source, size_t bytes), (destination, source, bytes))
VC__ELSEWHERE(cuMemcpyHtoA_v2_ptds, NULL, true,
              (CUarray destination, size_t to, const void *source, size_t bytes), (destination, to, source, bytes))
VC__ELSEWHERE(cuMemcpyAtoH_v2_ptds, NULL, true,
              (void *destination, CUarray source, size_t from, size_t bytes), (destination, source, from, bytes))
VC__ELSEWHERE(cuMemcpyHtoDAsync_v2_ptsz, stream, true,
              (CUdeviceptr destination, const void *source, size_t bytes, CUstream stream), (destination, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyDtoHAsync_v2_ptsz, stream, true,
              (void *destination, CUdeviceptr source, size_t bytes, CUstream stream), (destination, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyHtoAAsync_v2_ptsz, stream, true,
              (CUarray destination, size_t to, const void *source, size_t bytes, CUstream stream), (destination, to, source, bytes, stream))
VC__ELSEWHERE(cuMemcpyAtoHAsync_v2_ptsz, stream, true,
              (void *destination, CUarray source, size_t from, size_t bytes, CUstream stream), (destination, source, from, bytes, stream))
VC__ELSEWHERE(cuLaunchHostFunc, stream, false, (CUstream stream, void (*call)(void *), void *data), (stream, call, data))
VC__ELSEWHERE(cuLaunchHostFunc_v2, stream, false,
              (CUstream stream, void (*call)(void *), void *data, unsigned int mode), (stream, call, data, mode))
VC__ELSEWHERE(cuStreamAddCallback, stream, false,
              (CUstream stream, void (*call)(CUstream, CUresult, void *), void *data, unsigned int flags), (stream, call, data, flags))
VC__ELSEWHERE(cuStreamWaitValue32, stream, false,
              (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamWaitValue64, stream, false,
              (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamBatchMemOp, stream, false,
              (CUstream stream, unsigned int count, void *operations, unsigned int flags), (stream, count, operations, flags))
VC__ELSEWHERE(cuStreamWaitValue32_v2, stream, false,
              (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamWaitValue64_v2, stream, false,
              (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamBatchMemOp_v2, stream, false,
              (CUstream stream, unsigned int count, void *operations, unsigned int flags), (stream, count, operations, flags))
VC__ELSEWHERE(cuWaitExternalSemaphoresAsync, stream, false,
              (const void *semaphores, const void *values, unsigned int count, CUstream stream), (semaphores, values, count, stream))
VC__ELSEWHERE(cuLaunchHostFunc_ptsz, stream, true,
              (CUstream stream, void (*call)(void *), void *data), (stream, call, data))
VC__ELSEWHERE(cuLaunchHostFunc_v2_ptsz, stream, true,
              (CUstream stream, void (*call)(void *), void *data, unsigned int mode), (stream, call, data, mode))
VC__ELSEWHERE(cuStreamAddCallback_ptsz, stream, true,
              (CUstream stream, void (*call)(CUstream, CUresult, void *), void *data, unsigned int flags), (stream, call, data, flags))
VC__ELSEWHERE(cuStreamWaitValue32_ptsz, stream, true,
              (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamWaitValue64_ptsz, stream, true,
              (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamBatchMemOp_ptsz, stream, true,
              (CUstream stream, unsigned int count, void *operations, unsigned int flags), (stream, count, operations, flags))
VC__ELSEWHERE(cuStreamWaitValue32_v2_ptsz, stream, true,
              (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamWaitValue64_v2_ptsz, stream, true,
              (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags), (stream, address, value, flags))
VC__ELSEWHERE(cuStreamBatchMemOp_v2_ptsz, stream, true,
              (CUstream stream, unsigned int count, void *operations, unsigned int flags), (stream, count, operations, flags))
VC__ELSEWHERE(cuWaitExternalSemaphoresAsync_ptsz, stream, true,
              (const void *semaphores, const void *values, unsigned int count, CUstream stream), (semaphores, values, count, stream))

/* By that the stream may join a capture. */
static CUresult wait_event(CUstream stream, bool per_thread, CUevent event, unsigned int flags, CUresult (*call)(CUstream, CUevent, unsigned int))
{
    bool joins = vc_visit_captures();
    vc_work_elsewhere(vc_work_stream(stream, per_thread));
    if (joins)
        vc_visit_forbid_all();
    CUresult result = call(stream, event, flags);
    if (joins)
        vc_visit_allow_all();
    return result;
}

CUresult vc_hook_cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int flags)
{
    return wait_event(stream, false, event, flags, vc_real.cuStreamWaitEvent);
}

CUresult vc_hook_cuStreamWaitEvent_ptsz(CUstream stream, CUevent event, unsigned int flags)
{
    return wait_event(stream, true, event, flags, vc_real.cuStreamWaitEvent_ptsz);
}
