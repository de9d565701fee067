/* Executable graphs. */
#ifndef CU_EXEC_H
#define CU_EXEC_H

#include "cu_graph.h"

struct CUgraphExec_st {
    int magic;
    cuuint64_t flags;
    CUgraph graph;      /* our own copy; its nodes name their originals */
    CUgraphNode *order; /* topological */
};

uint64_t cu_exec_kernels_ns(CUgraphExec exec);
CUresult cu_exec_of(CUgraphExec exec);
/* The exec's node made from `node`; CUDA_ERROR_INVALID_VALUE if there is none of that kind. */
CUresult cu_exec_node(CUgraphExec exec, CUgraphNode node, int kind, CUgraphNode *found);
/* Replace a node's work by other work of the same kind. */
CUresult cu_node_set_work(CUgraphNode node, const cu_work *work);

#endif
