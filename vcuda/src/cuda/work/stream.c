/* Hooks of streams: captures, which we keep away from; destruction; and the calls in which the application waits. */
#include "cuda/memory/account.h"
#include "cuda/work/work.h"

enum { WRONG_THREAD = 908, ILLEGAL_STATE = 401 };

/* Counted before the driver's call: from its first moment on nobody may touch the stream. */
static CUresult began(CUresult result)
{
    if (result != CUDA_SUCCESS)
        vc_work_capture_ended();
    return result;
}

#define VC__BEGINS(name, parameters, arguments)   \
    CUresult vc_hook_##name parameters            \
    {                                             \
        vc_work_capture_began();                  \
        return began(vc_real.name arguments);     \
    }

#define VC__TO_GRAPH                                                                                            \
    CUstream stream, CUgraph graph, const CUgraphNode *dependencies, const CUgraphEdgeData *edges, size_t count, int mode

VC__BEGINS(cuStreamBeginCapture, (CUstream stream), (stream))
VC__BEGINS(cuStreamBeginCapture_ptsz, (CUstream stream), (stream))
VC__BEGINS(cuStreamBeginCapture_v2, (CUstream stream, int mode), (stream, mode))
VC__BEGINS(cuStreamBeginCapture_v2_ptsz, (CUstream stream, int mode), (stream, mode))
VC__BEGINS(cuStreamBeginCaptureToGraph, (VC__TO_GRAPH), (stream, graph, dependencies, edges, count, mode))
VC__BEGINS(cuStreamBeginCaptureToGraph_ptsz, (VC__TO_GRAPH), (stream, graph, dependencies, edges, count, mode))

/* An invalidated capture ends with an error, but it ends; these two mean that it goes on, or that there was none. */
static CUresult ended(CUresult result)
{
    if ((int)result != WRONG_THREAD && (int)result != ILLEGAL_STATE)
        vc_work_capture_ended();
    return result;
}

CUresult vc_hook_cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return ended(vc_real.cuStreamEndCapture(stream, graph));
}

CUresult vc_hook_cuStreamEndCapture_ptsz(CUstream stream, CUgraph *graph)
{
    return ended(vc_real.cuStreamEndCapture_ptsz(stream, graph));
}

CUresult vc_hook_cuStreamDestroy(CUstream stream)
{
    CUresult result = vc_real.cuStreamDestroy(stream);
    vc_work_stream_gone();
    return result;
}

CUresult vc_hook_cuStreamDestroy_v2(CUstream stream)
{
    CUresult result = vc_real.cuStreamDestroy_v2(stream);
    vc_work_stream_gone();
    return result;
}

static CUresult synchronized(CUresult result, bool whole_context)
{
    if (result == CUDA_SUCCESS) {
        vc_work_synchronized(whole_context);
        vc_account_settle(); /* here the driver gives back what pools held idle */
    }
    return result;
}

CUresult vc_hook_cuCtxSynchronize(void)
{
    return synchronized(vc_real.cuCtxSynchronize(), true);
}

CUresult vc_hook_cuCtxSynchronize_v2(CUcontext context)
{
    return synchronized(vc_real.cuCtxSynchronize_v2(context), false);
}

CUresult vc_hook_cuStreamSynchronize(CUstream stream)
{
    return synchronized(vc_real.cuStreamSynchronize(stream), false);
}

CUresult vc_hook_cuStreamSynchronize_ptsz(CUstream stream)
{
    return synchronized(vc_real.cuStreamSynchronize_ptsz(stream), false);
}

CUresult vc_hook_cuEventSynchronize(CUevent event)
{
    return synchronized(vc_real.cuEventSynchronize(event), false);
}
