/* Graphs: nodes with their work and dependencies; executable copies of them. */
#ifndef CU_GRAPH_H
#define CU_GRAPH_H

#include "cu_client.h"

struct CUgraphNode_st {
    int magic;
    CUgraph graph;
    cu_work work;
    CUgraph child; /* CU_GRAPH_NODE_TYPE_GRAPH: our own copy */
    CUgraph *bodies; /* CU_GRAPH_NODE_TYPE_CONDITIONAL: work.conditional.size of them */
    CUcontext ctx;
    struct CUgraphNode_st **from; /* dependencies */
    size_t from_count;
    struct CUgraphNode_st *original; /* in a clone: the node it was made from */
    int enabled; /* in an executable graph */
    void **params; /* kernel: our copy of the argument pointers, owned values behind them */
    CUlaunchAttributeValue attributes[16];
};

typedef struct cu_user_reference {
    CUuserObject object;
    unsigned count;
    struct cu_user_reference *next;
} cu_user_reference;

struct CUgraph_st {
    int magic;
    struct CUgraphNode_st **nodes; /* in order of creation, which every edge of a capture follows */
    size_t count, room;
    cu_user_reference *users;
    int owned; /* a node's, child or body: not the caller's to destroy */
};

/* All with cu_lock held unless noted. */
CUgraph cu_graph_new(void);
void cu_graph_free_all(CUgraph graph);
/* Takes over `work`; copies dependencies. */
CUresult cu_graph_add(CUgraph graph, CUcontext ctx, const cu_work *work, CUgraphNode const *from, size_t from_count,
                      CUgraphNode *node);
CUresult cu_graph_copy(CUgraph graph, CUgraph *copy);
/* Nodes so that each comes after all it depends on; 0, or -1 for a cycle. `order` has graph->count places. */
int cu_graph_order(CUgraph graph, CUgraphNode *order);
CUresult cu_graph_of(CUgraph graph);
CUresult cu_node_of(CUgraphNode node);
CUresult cu_node_set_from(CUgraphNode node, CUgraphNode const *from, size_t count);

/* Conditions (cu_conditional.c). The bodies of a new conditional node. */
CUresult cu_conditional_prepare(CUgraphNode node);
/* A launch of the graph begins: conditions with a default get it. */
void cu_conditional_begin(CUgraph graph);
/* Which body runs next, or -1: none. `last` is the value at the body that ran before; -1: none has. */
int cu_conditional_body(const struct CUgraphNode_st *node, int64_t *last);
/* What a kernel of a body may do. 0, or -1: there is no such condition. */
int cu_conditional_count_down(uint64_t handle, uint64_t by);

#endif
