/* Hooks of streams: captures, which we keep away from; destruction; and the calls in which the application waits. */
#include "cuda/memory/account.h"
#include "cuda/memory/context_memory.h"
#include "cuda/work/capture.h"
#include "cuda/work/work.h"

enum { WRONG_THREAD = 908, ILLEGAL_STATE = 401 };

/* Known before the driver's call: from its first moment on nobody may touch the stream. */
#define VC__BEGINS(name, per_thread, parameters, arguments)            \
    CUresult vc_hook_##name parameters                                 \
    {                                                                  \
        vc_work_capture_begins(vc_work_stream(stream, per_thread));         \
        CUresult result = vc_real.name arguments;                      \
        if (result != CUDA_SUCCESS)                                    \
            vc_capture_over(vc_work_stream(stream, per_thread));       \
        return result;                                                 \
    }

#define VC__TO_GRAPH                                                                                            \
    CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count, int mode

VC__BEGINS(cuStreamBeginCapture, false, (CUstream stream), (stream))
VC__BEGINS(cuStreamBeginCapture_ptsz, true, (CUstream stream), (stream))
VC__BEGINS(cuStreamBeginCapture_v2, false, (CUstream stream, int mode), (stream, mode))
VC__BEGINS(cuStreamBeginCapture_v2_ptsz, true, (CUstream stream, int mode), (stream, mode))
VC__BEGINS(cuStreamBeginCaptureToGraph, false, (VC__TO_GRAPH), (stream, graph, dependencies, edges, count, mode))
VC__BEGINS(cuStreamBeginCaptureToGraph_ptsz, true, (VC__TO_GRAPH), (stream, graph, dependencies, edges, count, mode))

/* An invalidated capture ends with an error, but it ends; these two mean that it goes on, or that there was none. */
static CUresult ended(CUresult result, CUstream stream)
{
    if ((int)result != WRONG_THREAD && (int)result != ILLEGAL_STATE)
        vc_capture_over(stream);
    return result;
}

CUresult vc_hook_cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return ended(vc_real.cuStreamEndCapture(stream, graph), vc_work_stream(stream, false));
}

CUresult vc_hook_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return ended(vc_real.cuStreamEndCapture_ptsz(stream, graph), vc_work_stream(stream, true));
}

static CUresult end_stream(CUstream stream, CUresult (*call)(CUstream))
{
    CUcontext context = vc_stream_ending(stream);
    vc_work_stream_ending(stream);
    CUresult result = call(stream);
    if (result == CUDA_SUCCESS)
        vc_stream_ended(context);
    vc_work_stream_gone(stream, result == CUDA_SUCCESS);
    return result;
}

CUresult vc_hook_cuStreamDestroy(CUstream stream)
{
    return end_stream(stream, vc_real.cuStreamDestroy);
}

CUresult vc_hook_cuStreamDestroy_v2(CUstream stream)
{
    return end_stream(stream, vc_real.cuStreamDestroy_v2);
}

/* What pools held idle the driver gives back here. */
static CUresult waited(CUresult result, uint64_t from_ns, CUstream stream)
{
    if (result == CUDA_SUCCESS) {
        vc_work_waited(from_ns, stream);
        vc_account_settle();
    }
    return result;
}

static CUresult waited_otherwise(CUresult result)
{
    if (result == CUDA_SUCCESS) {
        vc_work_waited_otherwise();
        vc_account_settle();
    }
    return result;
}

CUresult vc_hook_cuCtxSynchronize(void)
{
    uint64_t from = vc_work_waits();
    return waited(vc_real.cuCtxSynchronize(), from, NULL);
}

CUresult vc_hook_cuCtxSynchronize_v2(CUcontext context)
{
    return waited_otherwise(vc_real.cuCtxSynchronize_v2(context));
}

CUresult vc_hook_cuStreamSynchronize(CUstream stream)
{
    uint64_t from = vc_work_waits();
    return waited(vc_real.cuStreamSynchronize(stream), from, vc_work_stream(stream, false));
}

CUresult vc_hook_cuStreamSynchronize_ptsz(CUstream stream)
{
    uint64_t from = vc_work_waits();
    return waited(vc_real.cuStreamSynchronize_ptsz(stream), from, vc_work_stream(stream, true));
}

CUresult vc_hook_cuEventSynchronize(CUevent event)
{
    return waited_otherwise(vc_real.cuEventSynchronize(event));
}

/* Who is told that it is not done will ask again, and may sleep until then. */
static CUresult polled(CUresult result)
{
    if (result == CUDA_ERROR_NOT_READY)
        vc_work_waits();
    return result;
}

CUresult vc_hook_cuEventQuery(CUevent event)
{
    return polled(vc_real.cuEventQuery(event));
}

CUresult vc_hook_cuStreamQuery(CUstream stream)
{
    return polled(vc_real.cuStreamQuery(stream));
}

CUresult vc_hook_cuStreamQuery_ptsz(CUstream stream)
{
    return polled(vc_real.cuStreamQuery_ptsz(stream));
}
