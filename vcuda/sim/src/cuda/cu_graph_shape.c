/* Graphs as a shape: created, cloned, destroyed; nodes and edges listed, added, removed. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cu_user.h"

CU_EXPORT CUresult cuGraphCreate(CUgraph *graph, unsigned int flags)
{
    const CUresult bad = cu_initialised();
    if (bad || !graph || flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *graph = cu_graph_new();
    return *graph ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CU_EXPORT CUresult cuGraphDestroy(CUgraph graph)
{
    const CUresult bad = cu_graph_of(graph);
    if (bad || graph->owned)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    cu_graph_free_all(graph);
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphClone(CUgraph *clone, CUgraph graph)
{
    CUresult bad = cu_graph_of(graph);
    if (bad || !clone)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    bad = cu_graph_copy(graph, clone);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuGraphNodeFindInClone(CUgraphNode *found, CUgraphNode original, CUgraph clone)
{
    const CUresult bad = cu_graph_of(clone);
    if (bad || !found)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *found = cu_graph_find_clone(clone, original);
    return *found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuGraphNodeGetType(CUgraphNode node, CUgraphNodeType *type)
{
    const CUresult bad = cu_node_of(node);
    if (bad || !type)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *type = node->work.kind;
    return CUDA_SUCCESS;
}

/* The way all lists are given back: with no array the number; with one as many as fit, the rest of it NULL. */
typedef struct {
    CUgraphNode *nodes, *others;
    size_t room, count;
} list;

static void put(list *to, CUgraphNode node, CUgraphNode other)
{
    if (to->nodes && to->count < to->room)
        to->nodes[to->count] = node;
    if (to->others && to->count < to->room)
        to->others[to->count] = other;
    to->count++;
}

static CUresult finish(list *to, size_t *number)
{
    for (size_t i = to->count; to->nodes && i < to->room; i++) {
        to->nodes[i] = NULL;
        if (to->others)
            to->others[i] = NULL;
    }
    *number = to->nodes && to->count > to->room ? to->room : to->count;
    return CUDA_SUCCESS;
}

static CUresult list_nodes(CUgraph graph, CUgraphNode *nodes, size_t *number, int roots)
{
    const CUresult bad = cu_graph_of(graph);
    if (bad || !number)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    list to = {nodes, NULL, *number, 0};
    for (size_t i = 0; i < graph->count; i++)
        if (!roots || !graph->nodes[i]->from_count)
            put(&to, graph->nodes[i], NULL);
    return finish(&to, number);
}

CU_EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode *nodes, size_t *number)
{
    return list_nodes(graph, nodes, number, 0);
}

CU_EXPORT CUresult cuGraphGetRootNodes(CUgraph graph, CUgraphNode *nodes, size_t *number)
{
    return list_nodes(graph, nodes, number, 1);
}

CU_EXPORT CUresult cuGraphGetEdges(CUgraph graph, CUgraphNode *from, CUgraphNode *to_nodes, size_t *number)
{
    const CUresult bad = cu_graph_of(graph);
    if (bad || !number)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    list to = {from, to_nodes, *number, 0};
    for (size_t i = 0; i < graph->count; i++)
        for (size_t k = 0; k < graph->nodes[i]->from_count; k++)
            put(&to, graph->nodes[i]->from[k], graph->nodes[i]);
    return finish(&to, number);
}

CU_EXPORT CUresult cuGraphNodeGetDependencies(CUgraphNode node, CUgraphNode *nodes, size_t *number)
{
    const CUresult bad = cu_node_of(node);
    if (bad || !number)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    list to = {nodes, NULL, *number, 0};
    for (size_t i = 0; i < node->from_count; i++)
        put(&to, node->from[i], NULL);
    return finish(&to, number);
}

CU_EXPORT CUresult cuGraphNodeGetDependentNodes(CUgraphNode node, CUgraphNode *nodes, size_t *number)
{
    const CUresult bad = cu_node_of(node);
    if (bad || !number)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    list to = {nodes, NULL, *number, 0};
    for (size_t i = 0; i < node->graph->count; i++)
        for (size_t k = 0; k < node->graph->nodes[i]->from_count; k++)
            if (node->graph->nodes[i]->from[k] == node)
                put(&to, node->graph->nodes[i], NULL);
    return finish(&to, number);
}

static void clear_edges(CUgraphEdgeData *edges, const size_t *number)
{
    if (edges)
        memset(edges, 0, *number * sizeof *edges); /* plain dependencies only */
}

CU_EXPORT CUresult cuGraphGetEdges_v2(CUgraph graph, CUgraphNode *from, CUgraphNode *to, CUgraphEdgeData *edges,
                                      size_t *number)
{
    const CUresult bad = cuGraphGetEdges(graph, from, to, number);
    if (!bad && from)
        clear_edges(edges, number);
    return bad;
}

CU_EXPORT CUresult cuGraphNodeGetDependencies_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *edges,
                                                 size_t *number)
{
    const CUresult bad = cuGraphNodeGetDependencies(node, nodes, number);
    if (!bad && nodes)
        clear_edges(edges, number);
    return bad;
}

CU_EXPORT CUresult cuGraphNodeGetDependentNodes_v2(CUgraphNode node, CUgraphNode *nodes, CUgraphEdgeData *edges,
                                                   size_t *number)
{
    const CUresult bad = cuGraphNodeGetDependentNodes(node, nodes, number);
    if (!bad && nodes)
        clear_edges(edges, number);
    return bad;
}

static CUresult change_edge(CUgraph graph, CUgraphNode from, CUgraphNode to, int remove)
{
    CUresult bad = cu_node_of(from);
    if (!bad)
        bad = cu_node_of(to);
    if (bad || from->graph != graph || to->graph != graph || from == to)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    size_t at = 0;
    while (at < to->from_count && to->from[at] != from)
        at++;
    if (remove) {
        if (at == to->from_count)
            return CUDA_ERROR_INVALID_VALUE;
        to->from[at] = to->from[--to->from_count];
        return CUDA_SUCCESS;
    }
    if (at < to->from_count)
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphNode *more = realloc(to->from, (to->from_count + 1) * sizeof *more);
    if (!more)
        return CUDA_ERROR_OUT_OF_MEMORY;
    to->from = more;
    to->from[to->from_count++] = from;
    return CUDA_SUCCESS;
}

static CUresult change_edges(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count, int remove)
{
    CUresult bad = cu_graph_of(graph);
    if (bad || (count && (!from || !to)))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    for (size_t i = 0; !bad && i < count; i++)
        bad = change_edge(graph, from[i], to[i], remove);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuGraphAddDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
    return change_edges(graph, from, to, count, 0);
}

CU_EXPORT CUresult cuGraphAddDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                             const CUgraphEdgeData *edges, size_t count)
{
    (void)edges;
    return change_edges(graph, from, to, count, 0);
}

CU_EXPORT CUresult cuGraphRemoveDependencies(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to, size_t count)
{
    return change_edges(graph, from, to, count, 1);
}

CU_EXPORT CUresult cuGraphRemoveDependencies_v2(CUgraph graph, const CUgraphNode *from, const CUgraphNode *to,
                                                const CUgraphEdgeData *edges, size_t count)
{
    (void)edges;
    return change_edges(graph, from, to, count, 1);
}

CU_EXPORT CUresult cuGraphDestroyNode(CUgraphNode node)
{
    const CUresult bad = cu_node_of(node);
    if (bad)
        return bad;
    CUgraph graph = node->graph;
    pthread_mutex_lock(&cu_lock);
    size_t at = graph->count;
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode other = graph->nodes[i];
        if (other == node)
            at = i;
        for (size_t k = 0; k < other->from_count;)
            if (other->from[k] == node)
                other->from[k] = other->from[--other->from_count];
            else
                k++;
    }
    memmove(graph->nodes + at, graph->nodes + at + 1, (graph->count - at - 1) * sizeof *graph->nodes);
    graph->count--;
    cu_node_free(node);
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuGraphDebugDotPrint(CUgraph graph, const char *path, unsigned int flags)
{
    static const char *const kinds[] = {"KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY", "WAIT", "RECORD",
                                        "SIGNAL", "WAIT_EXTERNAL", "ALLOC", "FREE"};
    (void)flags;
    const CUresult bad = cu_graph_of(graph);
    if (bad || !path)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    FILE *file = fopen(path, "we");
    if (!file)
        return CUDA_ERROR_OPERATING_SYSTEM;
    fprintf(file, "digraph graph_ {\n");
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = graph->nodes[i];
        fprintf(file, "  \"%p\" [label=\"%zu %s\"];\n", (void *)node, i, kinds[(int)node->work.kind]);
        for (size_t k = 0; k < node->from_count; k++)
            fprintf(file, "  \"%p\" -> \"%p\";\n", (void *)node->from[k], (void *)node);
    }
    fprintf(file, "}\n");
    return fclose(file) ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}
