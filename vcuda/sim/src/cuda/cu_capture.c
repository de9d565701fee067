/* Stream capture: begins, collects nodes over one or more streams, ends in a graph or is invalidated. */
#include "cu_capture.h"

#include <stdlib.h>
#include <string.h>

#include "cu_exec.h"
#include "cu_memory.h"

enum { MODE_GLOBAL, MODE_THREAD_LOCAL, MODE_RELAXED };
enum { STATUS_NONE, STATUS_ACTIVE, STATUS_INVALIDATED };

struct cu_capture {
    cu_capture *next;
    unsigned long long id;
    CUgraph graph;
    CUstream origin, streams;
    pthread_t thread;
    int mode, invalid, into_existing;
    int to_graphics;    /* what is captured goes to a graphics API, and no graph comes of it */
    CUgraph recaptured; /* takes over what was captured, if that has its shape */
};

static cu_capture *captures; /* under cu_lock */
static _Atomic int capture_count;
static _Thread_local int thread_mode = MODE_GLOBAL;

static int set_frontier(CUstream stream, CUgraphNode const *nodes, size_t count)
{
    CUgraphNode *copy = count ? malloc(count * sizeof *copy) : NULL;
    if (count && !copy)
        return -1;
    if (count)
        memcpy(copy, nodes, count * sizeof *copy);
    free(stream->frontier);
    stream->frontier = copy;
    stream->frontier_count = count;
    return 0;
}

static int add_frontier(CUstream stream, CUgraphNode const *nodes, size_t count)
{
    CUgraphNode *more = realloc(stream->frontier, (stream->frontier_count + count + 1) * sizeof *more);
    if (!more)
        return -1;
    stream->frontier = more;
    for (size_t i = 0; i < count; i++) {
        size_t k = 0;
        while (k < stream->frontier_count && more[k] != nodes[i])
            k++;
        if (k == stream->frontier_count)
            more[stream->frontier_count++] = nodes[i];
    }
    return 0;
}

/* Does a capture stand in the way of an unsafe call of this thread? It invalidates what it runs into. */
CUresult cu_capture_forbids(void)
{
    if (!atomic_load_explicit(&capture_count, memory_order_relaxed) || thread_mode == MODE_RELAXED)
        return CUDA_SUCCESS;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&cu_lock);
    for (cu_capture *capture = captures; capture; capture = capture->next) {
        const int own = pthread_equal(capture->thread, pthread_self());
        if (capture->mode == MODE_RELAXED || (!own && (capture->mode != MODE_GLOBAL || thread_mode != MODE_GLOBAL)))
            continue;
        capture->invalid = 1;
        result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    pthread_mutex_unlock(&cu_lock);
    return result;
}

static CUresult implicit(CUstream stream, int invalidates)
{
    CUresult result = CUDA_SUCCESS;
    if (!atomic_load_explicit(&capture_count, memory_order_relaxed) || stream != stream->ctx->legacy)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&cu_lock);
    for (cu_capture *capture = captures; capture; capture = capture->next) {
        for (CUstream one = capture->streams; one; one = one->capture_next) {
            if (one->ctx == stream->ctx && !(one->flags & CU_STREAM_NON_BLOCKING)) {
                capture->invalid |= invalidates;
                result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
            }
        }
    }
    pthread_mutex_unlock(&cu_lock);
    return result;
}

CUresult cu_capture_implicit(CUstream stream)
{
    return implicit(stream, 1);
}

CUresult cu_capture_break(CUstream stream)
{
    pthread_mutex_lock(&cu_lock);
    if (stream->capture)
        stream->capture->invalid = 1;
    pthread_mutex_unlock(&cu_lock);
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static void leave_streams(cu_capture *capture)
{
    for (CUstream stream = capture->streams, next; stream; stream = next) {
        next = stream->capture_next;
        set_frontier(stream, NULL, 0);
        stream->capture_next = NULL;
        atomic_store_explicit(&stream->capture, NULL, memory_order_release);
    }
    capture->streams = NULL;
}

static void end(cu_capture *capture)
{
    cu_capture **link = &captures;
    while (*link != capture)
        link = &(*link)->next;
    *link = capture->next;
    atomic_fetch_sub(&capture_count, 1);
    leave_streams(capture);
    free(capture);
}

void cu_capture_abandon(CUstream stream)
{
    pthread_mutex_lock(&cu_lock);
    cu_capture *capture = stream->capture;
    if (capture && capture->origin == stream) {
        if (!capture->into_existing)
            cu_graph_free_all(capture->graph);
        end(capture);
    } else if (capture) {
        CUstream *link = &capture->streams;
        while (*link != stream)
            link = &(*link)->capture_next;
        *link = stream->capture_next;
        capture->invalid = 1;
        set_frontier(stream, NULL, 0);
        stream->capture = NULL;
    }
    pthread_mutex_unlock(&cu_lock);
}

static CUresult add_node(CUstream stream, const cu_work *work, CUgraphNode *node)
{
    CUgraphNode made;
    cu_capture *capture = stream->capture;
    if (!capture || capture->invalid)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    CUresult bad = cu_graph_add(capture->graph, stream->ctx, work, stream->frontier, stream->frontier_count, &made);
    if (!bad && set_frontier(stream, &made, 1))
        bad = CUDA_ERROR_OUT_OF_MEMORY;
    if (bad)
        capture->invalid = 1;
    else if (node)
        *node = made;
    return bad;
}

CUresult cu_capture_add(CUstream stream, const cu_work *work, CUgraphNode *node)
{
    pthread_mutex_lock(&cu_lock);
    const CUresult result = add_node(stream, work, node);
    pthread_mutex_unlock(&cu_lock);
    return result;
}

CUresult cu_capture_alloc(CUstream stream, cu_work *work, CUdeviceptr *pointer)
{
    CUgraphNode node;
    pthread_mutex_lock(&cu_lock);
    const CUresult bad = add_node(stream, work, &node);
    if (!bad)
        *pointer = node->work.alloc.dptr;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CUresult cu_capture_record(CUstream stream, CUevent event)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&cu_lock);
    const cu_capture *capture = stream->capture;
    CUgraphNode *copy = malloc((stream->frontier_count + 1) * sizeof *copy);
    if (!capture || capture->invalid) {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (!copy) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        if (stream->frontier_count)
            memcpy(copy, stream->frontier, stream->frontier_count * sizeof *copy);
        free(event->captured);
        event->captured = copy;
        event->captured_count = stream->frontier_count;
        event->capture_id = capture->id;
        copy = NULL;
    }
    pthread_mutex_unlock(&cu_lock);
    free(copy);
    return result;
}

CUresult cu_capture_wait(CUstream stream, CUevent event)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&cu_lock);
    cu_capture *capture = captures;
    while (capture && capture->id != event->capture_id)
        capture = capture->next;
    if (!event->capture_id || !capture) {
        result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION; /* an event from outside this or any capture */
        if (stream->capture)
            stream->capture->invalid = 1;
    } else if (capture->invalid) {
        result = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    } else if (stream->capture && stream->capture != capture) {
        capture->invalid = stream->capture->invalid = 1;
        result = CUDA_ERROR_STREAM_CAPTURE_MERGE;
    } else if (stream == stream->ctx->legacy) {
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    } else {
        if (!stream->capture) {
            stream->capture_next = capture->streams;
            capture->streams = stream;
            atomic_store_explicit(&stream->capture, capture, memory_order_release);
        }
        if (add_frontier(stream, event->captured, event->captured_count))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&cu_lock);
    return result;
}

CUresult cu_capture_begin(CUstream handle, CUgraph graph, CUgraphNode const *from, size_t count, int mode, cu_capture_use use,
                          CUgraph recaptured)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || mode < MODE_GLOBAL || mode > MODE_RELAXED)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (stream == stream->ctx->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    cu_capture *capture = calloc(1, sizeof *capture);
    pthread_mutex_lock(&cu_lock);
    CUgraph made = graph ? graph : cu_graph_new();
    if (stream->capture || !capture || !made || set_frontier(stream, from, count)) {
        bad = stream->capture ? CUDA_ERROR_ILLEGAL_STATE : CUDA_ERROR_OUT_OF_MEMORY;
        if (made && !graph)
            cu_graph_free_all(made);
        free(capture);
    } else {
        *capture = (cu_capture){.next = captures,
                                .id = atomic_fetch_add(&cu_process.next_id, 1) + 1,
                                .graph = made,
                                .origin = stream,
                                .streams = stream,
                                .thread = pthread_self(),
                                .mode = mode,
                                .into_existing = graph != NULL,
                                .to_graphics = use == CU_CAPTURE_TO_GRAPHICS,
                                .recaptured = recaptured};
        captures = capture;
        atomic_fetch_add(&capture_count, 1);
        atomic_store_explicit(&stream->capture, capture, memory_order_release);
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

/* ---- the API ---- */

CU_EXPORT CUresult cuStreamBeginCapture(CUstream stream)
{
    return cu_capture_begin(stream, NULL, NULL, 0, MODE_GLOBAL, CU_CAPTURE_TO_GRAPH, NULL);
}

CU_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode)
{
    return cu_capture_begin(stream, NULL, NULL, 0, (int)mode, CU_CAPTURE_TO_GRAPH, NULL);
}

CU_EXPORT CUresult cuStreamBeginCaptureToGraph(CUstream stream, CUgraph graph, const CUgraphNode *from,
                                               const CUgraphEdgeData *edges, size_t count, CUstreamCaptureMode mode)
{
    (void)edges;
    const CUresult bad = cu_graph_of(graph);
    return bad ? bad : cu_capture_begin(stream, graph, from, count, (int)mode, CU_CAPTURE_TO_GRAPH, NULL);
}

/* Every leaf of the captured graph must be known to the stream that ends the capture. */
static int unjoined(const cu_capture *capture)
{
    const CUgraph graph = capture->graph;
    for (size_t i = 0; i < graph->count; i++) {
        int used = 0;
        for (size_t k = i + 1; k < graph->count && !used; k++)
            for (size_t d = 0; d < graph->nodes[k]->from_count && !used; d++)
                used = graph->nodes[k]->from[d] == graph->nodes[i];
        for (size_t f = 0; f < capture->origin->frontier_count && !used; f++)
            used = capture->origin->frontier[f] == graph->nodes[i];
        if (!used)
            return 1;
    }
    return 0;
}

static CUresult end_capture(CUstream stream, int to_graphics, CUgraph *graph, CUgraph *recaptured)
{
    CUresult bad = CUDA_SUCCESS;
    cu_capture *capture = stream->capture;
    if (!capture || capture->to_graphics != to_graphics)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream)
        bad = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    else if (capture->mode != MODE_RELAXED && !pthread_equal(capture->thread, pthread_self()))
        bad = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    if (bad) {
        capture->invalid = 1;
        return bad;
    }
    if (capture->invalid)
        bad = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    else if (!capture->into_existing && unjoined(capture))
        bad = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    *recaptured = capture->recaptured;
    if (!bad)
        *graph = capture->graph;
    else if (!capture->into_existing)
        cu_graph_free_all(capture->graph);
    end(capture);
    return bad;
}

/* The nodes of `graph` take over the work of those that were captured; anything but the same shape fails. */
static CUresult adopt(CUgraph graph, CUgraph captured)
{
    CUresult bad = graph->count == captured->count ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (size_t i = 0; !bad && i < graph->count; i++) {
        const cu_work *had = &graph->nodes[i]->work, *has = &captured->nodes[i]->work;
        const int allocates = (int)had->kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
        if ((int)had->kind != (int)has->kind || (allocates && had->alloc.bytesize != has->alloc.bytesize) ||
            (!allocates && (int)had->kind != CU_GRAPH_NODE_TYPE_MEM_FREE && cu_node_set_work(graph->nodes[i], has)))
            bad = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    return bad;
}

CUresult cu_capture_end(CUstream handle, int to_graphics, CUgraph *graph)
{
    CUstream stream;
    CUgraph recaptured = NULL;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !graph)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    pthread_mutex_lock(&cu_lock);
    bad = end_capture(stream, to_graphics, graph, &recaptured);
    pthread_mutex_unlock(&cu_lock);
    if (bad || (!recaptured && !to_graphics))
        return bad;
    if (recaptured)
        bad = adopt(recaptured, *graph);
    pthread_mutex_lock(&cu_lock);
    cu_graph_free_all(*graph);
    pthread_mutex_unlock(&cu_lock);
    *graph = bad ? NULL : recaptured;
    return bad;
}

CU_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph *graph)
{
    return cu_capture_end(stream, 0, graph);
}

static int status_of(CUstream stream)
{
    return !stream->capture ? STATUS_NONE : stream->capture->invalid ? STATUS_INVALIDATED : STATUS_ACTIVE;
}

CU_EXPORT CUresult cuStreamIsCapturing(CUstream handle, CUstreamCaptureStatus *status)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !status)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    bad = implicit(stream, 0); /* "the blocking stream capture is not invalidated" */
    pthread_mutex_lock(&cu_lock);
    *status = (CUstreamCaptureStatus)status_of(stream);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuStreamGetCaptureInfo_v3(CUstream handle, CUstreamCaptureStatus *status, cuuint64_t *id,
                                             CUgraph *graph, const CUgraphNode **from, const CUgraphEdgeData **edges,
                                             size_t *count)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !status)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    bad = implicit(stream, 0); /* "the blocking stream capture is not invalidated" */
    pthread_mutex_lock(&cu_lock);
    const int now = status_of(stream);
    *status = (CUstreamCaptureStatus)now;
    if (now == STATUS_ACTIVE) {
        if (id)
            *id = stream->capture->id;
        if (graph)
            *graph = stream->capture->graph;
        if (from)
            *from = stream->frontier;
        if (edges)
            *edges = NULL;
        if (count)
            *count = stream->frontier_count;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuStreamGetCaptureInfo_v2(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id,
                                             CUgraph *graph, const CUgraphNode **from, size_t *count)
{
    return cuStreamGetCaptureInfo_v3(stream, status, id, graph, from, NULL, count);
}

CU_EXPORT CUresult cuStreamGetCaptureInfo(CUstream stream, CUstreamCaptureStatus *status, cuuint64_t *id)
{
    return cuStreamGetCaptureInfo_v3(stream, status, id, NULL, NULL, NULL, NULL);
}

CU_EXPORT CUresult cuStreamUpdateCaptureDependencies_v2(CUstream handle, CUgraphNode *from, const CUgraphEdgeData *edges,
                                                        size_t count, unsigned int flags)
{
    CUstream stream;
    (void)edges;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || flags > 1 || (count && !from))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    if (!stream->capture)
        bad = CUDA_ERROR_ILLEGAL_STATE;
    else if (flags ? set_frontier(stream, from, count) : add_frontier(stream, from, count))
        bad = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuStreamUpdateCaptureDependencies(CUstream stream, CUgraphNode *from, size_t count, unsigned int flags)
{
    return cuStreamUpdateCaptureDependencies_v2(stream, from, NULL, count, flags);
}

CU_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    const CUresult bad = cu_initialised();
    if (bad || !mode || (int)*mode < MODE_GLOBAL || (int)*mode > MODE_RELAXED)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int before = thread_mode;
    thread_mode = (int)*mode;
    *mode = (CUstreamCaptureMode)before;
    return CUDA_SUCCESS;
}
