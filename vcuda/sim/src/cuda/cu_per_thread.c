/* The `_ptsz` exports of calls that take a stream: stream 0 means the calling thread's own default stream. */
#include "cu_client.h"

#define PER_THREAD(name, parameters, arguments)  \
    CUresult name parameters;                    \
    CU_EXPORT CUresult name##_ptsz parameters    \
    {                                            \
        return name arguments;                   \
    }

static inline CUstream own(CUstream stream)
{
    return stream ? stream : CU_STREAM_PER_THREAD;
}

PER_THREAD(cuEventRecord, (CUevent event, CUstream stream), (event, own(stream)))
PER_THREAD(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned int flags), (event, own(stream), flags))
PER_THREAD(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned int flags), (own(stream), event, flags))
PER_THREAD(cuStreamAddCallback, (CUstream stream, CUstreamCallback callback, void *data, unsigned int flags),
           (own(stream), callback, data, flags))
PER_THREAD(cuLaunchHostFunc, (CUstream stream, CUhostFn function, void *data), (own(stream), function, data))
PER_THREAD(cuStreamAttachMemAsync, (CUstream stream, CUdeviceptr pointer, size_t length, unsigned int flags),
           (own(stream), pointer, length, flags))
PER_THREAD(cuStreamSynchronize, (CUstream stream), (own(stream)))
PER_THREAD(cuStreamQuery, (CUstream stream), (own(stream)))
PER_THREAD(cuStreamGetPriority, (CUstream stream, int *priority), (own(stream), priority))
PER_THREAD(cuStreamGetFlags, (CUstream stream, unsigned int *flags), (own(stream), flags))
PER_THREAD(cuStreamGetId, (CUstream stream, unsigned long long *id), (own(stream), id))
PER_THREAD(cuStreamGetCtx, (CUstream stream, CUcontext *ctx), (own(stream), ctx))
PER_THREAD(cuStreamGetAttribute, (CUstream stream, CUstreamAttrID id, CUstreamAttrValue *value), (own(stream), id, value))
PER_THREAD(cuStreamSetAttribute, (CUstream stream, CUstreamAttrID id, const CUstreamAttrValue *value),
           (own(stream), id, value))
PER_THREAD(cuStreamCopyAttributes, (CUstream to, CUstream from), (own(to), own(from)))
PER_THREAD(cuStreamBeginCapture, (CUstream stream), (own(stream)))
PER_THREAD(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), (own(stream), mode))
PER_THREAD(cuStreamBeginCaptureToGraph,
           (CUstream stream, CUgraph graph, const CUgraphNode *from, const CUgraphEdgeData *edges, size_t count,
            CUstreamCaptureMode mode),
           (own(stream), graph, from, edges, count, mode))
PER_THREAD(cuStreamEndCapture, (CUstream stream, CUgraph *graph), (own(stream), graph))
PER_THREAD(cuStreamIsCapturing, (CUstream stream, CUstreamCaptureStatus *status), (own(stream), status))
PER_THREAD(cuStreamGetCaptureInfo, (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id),
           (own(stream), status, id))
PER_THREAD(cuStreamGetCaptureInfo_v2,
           (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **from,
            size_t *count),
           (own(stream), status, id, graph, from, count))
PER_THREAD(cuStreamGetCaptureInfo_v3,
           (CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id, CUgraph *graph, const CUgraphNode **from,
            const CUgraphEdgeData **edges, size_t *count),
           (own(stream), status, id, graph, from, edges, count))
PER_THREAD(cuStreamUpdateCaptureDependencies, (CUstream stream, CUgraphNode *from, size_t count, unsigned int flags),
           (own(stream), from, count, flags))
PER_THREAD(cuStreamUpdateCaptureDependencies_v2,
           (CUstream stream, CUgraphNode *from, const CUgraphEdgeData *edges, size_t count, unsigned int flags),
           (own(stream), from, edges, count, flags))
PER_THREAD(cuMemAllocAsync, (CUdeviceptr *pointer, size_t bytes, CUstream stream), (pointer, bytes, own(stream)))
PER_THREAD(cuMemAllocFromPoolAsync, (CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream),
           (pointer, bytes, pool, own(stream)))
PER_THREAD(cuMemFreeAsync, (CUdeviceptr pointer, CUstream stream), (pointer, own(stream)))
PER_THREAD(cuMemPrefetchAsync, (CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream),
           (pointer, bytes, device, own(stream)))
PER_THREAD(cuMemPrefetchAsync_v2,
           (CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream),
           (pointer, bytes, location, flags, own(stream)))
PER_THREAD(cuGraphLaunch, (CUgraphExec exec, CUstream stream), (exec, own(stream)))
PER_THREAD(cuGraphUpload, (CUgraphExec exec, CUstream stream), (exec, own(stream)))
PER_THREAD(cuGraphInstantiateWithParams, (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params),
           (exec, graph, params))
