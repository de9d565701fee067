/* User objects: what the application ties to the life of graphs. All with cu_lock held. */
#ifndef CU_USER_H
#define CU_USER_H

#include "cu_graph.h"

CUresult cu_user_keep_all(CUgraph from, CUgraph to);
void cu_user_drop_all(CUgraph graph);
void cu_node_free(CUgraphNode node);
CUresult cu_node_own_params(CUgraphNode node);
CUgraphNode cu_graph_find_clone(CUgraph graph, CUgraphNode original);

#endif
