/* Executable graphs: instantiated, launched, updated. */
#include "cu_exec.h"

#include <stdlib.h>

#include "cu_capture.h"
#include "cu_memory.h"
#include "cu_module.h"
#include "cu_user.h"

CUresult cu_exec_of(CUgraphExec exec)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return exec && exec->magic == CU_MAGIC_EXEC ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cu_exec_node(CUgraphExec exec, CUgraphNode node, int kind, CUgraphNode *found)
{
    const CUresult bad = cu_exec_of(exec);
    if (bad)
        return bad;
    *found = cu_graph_find_clone(exec->graph, node);
    return *found && (int)(*found)->work.kind == kind ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cu_node_set_work(CUgraphNode node, const cu_work *work)
{
    CUresult bad = CUDA_SUCCESS;
    if ((int)node->work.kind != (int)work->kind)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    if ((int)work->kind == CU_GRAPH_NODE_TYPE_GRAPH) {
        CUgraph copy;
        bad = cu_graph_copy(work->graph, &copy);
        if (!bad) {
            cu_graph_free_all(node->child);
            node->child = copy;
        }
    } else {
        node->work = *work;
        if ((int)work->kind == CU_GRAPH_NODE_TYPE_KERNEL)
            bad = cu_node_own_params(node);
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

static CUresult instantiate(CUgraphExec *exec, CUgraph graph, cuuint64_t flags)
{
    CUresult bad = cu_graph_of(graph);
    if (bad || !exec || flags > 15)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    CUgraphExec made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&cu_lock);
    bad = cu_graph_copy(graph, &made->graph);
    if (!bad) {
        made->order = malloc((graph->count + 1) * sizeof *made->order);
        if (!made->order)
            bad = CUDA_ERROR_OUT_OF_MEMORY;
        else if (cu_graph_order(made->graph, made->order))
            bad = CUDA_ERROR_INVALID_VALUE;
        if (bad)
            cu_graph_free_all(made->graph);
    }
    pthread_mutex_unlock(&cu_lock);
    if (bad) {
        free(made->order);
        free(made);
        return bad;
    }
    made->magic = CU_MAGIC_EXEC;
    made->flags = flags;
    *exec = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    return instantiate(exec, graph, flags);
}

static CUresult instantiate_logged(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t bytes)
{
    if (error_node)
        *error_node = NULL;
    if (log && bytes)
        *log = 0;
    return instantiate(exec, graph, 0);
}

CU_EXPORT CUresult cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t bytes)
{
    return instantiate_logged(exec, graph, error_node, log, bytes);
}

CU_EXPORT CUresult cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log,
                                         size_t bytes)
{
    return instantiate_logged(exec, graph, error_node, log, bytes);
}

CU_EXPORT CUresult cuGraphInstantiateWithParams(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = instantiate(exec, graph, params->flags);
    params->hErrNode_out = NULL;
    params->result_out = (CUgraphInstantiateResult)(result ? 1 : 0);
    return result;
}

CU_EXPORT CUresult cuGraphExecGetFlags(CUgraphExec exec, cuuint64_t *flags)
{
    const CUresult bad = cu_exec_of(exec);
    if (bad || !flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphExecDestroy(CUgraphExec exec)
{
    const CUresult bad = cu_exec_of(exec);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    cu_graph_free_all(exec->graph);
    pthread_mutex_unlock(&cu_lock);
    exec->magic = 0;
    free(exec->order);
    free(exec);
    return CUDA_SUCCESS;
}

/* ---- launch: neighbouring work of one kind becomes one operation; only callbacks and events cut it ---- */

typedef struct {
    CUstream stream;
    sim_op pending;
    int frees; /* CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH */
} flow;

static CUresult flush(flow *to)
{
    const CUresult bad = to->pending.kind ? cu_push(to->stream, &to->pending, 1, NULL) : CUDA_SUCCESS;
    to->pending.kind = 0;
    return bad;
}

static CUresult append(flow *to, const sim_op *op)
{
    if (to->pending.kind == op->kind) {
        to->pending.ns += op->ns;
        to->pending.event += op->event; /* launches */
        return CUDA_SUCCESS;
    }
    const CUresult bad = flush(to);
    to->pending = *op;
    return bad;
}

/* What this graph allocated in its last launch and nobody freed: an error, unless the graph frees it by itself. */
static CUresult use_again(cu_block *block, int frees)
{
    if (block->held && !frees)
        return CUDA_ERROR_INVALID_VALUE;
    if (block->held)
        return CUDA_SUCCESS;
    const CUresult bad = cu_graph_memory_use(block);
    block->held = !bad;
    return bad;
}

static CUresult memory_node(flow *to, const cu_work *work)
{
    CUresult bad = CUDA_SUCCESS;
    if ((int)work->kind == CU_GRAPH_NODE_TYPE_MEM_FREE) {
        bad = flush(to); /* what comes before the free is in the stream before it */
        return bad ? bad : cu_free_block(work->free, to->stream);
    }
    pthread_mutex_lock(&cu_lock);
    cu_block *block = cu_find((uintptr_t)work->alloc.dptr);
    bad = block && block->kind == CU_BLOCK_GRAPH ? use_again(block, to->frees) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

static CUresult run_nodes(flow *to, CUgraphNode const *order, size_t count);

static CUresult run_child(flow *to, CUgraph graph)
{
    CUgraphNode *order = malloc((graph->count + 1) * sizeof *order);
    CUresult bad = order ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (!bad && cu_graph_order(graph, order))
        bad = CUDA_ERROR_INVALID_VALUE;
    if (!bad)
        bad = run_nodes(to, order, graph->count);
    free(order);
    return bad;
}

static CUresult run_conditional(flow *to, CUgraphNode node)
{
    CUresult bad = CUDA_SUCCESS;
    int64_t last = -1;
    for (int body; !bad;) {
        pthread_mutex_lock(&cu_lock);
        body = cu_conditional_body(node, &last);
        pthread_mutex_unlock(&cu_lock);
        if (body < 0)
            break;
        bad = run_child(to, node->bodies[body]);
    }
    return bad;
}

static CUresult run_node(flow *to, CUgraphNode node)
{
    sim_op op;
    CUresult bad;
    switch ((int)node->work.kind) {
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return run_child(to, node->child);
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        return run_conditional(to, node);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return memory_node(to, &node->work);
    case CU_GRAPH_NODE_TYPE_HOST:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        bad = flush(to);
        return bad ? bad : cu_run(to->stream, &node->work, NULL);
    default:
        bad = cu_effect(to->stream->ctx, &node->work, &op);
        return bad ? bad : append(to, &op);
    }
}

static CUresult run_nodes(flow *to, CUgraphNode const *order, size_t count)
{
    CUresult bad = CUDA_SUCCESS;
    for (size_t i = 0; !bad && i < count; i++)
        if (order[i]->enabled)
            bad = run_node(to, order[i]);
    return bad;
}

CU_EXPORT CUresult cuGraphLaunch(CUgraphExec exec, CUstream handle)
{
    CUstream stream;
    CUresult bad = cu_exec_of(exec);
    if (!bad)
        bad = cu_stream_of(handle, &stream);
    if (bad)
        return bad;
    sim_slow_call(cu_process.state, stream->ctx->card);
    if (stream->capture)
        return cu_capture_add(stream, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_GRAPH, .graph = exec->graph}, NULL);
    bad = cu_capture_implicit(stream);
    if (bad)
        return bad;
    flow to = {.stream = stream, .frees = (exec->flags & 1) != 0};
    pthread_mutex_lock(&cu_lock);
    cu_conditional_begin(exec->graph);
    pthread_mutex_unlock(&cu_lock);
    bad = run_nodes(&to, exec->order, exec->graph->count);
    const CUresult last = flush(&to);
    return bad ? bad : last;
}

/* What the card itself launches: its kernels, one after the other. 0 for a graph that was not made for it. */
uint64_t cu_exec_kernels_ns(CUgraphExec exec)
{
    static _Thread_local int depth; /* of graphs that launch graphs, perhaps themselves */
    uint64_t sum = 0;
    if (cu_exec_of(exec) || !(exec->flags & 4) || depth == 8)
        return 0;
    depth++;
    for (size_t i = 0; i < exec->graph->count; i++)
        if ((int)exec->graph->nodes[i]->work.kind == CU_GRAPH_NODE_TYPE_KERNEL)
            sum += cu_kernel_op_ns(&exec->graph->nodes[i]->work.kernel);
    depth--;
    return sum;
}

CU_EXPORT CUresult cuGraphUpload(CUgraphExec exec, CUstream handle)
{
    CUstream stream;
    const CUresult bad = cu_exec_of(exec);
    return bad ? bad : cu_stream_of(handle, &stream);
}

/* ---- update: the same shape with other parameters ---- */

static int same_edges(CUgraph one, CUgraph other, size_t at)
{
    CUgraphNode a = one->nodes[at], b = other->nodes[at];
    if (a->from_count != b->from_count)
        return 0;
    for (size_t i = 0; i < a->from_count; i++) {
        size_t k = 0;
        while (k < one->count && one->nodes[k] != a->from[i])
            k++;
        size_t l = 0;
        while (l < other->count && other->nodes[l] != b->from[i])
            l++;
        if (k != l)
            return 0;
    }
    return 1;
}

static int difference(CUgraph have, CUgraph given, CUgraphNode *where)
{
    if (have->count != given->count)
        return 2; /* topology changed */
    for (size_t i = 0; i < have->count; i++) {
        *where = given->nodes[i];
        if ((int)have->nodes[i]->work.kind != (int)given->nodes[i]->work.kind)
            return 3; /* node type changed */
        if (!same_edges(have, given, i))
            return 2;
        const int kind = (int)given->nodes[i]->work.kind;
        if (kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC || kind == CU_GRAPH_NODE_TYPE_MEM_FREE || kind == CU_GRAPH_NODE_TYPE_CONDITIONAL)
            return 6; /* not supported */
    }
    *where = NULL;
    return 0;
}

CU_EXPORT CUresult cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
    CUgraphNode where = NULL;
    CUresult bad = cu_exec_of(exec);
    if (!bad)
        bad = cu_graph_of(graph);
    if (bad || !info)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int what = difference(exec->graph, graph, &where);
    *info = (CUgraphExecUpdateResultInfo){.result = (CUgraphExecUpdateResult)what, .errorNode = what ? where : NULL};
    if (what)
        return CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    for (size_t i = 0; !bad && i < graph->count; i++) {
        cu_work work = graph->nodes[i]->work;
        if (graph->nodes[i]->child)
            work.graph = graph->nodes[i]->child;
        bad = cu_node_set_work(exec->graph->nodes[i], &work);
        exec->graph->nodes[i]->original = graph->nodes[i];
    }
    return bad;
}

CU_EXPORT CUresult cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error_node,
                                     CUgraphExecUpdateResult *result)
{
    CUgraphExecUpdateResultInfo info = {.result = (CUgraphExecUpdateResult)1};
    const CUresult bad = cuGraphExecUpdate_v2(exec, graph, &info);
    if (error_node)
        *error_node = info.errorNode;
    if (result)
        *result = info.result;
    return bad;
}

CU_EXPORT CUresult cuGraphNodeSetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int enabled)
{
    const CUresult bad = cu_exec_of(exec);
    CUgraphNode found = bad ? NULL : cu_graph_find_clone(exec->graph, node);
    if (!found || (int)found->work.kind > CU_GRAPH_NODE_TYPE_MEMSET)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    found->enabled = enabled != 0;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphNodeGetEnabled(CUgraphExec exec, CUgraphNode node, unsigned int *enabled)
{
    const CUresult bad = cu_exec_of(exec);
    CUgraphNode found = bad ? NULL : cu_graph_find_clone(exec->graph, node);
    if (!found || !enabled)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *enabled = (unsigned)found->enabled;
    return CUDA_SUCCESS;
}
