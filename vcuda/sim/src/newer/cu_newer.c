/* What drivers after the 550's have: recapture into a graph, capture into a graphics API, pools by location. */
#include "../cuda/cu_capture.h"
#include "../cuda/cu_graph.h"
#include "../cuda/cu_pool.h"

enum { MODE_RELAXED = 2 };

/* ---- captures ---- */

/* The callback of parameters that differ is not called: nothing differs but kernels' arguments, which may. */
CU_EXPORT CUresult cuStreamBeginRecaptureToGraph(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback,
                                                 void *data)
{
    (void)callback, (void)data;
    const CUresult bad = cu_graph_of(graph);
    return bad ? bad : cu_capture_begin(stream, NULL, NULL, 0, (int)mode, CU_CAPTURE_TO_GRAPH, graph);
}

CU_EXPORT CUresult cuStreamBeginRecaptureToGraph_ptsz(CUstream stream, CUstreamCaptureMode mode, CUgraph graph, void *callback,
                                                      void *data)
{
    return cuStreamBeginRecaptureToGraph(stream ? stream : CU_STREAM_PER_THREAD, mode, graph, callback, data);
}

/* There is no graphics API here: any shared data will do, and what is captured is never run. */
CU_EXPORT CUresult cuStreamBeginCaptureToCig(CUstream stream, const void *params)
{
    return params ? cu_capture_begin(stream, NULL, NULL, 0, MODE_RELAXED, CU_CAPTURE_TO_GRAPHICS, NULL)
                  : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuStreamBeginCaptureToCig_ptsz(CUstream stream, const void *params)
{
    return cuStreamBeginCaptureToCig(stream ? stream : CU_STREAM_PER_THREAD, params);
}

CU_EXPORT CUresult cuStreamEndCaptureToCig(CUstream stream)
{
    CUgraph none;
    return cu_capture_end(stream, 1, &none);
}

CU_EXPORT CUresult cuStreamEndCaptureToCig_ptsz(CUstream stream)
{
    return cuStreamEndCaptureToCig(stream ? stream : CU_STREAM_PER_THREAD);
}

/* ---- graphs: parameters may say more than before, nothing of which is here ---- */

CU_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, const CUgraphEdgeData *edges,
                                     size_t count, CUgraphNodeParams *params);
CU_EXPORT CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *params);

CU_EXPORT CUresult cuGraphAddNode_v3(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, const CUgraphEdgeData *edges,
                                     size_t count, CUgraphNodeParams *params)
{
    return cuGraphAddNode_v2(node, graph, from, edges, count, params);
}

CU_EXPORT CUresult cuGraphNodeSetParams_v2(CUgraphNode node, CUgraphNodeParams *params)
{
    return cuGraphNodeSetParams(node, params);
}

/* ---- streams and contexts ---- */

CU_EXPORT CUresult cuStreamGetDevice(CUstream handle, CUdevice *device)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !device)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *device = stream->ctx->device;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuStreamGetDevice_ptsz(CUstream stream, CUdevice *device)
{
    return cuStreamGetDevice(stream ? stream : CU_STREAM_PER_THREAD, device);
}

CU_EXPORT CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice device);

CU_EXPORT CUresult cuCtxCreate_v4(CUcontext *ctx, const void *params, unsigned int flags, CUdevice device)
{
    return params ? CUDA_ERROR_NOT_SUPPORTED : cuCtxCreate_v2(ctx, flags, device); /* execution affinity needs MPS */
}

/* ---- pools by location and type: of a card pinned ones are the old functions'; the others have one each ---- */

CU_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props);
CU_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device);
CU_EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device);
CU_EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);

enum { PLACES = SIM_MAX_CARDS + 2 };
static CUmemoryPool defaults[2][PLACES], currents[2][PLACES]; /* under cu_lock: pinned or managed; a card, no place, a host */

static int pinned_on_card(const CUmemLocation *location, CUmemAllocationType type)
{
    return (int)type == CU_MEM_ALLOCATION_TYPE_PINNED && (int)location->type == CU_MEM_LOCATION_TYPE_DEVICE;
}

static int place_of(const CUmemLocation *location)
{
    return (int)location->type != CU_MEM_LOCATION_TYPE_DEVICE ? SIM_MAX_CARDS + ((int)location->type != 0)
           : location->id >= 0 && location->id < SIM_MAX_CARDS ? location->id
                                                               : SIM_MAX_CARDS;
}

CU_EXPORT CUresult cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    CUresult bad = cu_initialised();
    if (bad || !pool || !location)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (pinned_on_card(location, type))
        return cuDeviceGetDefaultMemPool(pool, location->id);
    CUmemoryPool *known = &defaults[(int)type == CU_MEM_ALLOCATION_TYPE_MANAGED][place_of(location)];
    const CUmemPoolProps props = {.allocType = type, .location = *location};
    if (!*known)
        bad = cuMemPoolCreate(known, &props);
    *pool = bad ? NULL : *known;
    return bad;
}

CU_EXPORT CUresult cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    CUresult bad = cu_initialised();
    if (bad || !pool || !location)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (pinned_on_card(location, type))
        return cuDeviceGetMemPool(pool, location->id);
    *pool = currents[(int)type == CU_MEM_ALLOCATION_TYPE_MANAGED][place_of(location)];
    return *pool ? CUDA_SUCCESS : cuMemGetDefaultMemPool(pool, location, type);
}

CU_EXPORT CUresult cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    const CUresult bad = cu_pool_of(pool);
    if (bad || !location)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (pinned_on_card(location, type))
        return cuDeviceSetMemPool(location->id, pool);
    if ((int)pool->props.allocType != (int)type || (int)pool->props.location.type != (int)location->type)
        return CUDA_ERROR_INVALID_VALUE;
    currents[(int)type == CU_MEM_ALLOCATION_TYPE_MANAGED][place_of(location)] = pool;
    return CUDA_SUCCESS;
}
