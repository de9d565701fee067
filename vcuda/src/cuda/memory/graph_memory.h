/* Memory that graphs allocate by nodes of their own: charged by what the driver has reserved of each card for them. */
#ifndef VC_GRAPH_MEMORY_H
#define VC_GRAPH_MEMORY_H

#include "cuda/driver/hooks.h"

/* Launch or upload (`call`) an executable graph; CUDA_ERROR_OUT_OF_MEMORY, without calling, if the share has no room for
 * what it may allocate. Costs one load in a process whose graphs allocate nothing. */
CUresult vc_graph_memory_launch(CUgraphExec graph, CUstream stream, CUresult (*call)(CUgraphExec, CUstream));

/* Pay for the kernels of a graph (code.h), which an executable graph is about to be updated with. */
CUresult vc_graph_pay(CUgraph graph);

#endif
