/* Conditional nodes of graphs: their conditions, and which of their bodies runs. */
#include <stdlib.h>

#include "cu_graph.h"

enum { IF, WHILE, SWITCH, ASSIGN_DEFAULT = 1 };

typedef struct {
    uint64_t value, assigned;
    unsigned flags;
} condition;

static condition *conditions; /* under cu_lock; handle N is N - 1 here, and none ends */
static size_t condition_count, condition_room;

CU_EXPORT CUresult cuGraphConditionalHandleCreate(cuuint64_t *handle, CUgraph graph, CUcontext ctx, unsigned int value,
                                                  unsigned int flags)
{
    (void)ctx;
    CUresult bad = cu_graph_of(graph);
    if (bad || !handle || flags > ASSIGN_DEFAULT)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    if (condition_count == condition_room) {
        const size_t room = condition_room ? 2 * condition_room : 16;
        condition *more = realloc(conditions, room * sizeof *more);
        bad = more ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
        conditions = more ? more : conditions;
        condition_room = more ? room : condition_room;
    }
    if (!bad) {
        conditions[condition_count] = (condition){value, value, flags};
        *handle = ++condition_count;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

static condition *condition_of(uint64_t handle)
{
    return handle && handle <= condition_count ? &conditions[handle - 1] : NULL;
}

CUresult cu_conditional_prepare(CUgraphNode node)
{
    const unsigned size = node->work.conditional.size, type = (unsigned)node->work.conditional.type;
    if (!condition_of(node->work.conditional.handle) || !size || type > SWITCH || (type == WHILE && size != 1) ||
        (type == IF && size > 2))
        return CUDA_ERROR_INVALID_VALUE;
    node->bodies = calloc(size, sizeof *node->bodies);
    for (unsigned i = 0; node->bodies && i < size; i++) {
        node->bodies[i] = cu_graph_new();
        if (!node->bodies[i])
            return CUDA_ERROR_OUT_OF_MEMORY;
        node->bodies[i]->owned = 1;
    }
    return node->bodies ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

void cu_conditional_begin(CUgraph graph)
{
    for (size_t i = 0; i < graph->count; i++) {
        CUgraphNode node = graph->nodes[i];
        if (node->child)
            cu_conditional_begin(node->child);
        if (!node->bodies)
            continue;
        condition *one = condition_of(node->work.conditional.handle);
        if (one->flags & ASSIGN_DEFAULT)
            one->value = one->assigned;
        for (unsigned k = 0; k < node->work.conditional.size; k++)
            cu_conditional_begin(node->bodies[k]);
    }
}

/* A loop whose body leaves its condition as it was would never end: here it ends after the first time. */
int cu_conditional_body(const struct CUgraphNode_st *node, int64_t *last)
{
    const uint64_t value = condition_of(node->work.conditional.handle)->value;
    const unsigned size = node->work.conditional.size;
    const int64_t before = *last;
    *last = (int64_t)value;
    switch (node->work.conditional.type) {
    case WHILE:
        return value && before != (int64_t)value ? 0 : -1;
    case IF:
        return before >= 0 ? -1 : value ? 0 : size == 2 ? 1 : -1;
    default:
        return before >= 0 || value >= size ? -1 : (int)value;
    }
}

int cu_conditional_count_down(uint64_t handle, uint64_t by)
{
    condition *one = condition_of(handle);
    if (!one)
        return -1;
    one->value = one->value > by ? one->value - by : 0;
    return 0;
}
