/* Hooks of executable graphs: a launch is one operation of the graph's own cost; a changed graph keeps it, but as one that is not proven. */
#include "cuda/memory/code.h"
#include "cuda/memory/graph_memory.h"
#include "cuda/work/work.h"

static uint64_t key_of(CUgraphExec graph)
{
    return vc_estimate_key(VC_WORK_GRAPH, (uintptr_t)graph, 0);
}

static CUresult changed(CUgraphExec graph, CUresult result)
{
    vc_estimate_unprove(vc_estimate_find(key_of(graph)));
    return result;
}

CUresult vc_hook_cuGraphLaunch(CUgraphExec graph, CUstream stream)
{
    struct vc_work work;
    if (vc_work_refusal() != CUDA_SUCCESS || vc_stream_pay(vc_work_stream(stream, false)) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!vc_work_begin(&work, vc_work_stream(stream, false), key_of(graph)))
        return vc_graph_memory_launch(graph, stream, vc_real.cuGraphLaunch);
    return vc_work_end(&work, vc_graph_memory_launch(graph, stream, vc_real.cuGraphLaunch));
}

CUresult vc_hook_cuGraphLaunch_ptsz(CUgraphExec graph, CUstream stream)
{
    struct vc_work work;
    if (vc_work_refusal() != CUDA_SUCCESS || vc_stream_pay(vc_work_stream(stream, true)) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!vc_work_begin(&work, vc_work_stream(stream, true), key_of(graph)))
        return vc_graph_memory_launch(graph, stream, vc_real.cuGraphLaunch_ptsz);
    return vc_work_end(&work, vc_graph_memory_launch(graph, stream, vc_real.cuGraphLaunch_ptsz));
}

#define VC__CHANGES(name, parameters, arguments)          \
    CUresult vc_hook_##name parameters                    \
    {                                                     \
        return changed(graph, vc_real.name arguments);    \
    }

/* … to something whose kernels are to be paid for first. */
#define VC__CHANGES_KERNELS(name, parameters, arguments, payment)  \
    CUresult vc_hook_##name parameters                              \
    {                                                               \
        CUresult refusal = payment;                                 \
        return refusal ? refusal : changed(graph, vc_real.name arguments); \
    }

/* The first version begins with the function, too, and knows no kernels. */
static CUresult pay_node_v1(const CUDA_KERNEL_NODE_PARAMS_v1 *node)
{
    return node ? vc_launch_pay(*(const CUfunction *)node, NULL) : CUDA_SUCCESS;
}

static CUresult pay_any_node(const struct CUgraphNodeParams_st *node)
{
    const struct {
        int type, reserved[3];
        CUDA_KERNEL_NODE_PARAMS kernel;
    } *parameters = (const void *)node;
    return node && parameters->type == CU_GRAPH_NODE_TYPE_KERNEL ? vc_node_pay(&parameters->kernel) : CUDA_SUCCESS;
}

/* A graph gets a kernel: paid for now, since nothing tells of the bodies of conditional nodes when the graph is made
 * executable. */
#define VC__TAKES_KERNELS(name, parameter_list, arguments, payment) \
    CUresult vc_hook_##name parameter_list                          \
    {                                                               \
        CUresult refusal = payment;                                 \
        return refusal ? refusal : vc_real.name arguments;          \
    }

VC__TAKES_KERNELS(cuGraphAddKernelNode,
                  (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                   const CUDA_KERNEL_NODE_PARAMS_v1 *parameters),
                  (node, graph, after, count, parameters), pay_node_v1(parameters))
VC__TAKES_KERNELS(cuGraphAddKernelNode_v2,
                  (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                   const CUDA_KERNEL_NODE_PARAMS *parameters),
                  (node, graph, after, count, parameters), vc_node_pay(parameters))
VC__TAKES_KERNELS(cuGraphAddNode,
                  (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count,
                   CUgraphNodeParams *parameters),
                  (node, graph, after, count, parameters), pay_any_node(parameters))
VC__TAKES_KERNELS(cuGraphAddNode_v2,
                  (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                   size_t count, CUgraphNodeParams *parameters),
                  (node, graph, after, edges, count, parameters), pay_any_node(parameters))
VC__TAKES_KERNELS(cuGraphAddNode_v3,
                  (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, const CUgraphEdgeData *edges,
                   size_t count, CUgraphNodeParams *parameters),
                  (node, graph, after, edges, count, parameters), pay_any_node(parameters))
VC__TAKES_KERNELS(cuGraphKernelNodeSetParams, (CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters),
                  (node, parameters), pay_node_v1(parameters))
VC__TAKES_KERNELS(cuGraphKernelNodeSetParams_v2, (CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *parameters),
                  (node, parameters), vc_node_pay(parameters))
VC__TAKES_KERNELS(cuGraphNodeSetParams, (CUgraphNode node, CUgraphNodeParams *parameters), (node, parameters),
                  pay_any_node(parameters))
VC__TAKES_KERNELS(cuGraphNodeSetParams_v2, (CUgraphNode node, CUgraphNodeParams *parameters), (node, parameters),
                  pay_any_node(parameters))

VC__CHANGES_KERNELS(cuGraphExecUpdate, (CUgraphExec graph, CUgraph source, CUgraphNode *error_node, int *update_result),
            (graph, source, error_node, update_result), vc_graph_pay(source))
VC__CHANGES_KERNELS(cuGraphExecUpdate_v2, (CUgraphExec graph, CUgraph source, CUgraphExecUpdateResultInfo *result_info),
            (graph, source, result_info), vc_graph_pay(source))
VC__CHANGES_KERNELS(cuGraphExecKernelNodeSetParams,
            (CUgraphExec graph, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS_v1 *parameters), (graph, node, parameters),
            pay_node_v1(parameters))
VC__CHANGES_KERNELS(cuGraphExecKernelNodeSetParams_v2,
            (CUgraphExec graph, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *parameters), (graph, node, parameters),
            vc_node_pay(parameters))
VC__CHANGES(cuGraphExecMemcpyNodeSetParams,
            (CUgraphExec graph, CUgraphNode node, const CUDA_MEMCPY3D *parameters, CUcontext context),
            (graph, node, parameters, context))
VC__CHANGES(cuGraphExecMemsetNodeSetParams,
            (CUgraphExec graph, CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *parameters, CUcontext context),
            (graph, node, parameters, context))
VC__CHANGES_KERNELS(cuGraphExecChildGraphNodeSetParams, (CUgraphExec graph, CUgraphNode node, CUgraph child), (graph, node, child),
                    vc_graph_pay(child))
VC__CHANGES_KERNELS(cuGraphExecNodeSetParams, (CUgraphExec graph, CUgraphNode node, CUgraphNodeParams *parameters),
            (graph, node, parameters), pay_any_node(parameters))
VC__CHANGES(cuGraphNodeSetEnabled, (CUgraphExec graph, CUgraphNode node, unsigned int enabled), (graph, node, enabled))

/* Its handle may come back as another's. */
CUresult vc_hook_cuGraphExecDestroy(CUgraphExec graph)
{
    CUresult result = vc_real.cuGraphExecDestroy(graph);
    vc_estimate_reset(vc_estimate_find(key_of(graph)));
    return result;
}
