/* Graph memory nodes.
 *
 * The driver takes memory for a graph's allocation nodes when the graph is uploaded or launched, shares it between graphs
 * that do not need it at the same time, and keeps it for the device until cuDeviceGraphMemTrim. So each device has a meter, and a
 * launch goes through those of all devices on which the graph allocates. Other graphs do not come here. */
#include "cuda/memory/graph_memory.h"

#include <stdlib.h>
#include <string.h>

#include "base/table.h"
#include "cuda/memory/code.h"
#include "cuda/memory/meter.h"
#include "cuda/memory/refusal.h"

#define VC__MAX_DEVICES 64

struct device_meter {
    struct vc_meter meter; /* first: what reads and trims it is given the meter */
    CUdevice device;
    uint64_t launched; /* bytes of all graphs that were ever launched: no more than that is in use */
};

static bool read_device(struct vc_meter *meter, struct vc_reading *reading);
static void trim_device(struct vc_meter *meter);

#define VC__NEW_METERS \
    {[0 ... VC__MAX_DEVICES - 1] = {.meter = {.mutex = PTHREAD_MUTEX_INITIALIZER, .read = read_device, .trim = trim_device}}}
static struct device_meter meters[VC__MAX_DEVICES] = VC__NEW_METERS;
static uint32_t any; /* some graph allocates */

static void forget(void)
{
    static const struct device_meter fresh[VC__MAX_DEVICES] = VC__NEW_METERS;
    memcpy(meters, fresh, sizeof meters);
    any = 0;
}
VC_AT_FORK(forget);

/* An executable graph that allocates. */
struct graph {
    uint64_t key; /* its handle */
    bool launched;
    uint32_t parts;
    struct {
        struct device_meter *on;
        uint64_t bytes;
    } part[VC_MAX_PROCESS_CARDS];
};
VC_TABLE(graphs, struct graph);

static uint64_t figure(CUdevice device, int attribute)
{
    uint64_t bytes = 0;
    if (vc_real.cuDeviceGetGraphMemAttribute)
        vc_real.cuDeviceGetGraphMemAttribute(device, attribute, &bytes);
    return bytes;
}

static bool read_device(struct vc_meter *meter, struct vc_reading *reading)
{
    CUdevice device = ((struct device_meter *)meter)->device;
    reading->reserved = figure(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
    reading->used = figure(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT);
    return true;
}

static void trim_device(struct vc_meter *meter)
{
    if (vc_real.cuDeviceGraphMemTrim)
        vc_real.cuDeviceGraphMemTrim(((struct device_meter *)meter)->device);
}

static void make_room(uint32_t card)
{
    if (!vc_load_relaxed(&any))
        return;
    for (CUdevice device = 0; device < VC__MAX_DEVICES; device++) {
        if (meters[device].meter.cards >> card & 1)
            vc_meter_trim(&meters[device].meter);
    }
}

static void context_ended(CUcontext context)
{
    (void)context;
    for (CUdevice device = 0; vc_load_relaxed(&any) && device < VC__MAX_DEVICES; device++) {
        if (meters[device].meter.cards)
            vc_meter_settle(&meters[device].meter, NULL);
    }
}

static const struct vc_source graph_memory = {.make_room = make_room, .context_ended = context_ended};
VC_SOURCE(graph_memory);

/* Begin on every device of the graph, or on none. Its own last launch may still be in the driver's figure of what is in use: what the
 * other graphs can use at most is a better bound then. */
static bool begin(const struct graph *graph, struct vc_metered *calls)
{
    for (uint32_t part = 0; part < graph->parts; part++) {
        struct device_meter *on = graph->part[part].on;
        uint64_t others = vc_load(&on->launched) - (graph->launched ? graph->part[part].bytes : 0);
        if (vc_meter_begin(&calls[part], &on->meter, graph->part[part].bytes, others))
            continue;
        while (part-- > 0)
            vc_meter_end(&calls[part]);
        return false;
    }
    return true;
}

static enum vc_table_edit note_launch(void *record, void *argument)
{
    struct graph *graph = record;
    (void)argument;
    for (uint32_t part = 0; !graph->launched && part < graph->parts; part++)
        vc_add(&graph->part[part].on->launched, graph->part[part].bytes);
    graph->launched = true;
    return VC_TABLE_KEEP;
}

CUresult vc_graph_memory_launch(CUgraphExec exec, CUstream stream, CUresult (*call)(CUgraphExec, CUstream))
{
    struct graph graph;
    struct vc_metered calls[VC_MAX_PROCESS_CARDS];
    if (VC_LIKELY(!vc_load_relaxed(&any)) || !vc_table_get(&graphs, (uint64_t)(uintptr_t)exec, &graph))
        return call(exec, stream);
    if (!begin(&graph, calls))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = call(exec, stream);
    if (result == CUDA_SUCCESS && !graph.launched)
        vc_table_edit(&graphs, graph.key, false, note_launch, NULL);
    for (uint32_t part = 0; part < graph.parts; part++) {
        if (!vc_meter_end(&calls[part])) /* it is in use already: nothing else shall be given out beside it */
            vc_meter_settle(calls[part].meter, NULL);
    }
    return result;
}

/* What a node allocates, on the device where it says, or, if that is no device, on each of the share. */
static void add_bytes(struct graph *graph, const CUmemLocation *location, uint64_t bytes)
{
    for (CUdevice device = 0; device < VC__MAX_DEVICES; device++) {
        if (location->type == CU_MEM_LOCATION_TYPE_DEVICE && device != location->id)
            continue;
        int card = vc_card_of_device(device);
        if (card < 0)
            continue;
        uint32_t part = 0;
        while (part < graph->parts && graph->part[part].on != &meters[device])
            part++;
        if (part == VC_MAX_PROCESS_CARDS)
            return;
        if (part == graph->parts) {
            meters[device].device = device;
            vc_store_release(&meters[device].meter.cards, 1u << card);
            graph->part[graph->parts++].on = &meters[device];
        }
        graph->part[part].bytes += vc_round_up(bytes, VC_CHUNK);
    }
}

/* Add up the allocation nodes of a graph and of its child graphs, and pay for its kernels, also those that a function which is not
 * hooked put there. Conditional nodes do not tell their bodies: those kernels were paid for when they were added. */
static CUresult add_nodes(CUgraph of, struct graph *graph)
{
    size_t count = 0;
    CUresult paid = CUDA_SUCCESS;
    if (vc_real.cuGraphGetNodes(of, NULL, &count) != CUDA_SUCCESS || count == 0)
        return paid;
    CUgraphNode *nodes = malloc(count * sizeof *nodes);
    if (nodes && vc_real.cuGraphGetNodes(of, nodes, &count) == CUDA_SUCCESS) {
        for (size_t index = 0; index < count && paid == CUDA_SUCCESS; index++) {
            union {
                CUDA_MEM_ALLOC_NODE_PARAMS allocation;
                CUDA_KERNEL_NODE_PARAMS kernel;
                unsigned char room[512]; /* of a later version */
            } parameters;
            CUgraph child;
            int type;
            if (vc_real.cuGraphNodeGetType(nodes[index], &type) != CUDA_SUCCESS)
                continue;
            if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
                vc_real.cuGraphMemAllocNodeGetParams(nodes[index], &parameters.allocation) == CUDA_SUCCESS)
                add_bytes(graph, &parameters.allocation.poolProps.location, parameters.allocation.bytesize);
            else if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
                     vc_real.cuGraphChildGraphNodeGetGraph(nodes[index], &child) == CUDA_SUCCESS)
                paid = add_nodes(child, graph);
            else if (type == CU_GRAPH_NODE_TYPE_KERNEL && vc_real.cuGraphKernelNodeGetParams_v2 &&
                     vc_real.cuGraphKernelNodeGetParams_v2(nodes[index], &parameters.kernel) == CUDA_SUCCESS)
                paid = vc_node_pay(&parameters.kernel);
        }
    }
    free(nodes);
    return paid;
}

CUresult vc_graph_pay(CUgraph graph)
{
    struct graph unused = {0};
    return vc_real.cuGraphGetNodes ? add_nodes(graph, &unused) : CUDA_SUCCESS;
}

/* A destroyed one's handle may come back. */
static void forget_graph(uint64_t key)
{
    struct graph old;
    if (!vc_load_relaxed(&any) || !vc_table_take(&graphs, key, &old))
        return;
    for (uint32_t part = 0; old.launched && part < old.parts; part++)
        vc_sub(&old.part[part].on->launched, old.part[part].bytes);
}

/* Charge what an upload that went with it took. False: over the limit. */
static bool hold_upload(const struct graph *graph)
{
    bool fits = true;
    for (uint32_t part = 0; part < graph->parts; part++) {
        struct vc_metered call;
        struct vc_meter *meter = &graph->part[part].on->meter;
        fits = vc_meter_begin(&call, meter, 0, UINT64_MAX) && vc_meter_end(&call) && fits;
    }
    return fits;
}

/* The graph was made executable: remember what it allocates. */
static CUresult end_instantiate(CUresult result, CUgraphExec *exec, CUgraph of)
{
    if (result != CUDA_SUCCESS || !vc_real.cuGraphMemAllocNodeGetParams || !vc_real.cuGraphGetNodes)
        return result;
    struct graph graph = {.key = (uint64_t)(uintptr_t)*exec};
    forget_graph(graph.key);
    CUresult paid = add_nodes(of, &graph);
    if (paid == CUDA_SUCCESS && graph.parts == 0)
        return result;
    vc_store_release(&any, graph.parts > 0 || vc_load_relaxed(&any));
    if (paid == CUDA_SUCCESS && hold_upload(&graph) && vc_table_put(&graphs, &graph))
        return result;
    vc_real.cuGraphExecDestroy(*exec);
    *exec = NULL;
    for (uint32_t part = 0; part < graph.parts; part++) {
        vc_meter_trim(&graph.part[part].on->meter);
        vc_refused(graph.part[part].on->meter.cards, 0);
    }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

#define VC__INSTANTIATE(name, parameters, arguments)                         \
    CUresult vc_hook_##name parameters                                       \
    {                                                                        \
        return end_instantiate(vc_real.name arguments, exec, graph);         \
    }

VC__INSTANTIATE(cuGraphInstantiate, (CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes),
                (exec, graph, error_node, log, log_bytes))
VC__INSTANTIATE(cuGraphInstantiate_v2, (CUgraphExec *exec, CUgraph graph, CUgraphNode *error_node, char *log, size_t log_bytes),
                (exec, graph, error_node, log, log_bytes))
VC__INSTANTIATE(cuGraphInstantiateWithFlags, (CUgraphExec *exec, CUgraph graph, unsigned long long flags),
                (exec, graph, flags))
VC__INSTANTIATE(cuGraphInstantiateWithParams, (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters),
                (exec, graph, parameters))
VC__INSTANTIATE(cuGraphInstantiateWithParams_ptsz,
                (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *parameters), (exec, graph, parameters))

CUresult vc_hook_cuGraphUpload(CUgraphExec graph, CUstream stream)
{
    return vc_graph_memory_launch(graph, stream, vc_real.cuGraphUpload);
}

CUresult vc_hook_cuGraphUpload_ptsz(CUgraphExec graph, CUstream stream)
{
    return vc_graph_memory_launch(graph, stream, vc_real.cuGraphUpload_ptsz);
}

CUresult vc_hook_cuDeviceGraphMemTrim(CUdevice device)
{
    CUresult result = vc_real.cuDeviceGraphMemTrim(device);
    if (result == CUDA_SUCCESS && device >= 0 && device < VC__MAX_DEVICES && meters[device].meter.cards)
        vc_meter_settle(&meters[device].meter, NULL);
    return result;
}
