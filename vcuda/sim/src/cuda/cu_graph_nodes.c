/* Nodes by kind: added to graphs, their parameters read and set, in graphs and executable graphs. */
#include <string.h>

#include "cu_exec.h"
#include "cu_module.h"

static CUresult add(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count, CUcontext ctx,
                    const cu_work *work)
{
    CUresult bad = cu_graph_of(graph);
    if (bad || !node || (count && !from))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (!ctx && (int)work->kind != CU_GRAPH_NODE_TYPE_EMPTY && (int)work->kind != CU_GRAPH_NODE_TYPE_GRAPH &&
        (int)work->kind != CU_GRAPH_NODE_TYPE_HOST) {
        bad = cu_current(&ctx);
        if (bad)
            return bad;
    }
    pthread_mutex_lock(&cu_lock);
    bad = cu_graph_add(graph, ctx, work, from, count, node);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

static CUresult of_kind(CUgraphNode node, int kind)
{
    const CUresult bad = cu_node_of(node);
    return bad ? bad : (int)node->work.kind == kind ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Nodes whose parameters stay as they were made. */
static int is_fixed(const cu_work *work)
{
    const int kind = (int)work->kind;
    return kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC || kind == CU_GRAPH_NODE_TYPE_MEM_FREE || kind == CU_GRAPH_NODE_TYPE_CONDITIONAL;
}

static CUresult set(CUgraphNode node, const cu_work *work)
{
    const CUresult bad = is_fixed(work) ? CUDA_ERROR_INVALID_VALUE : of_kind(node, (int)work->kind);
    return bad ? bad : cu_node_set_work(node, work);
}

static CUresult exec_set(CUgraphExec exec, CUgraphNode node, const cu_work *work)
{
    CUgraphNode found;
    const CUresult bad = is_fixed(work) ? CUDA_ERROR_INVALID_VALUE : cu_exec_node(exec, node, (int)work->kind, &found);
    return bad ? bad : cu_node_set_work(found, work);
}

/* ---- kernels; the first version of the struct lacks its last two members ---- */

static CUresult kernel_work(const CUDA_KERNEL_NODE_PARAMS *params, int first_version, cu_work *work)
{
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    CUfunction function = params->func || first_version ? params->func : (CUfunction)params->kern;
    const CUresult bad = cu_function_of(function);
    if (bad || !params->gridDimX || !params->gridDimY || !params->gridDimZ || !params->blockDimX || !params->blockDimY ||
        !params->blockDimZ)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    memset(work, 0, sizeof *work);
    work->kind = CU_GRAPH_NODE_TYPE_KERNEL;
    work->kernel = (cu_kernel_work){function,
                                    {params->gridDimX, params->gridDimY, params->gridDimZ},
                                    {params->blockDimX, params->blockDimY, params->blockDimZ},
                                    params->sharedMemBytes,
                                    params->kernelParams,
                                    params->extra};
    return CUDA_SUCCESS;
}

static CUresult kernel_params(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params, int first_version)
{
    const CUresult bad = of_kind(node, CU_GRAPH_NODE_TYPE_KERNEL);
    if (bad || !params)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const cu_kernel_work *kernel = &node->work.kernel;
    const CUDA_KERNEL_NODE_PARAMS all = {kernel->function,      kernel->grid[0],  kernel->grid[1],  kernel->grid[2],
                                         kernel->block[0],      kernel->block[1], kernel->block[2], kernel->shared_bytes,
                                         kernel->params,        kernel->extra,    NULL,             node->ctx};
    memcpy(params, &all, first_version ? offsetof(CUDA_KERNEL_NODE_PARAMS, kern) : sizeof all);
    return CUDA_SUCCESS;
}

#define KERNEL_NODES(suffix, first_version)                                                                             \
    CU_EXPORT CUresult cuGraphAddKernelNode##suffix(CUgraphNode *node, CUgraph graph, const CUgraphNode *from,          \
                                                    size_t count, const CUDA_KERNEL_NODE_PARAMS *params)                \
    {                                                                                                                   \
        cu_work work;                                                                                                   \
        const CUresult bad = kernel_work(params, first_version, &work);                                                 \
        return bad ? bad : add(node, graph, from, count, first_version ? NULL : params->ctx, &work);                    \
    }                                                                                                                   \
    CU_EXPORT CUresult cuGraphKernelNodeGetParams##suffix(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *params)            \
    {                                                                                                                   \
        return kernel_params(node, params, first_version);                                                              \
    }                                                                                                                   \
    CU_EXPORT CUresult cuGraphKernelNodeSetParams##suffix(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *params)      \
    {                                                                                                                   \
        cu_work work;                                                                                                   \
        const CUresult bad = kernel_work(params, first_version, &work);                                                 \
        return bad ? bad : set(node, &work);                                                                            \
    }                                                                                                                   \
    CU_EXPORT CUresult cuGraphExecKernelNodeSetParams##suffix(CUgraphExec exec, CUgraphNode node,                       \
                                                              const CUDA_KERNEL_NODE_PARAMS *params)                    \
    {                                                                                                                   \
        cu_work work;                                                                                                   \
        const CUresult bad = kernel_work(params, first_version, &work);                                                 \
        return bad ? bad : exec_set(exec, node, &work);                                                                 \
    }

KERNEL_NODES(, 1)
KERNEL_NODES(_v2, 0)

CU_EXPORT CUresult cuGraphKernelNodeGetAttribute(CUgraphNode node, CUkernelNodeAttrID id, CUkernelNodeAttrValue *value)
{
    const CUresult bad = of_kind(node, CU_GRAPH_NODE_TYPE_KERNEL);
    if (bad || !value || (int)id < 0 || (int)id > 15)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *value = node->attributes[(int)id];
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphKernelNodeSetAttribute(CUgraphNode node, CUkernelNodeAttrID id,
                                                 const CUkernelNodeAttrValue *value)
{
    const CUresult bad = of_kind(node, CU_GRAPH_NODE_TYPE_KERNEL);
    if (bad || !value || (int)id < 0 || (int)id > 15)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    node->attributes[(int)id] = *value;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphKernelNodeCopyAttributes(CUgraphNode to, CUgraphNode from)
{
    CUresult bad = of_kind(to, CU_GRAPH_NODE_TYPE_KERNEL);
    if (!bad)
        bad = of_kind(from, CU_GRAPH_NODE_TYPE_KERNEL);
    if (!bad)
        memcpy(to->attributes, from->attributes, sizeof to->attributes);
    return bad;
}

/* ---- kinds whose parameters are one struct: add, get, set, set in an executable graph ---- */

#define SIMPLE_NODES(number, member, c_type, add_name, get_name, set_name, exec_name, EXTRA, EXTRA_EXEC, ctx)           \
    CU_EXPORT CUresult add_name(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count,                \
                                const c_type *params EXTRA)                                                             \
    {                                                                                                                   \
        if (!params)                                                                                                    \
            return CUDA_ERROR_INVALID_VALUE;                                                                            \
        cu_work work = {.kind = number};                                                                                \
        work.member = *params;                                                                                          \
        return add(node, graph, from, count, ctx, &work);                                                               \
    }                                                                                                                   \
    CU_EXPORT CUresult get_name(CUgraphNode node, c_type *params)                                                       \
    {                                                                                                                   \
        const CUresult bad = of_kind(node, number);                                                                     \
        if (bad || !params)                                                                                             \
            return bad ? bad : CUDA_ERROR_INVALID_VALUE;                                                                \
        *params = node->work.member;                                                                                    \
        return CUDA_SUCCESS;                                                                                            \
    }                                                                                                                   \
    CU_EXPORT CUresult set_name(CUgraphNode node, const c_type *params)                                                 \
    {                                                                                                                   \
        if (!params)                                                                                                    \
            return CUDA_ERROR_INVALID_VALUE;                                                                            \
        cu_work work = {.kind = number};                                                                                \
        work.member = *params;                                                                                          \
        return set(node, &work);                                                                                        \
    }                                                                                                                   \
    CU_EXPORT CUresult exec_name(CUgraphExec exec, CUgraphNode node, const c_type *params EXTRA_EXEC)                   \
    {                                                                                                                   \
        if (!params)                                                                                                    \
            return CUDA_ERROR_INVALID_VALUE;                                                                            \
        cu_work work = {.kind = number};                                                                                \
        work.member = *params;                                                                                          \
        return exec_set(exec, node, &work);                                                                             \
    }

#define CONTEXT_PARAMETER , CUcontext ctx
#define CONTEXT_UNUSED , __attribute__((unused)) CUcontext ctx
#define NOTHING

SIMPLE_NODES(CU_GRAPH_NODE_TYPE_MEMCPY, copy, CUDA_MEMCPY3D, cuGraphAddMemcpyNode, cuGraphMemcpyNodeGetParams,
             cuGraphMemcpyNodeSetParams, cuGraphExecMemcpyNodeSetParams, CONTEXT_PARAMETER, CONTEXT_UNUSED, ctx)
SIMPLE_NODES(CU_GRAPH_NODE_TYPE_MEMSET, set, CUDA_MEMSET_NODE_PARAMS, cuGraphAddMemsetNode, cuGraphMemsetNodeGetParams,
             cuGraphMemsetNodeSetParams, cuGraphExecMemsetNodeSetParams, CONTEXT_PARAMETER, CONTEXT_UNUSED, ctx)
SIMPLE_NODES(CU_GRAPH_NODE_TYPE_HOST, host, CUDA_HOST_NODE_PARAMS, cuGraphAddHostNode, cuGraphHostNodeGetParams,
             cuGraphHostNodeSetParams, cuGraphExecHostNodeSetParams, NOTHING, NOTHING, NULL)

/* ---- events ---- */

#define EVENT_NODES(number, add_name, get_name, set_name, exec_name)                                               \
    CU_EXPORT CUresult add_name(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count,           \
                                CUevent event)                                                                     \
    {                                                                                                              \
        if (!event || event->magic != CU_MAGIC_EVENT)                                                              \
            return CUDA_ERROR_INVALID_VALUE;                                                                       \
        return add(node, graph, from, count, NULL, &(cu_work){.kind = number, .event = event});                    \
    }                                                                                                              \
    CU_EXPORT CUresult get_name(CUgraphNode node, CUevent *event)                                                  \
    {                                                                                                              \
        const CUresult bad = of_kind(node, number);                                                                \
        if (bad || !event)                                                                                         \
            return bad ? bad : CUDA_ERROR_INVALID_VALUE;                                                           \
        *event = node->work.event;                                                                                 \
        return CUDA_SUCCESS;                                                                                       \
    }                                                                                                              \
    CU_EXPORT CUresult set_name(CUgraphNode node, CUevent event)                                                   \
    {                                                                                                              \
        return set(node, &(cu_work){.kind = number, .event = event});                                              \
    }                                                                                                              \
    CU_EXPORT CUresult exec_name(CUgraphExec exec, CUgraphNode node, CUevent event)                                \
    {                                                                                                              \
        return exec_set(exec, node, &(cu_work){.kind = number, .event = event});                                   \
    }

EVENT_NODES(CU_GRAPH_NODE_TYPE_EVENT_RECORD, cuGraphAddEventRecordNode, cuGraphEventRecordNodeGetEvent,
            cuGraphEventRecordNodeSetEvent, cuGraphExecEventRecordNodeSetEvent)
EVENT_NODES(CU_GRAPH_NODE_TYPE_WAIT_EVENT, cuGraphAddEventWaitNode, cuGraphEventWaitNodeGetEvent,
            cuGraphEventWaitNodeSetEvent, cuGraphExecEventWaitNodeSetEvent)

/* ---- children, empty nodes, memory ---- */

CU_EXPORT CUresult cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count,
                                            CUgraph child)
{
    const CUresult bad = cu_graph_of(child);
    return bad ? bad : add(node, graph, from, count, NULL, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_GRAPH, .graph = child});
}

CU_EXPORT CUresult cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
    const CUresult bad = of_kind(node, CU_GRAPH_NODE_TYPE_GRAPH);
    if (bad || !graph)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *graph = node->child;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphExecChildGraphNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraph child)
{
    const CUresult bad = cu_graph_of(child);
    return bad ? bad : exec_set(exec, node, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_GRAPH, .graph = child});
}

CU_EXPORT CUresult cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count)
{
    return add(node, graph, from, count, NULL, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_EMPTY});
}

CU_EXPORT CUresult cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count,
                                          CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult bad = add(node, graph, from, count, NULL,
                             &(cu_work){.kind = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .alloc = *params});
    if (!bad)
        params->dptr = (*node)->work.alloc.dptr;
    return bad;
}

CU_EXPORT CUresult cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    const CUresult bad = of_kind(node, CU_GRAPH_NODE_TYPE_MEM_ALLOC);
    if (bad || !params)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *params = node->work.alloc;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count,
                                         CUdeviceptr pointer)
{
    return add(node, graph, from, count, NULL, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_MEM_FREE, .free = pointer});
}

CU_EXPORT CUresult cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *pointer)
{
    const CUresult bad = of_kind(node, CU_GRAPH_NODE_TYPE_MEM_FREE);
    if (bad || !pointer)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *pointer = node->work.free;
    return CUDA_SUCCESS;
}

/* ---- nodes of any kind (CUDA 12.2) ---- */

static CUresult any_work(const CUgraphNodeParams *params, cu_work *work)
{
    memset(work, 0, sizeof *work);
    work->kind = params->type;
    switch ((int)params->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return kernel_work((const CUDA_KERNEL_NODE_PARAMS *)(const void *)&params->kernel, 0, work);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        work->copy = params->memcpy.copyParams;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        memcpy(&work->set, &params->memset, sizeof work->set);
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_HOST:
        work->host = (CUDA_HOST_NODE_PARAMS){params->host.fn, params->host.userData};
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        work->graph = params->graph.graph;
        return cu_graph_of(work->graph);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        work->event = params->eventWait.event;
        return work->event ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        memcpy(&work->alloc, &params->alloc, sizeof work->alloc);
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        work->free = params->free.dptr;
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        work->conditional.handle = params->conditional.handle;
        work->conditional.type = params->conditional.type;
        work->conditional.size = params->conditional.size;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

CU_EXPORT CUresult cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *from, size_t count,
                                  CUgraphNodeParams *params)
{
    cu_work work;
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult bad = any_work(params, &work);
    if (!bad)
        bad = add(node, graph, from, count, NULL, &work);
    if (!bad && (int)work.kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        params->alloc.dptr = (*node)->work.alloc.dptr;
    if (!bad && (int)work.kind == CU_GRAPH_NODE_TYPE_GRAPH)
        params->graph.graph = (*node)->child;
    if (!bad && (int)work.kind == CU_GRAPH_NODE_TYPE_CONDITIONAL)
        params->conditional.phGraph_out = (*node)->bodies;
    return bad;
}

CU_EXPORT CUresult cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *from,
                                     const CUgraphEdgeData *edges, size_t count, CUgraphNodeParams *params)
{
    (void)edges;
    return cuGraphAddNode(node, graph, from, count, params);
}

CU_EXPORT CUresult cuGraphNodeSetParams(CUgraphNode node, CUgraphNodeParams *params)
{
    cu_work work;
    const CUresult bad = params ? any_work(params, &work) : CUDA_ERROR_INVALID_VALUE;
    return bad ? bad : set(node, &work);
}

CU_EXPORT CUresult cuGraphExecNodeSetParams(CUgraphExec exec, CUgraphNode node, CUgraphNodeParams *params)
{
    cu_work work;
    const CUresult bad = params ? any_work(params, &work) : CUDA_ERROR_INVALID_VALUE;
    return bad ? bad : exec_set(exec, node, &work);
}
