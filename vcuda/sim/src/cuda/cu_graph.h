/* Graphs: nodes with their work and dependencies; executable copies of them. */
#ifndef CU_GRAPH_H
#define CU_GRAPH_H

#include "cu_client.h"

struct CUgraphNode_st {
    int magic;
    CUgraph graph;
    cu_work work;
    CUgraph child; /* CU_GRAPH_NODE_TYPE_GRAPH: our own copy */
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
    int owned; /* a child graph's copy: not the caller's to destroy */
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

#endif
