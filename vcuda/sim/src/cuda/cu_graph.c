/* Graphs as data: nodes, their dependencies, copies of them, topological order. */
#include "cu_graph.h"

#include <stdlib.h>
#include <string.h>

#include "cu_memory.h"
#include "cu_module.h"
#include "cu_user.h"

CUresult cu_graph_of(CUgraph graph)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return graph && graph->magic == CU_MAGIC_GRAPH ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cu_node_of(CUgraphNode node)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return node && node->magic == CU_MAGIC_NODE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUgraph cu_graph_new(void)
{
    CUgraph graph = calloc(1, sizeof *graph);
    if (graph)
        graph->magic = CU_MAGIC_GRAPH;
    return graph;
}

void cu_node_free(CUgraphNode node)
{
    if ((int)node->work.kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC) {
        cu_block *block = cu_find((uintptr_t)node->work.alloc.dptr);
        /* "Graph destruction does not free live graph-allocated memory": a free that comes later ends it. */
        if (block && block->kind == CU_BLOCK_GRAPH && --block->references == 0 && !block->uses)
            cu_unplace(block);
    }
    if (node->child)
        cu_graph_free_all(node->child);
    for (unsigned i = 0; node->bodies && i < node->work.conditional.size; i++)
        if (node->bodies[i])
            cu_graph_free_all(node->bodies[i]);
    free(node->bodies);
    node->magic = 0;
    free(node->params);
    free(node->from);
    free(node);
}

void cu_graph_free_all(CUgraph graph)
{
    for (size_t i = 0; i < graph->count; i++)
        cu_node_free(graph->nodes[i]);
    cu_user_drop_all(graph);
    graph->magic = 0;
    free(graph->nodes);
    free(graph);
}

CUresult cu_node_set_from(CUgraphNode node, CUgraphNode const *from, size_t count)
{
    CUgraphNode *copy = malloc((count + 1) * sizeof *copy);
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        if (!from[i] || from[i]->magic != CU_MAGIC_NODE || from[i]->graph != node->graph) {
            free(copy);
            return CUDA_ERROR_INVALID_VALUE;
        }
        copy[used++] = from[i];
    }
    free(node->from);
    node->from = copy;
    node->from_count = used;
    return CUDA_SUCCESS;
}

/* The arguments live as long as the caller's call: keep copies of the values whose sizes the image told. */
CUresult cu_node_own_params(CUgraphNode node)
{
    cu_kernel_work *kernel = &node->work.kernel;
    const size_t count = kernel->function ? kernel->function->param_count : 0;
    size_t bytes = count * sizeof(void *);
    if (!kernel->params || !count)
        return CUDA_SUCCESS;
    for (size_t i = 0; i < count; i++)
        bytes += (kernel->function->params[i].bytes + 15) & ~(size_t)15;
    void **own = malloc(bytes);
    if (!own)
        return CUDA_ERROR_OUT_OF_MEMORY;
    unsigned char *place = (unsigned char *)(own + count);
    for (size_t i = 0; i < count; i++) {
        memcpy(place, kernel->params[i], kernel->function->params[i].bytes);
        own[i] = place;
        place += (kernel->function->params[i].bytes + 15) & ~(size_t)15;
    }
    free(node->params);
    node->params = kernel->params = own;
    return CUDA_SUCCESS;
}

static CUresult prepare(CUgraphNode node)
{
    cu_block *block;
    cu_device *device;
    CUresult bad = CUDA_SUCCESS;
    switch ((int)node->work.kind) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return cu_node_own_params(node);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        bad = node->work.graph ? cu_graph_copy(node->work.graph, &node->child) : CUDA_ERROR_INVALID_VALUE;
        if (!bad)
            node->child->owned = 1;
        return bad;
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        if (!node->work.alloc.bytesize)
            return CUDA_ERROR_INVALID_VALUE;
        bad = cu_device_of(node->work.alloc.poolProps.location.id, &device);
        if (!bad)
            bad = cu_place(NULL, node->work.alloc.poolProps.location.id, node->work.alloc.bytesize, CU_BLOCK_GRAPH, 0, &block);
        if (!bad) {
            block->references = 1;
            node->work.alloc.dptr = block->start;
        }
        return bad;
    case CU_GRAPH_NODE_TYPE_CONDITIONAL:
        return cu_conditional_prepare(node);
    default:
        return CUDA_SUCCESS;
    }
}

static int append(CUgraph graph, CUgraphNode node)
{
    if (graph->count == graph->room) {
        const size_t room = graph->room ? 2 * graph->room : 16;
        CUgraphNode *more = realloc(graph->nodes, room * sizeof *more);
        if (!more)
            return -1;
        graph->nodes = more;
        graph->room = room;
    }
    graph->nodes[graph->count++] = node;
    return 0;
}

CUresult cu_graph_add(CUgraph graph, CUcontext ctx, const cu_work *work, CUgraphNode const *from, size_t from_count,
                      CUgraphNode *made)
{
    CUgraphNode node = calloc(1, sizeof *node);
    if (!node)
        return CUDA_ERROR_OUT_OF_MEMORY;
    node->magic = CU_MAGIC_NODE;
    node->graph = graph;
    node->work = *work;
    node->ctx = ctx;
    node->enabled = 1;
    CUresult bad = cu_node_set_from(node, from, from_count);
    if (!bad)
        bad = prepare(node);
    if (!bad && append(graph, node))
        bad = CUDA_ERROR_OUT_OF_MEMORY;
    if (bad) {
        free(node->from);
        free(node->params);
        free(node);
        return bad;
    }
    *made = node;
    return CUDA_SUCCESS;
}

CUgraphNode cu_graph_find_clone(CUgraph graph, CUgraphNode original)
{
    for (size_t i = 0; i < graph->count; i++)
        if (graph->nodes[i]->original == original)
            return graph->nodes[i];
    return NULL;
}

static CUresult copy_bodies(CUgraphNode from, CUgraphNode to)
{
    const unsigned size = from->work.conditional.size;
    CUresult bad = (to->bodies = calloc(size, sizeof *to->bodies)) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    for (unsigned i = 0; !bad && i < size; i++)
        bad = cu_graph_copy(from->bodies[i], &to->bodies[i]);
    return bad;
}

static CUresult copy_node(CUgraph copy, CUgraphNode node)
{
    CUgraphNode made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *made = *node;
    made->graph = copy;
    made->original = node;
    made->from = NULL;
    made->from_count = 0;
    made->params = NULL;
    made->child = NULL;
    made->bodies = NULL;
    CUresult bad = append(copy, made) ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
    if (bad) {
        free(made);
        return bad;
    }
    if ((int)node->work.kind == CU_GRAPH_NODE_TYPE_KERNEL)
        bad = cu_node_own_params(made);
    cu_block *block = (int)node->work.kind == CU_GRAPH_NODE_TYPE_MEM_ALLOC ? cu_find((uintptr_t)node->work.alloc.dptr) : NULL;
    if (block && block->kind == CU_BLOCK_GRAPH)
        block->references++;
    if (node->child)
        bad = cu_graph_copy(node->child, &made->child);
    if (!bad && node->bodies)
        bad = copy_bodies(node, made);
    return bad;
}

CUresult cu_graph_copy(CUgraph graph, CUgraph *made)
{
    CUgraph copy = cu_graph_new();
    CUresult bad = copy ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    for (size_t i = 0; !bad && i < graph->count; i++)
        bad = copy_node(copy, graph->nodes[i]);
    for (size_t i = 0; !bad && i < graph->count; i++) {
        CUgraphNode source = graph->nodes[i], target = copy->nodes[i];
        target->from = malloc((source->from_count + 1) * sizeof *target->from);
        if (!target->from) {
            bad = CUDA_ERROR_OUT_OF_MEMORY;
            break;
        }
        for (size_t k = 0; k < source->from_count; k++)
            target->from[k] = cu_graph_find_clone(copy, source->from[k]);
        target->from_count = source->from_count;
    }
    if (!bad)
        bad = cu_user_keep_all(graph, copy);
    if (bad) {
        if (copy)
            cu_graph_free_all(copy);
        return bad;
    }
    *made = copy;
    return CUDA_SUCCESS;
}

int cu_graph_order(CUgraph graph, CUgraphNode *order)
{
    size_t placed = 0;
    char *done = calloc(graph->count + 1, 1);
    if (!done)
        return -1;
    for (int moved = 1; moved && placed < graph->count;) { /* one pass, unless edges were added against the order */
        moved = 0;
        for (size_t i = 0; i < graph->count; i++) {
            int ready = !done[i];
            for (size_t k = 0; ready && k < graph->nodes[i]->from_count; k++) {
                size_t at = 0;
                while (at < placed && order[placed - 1 - at] != graph->nodes[i]->from[k])
                    at++;
                ready = at < placed;
            }
            if (ready) {
                done[i] = 1;
                order[placed++] = graph->nodes[i];
                moved = 1;
            }
        }
    }
    free(done);
    return placed == graph->count ? 0 : -1;
}
