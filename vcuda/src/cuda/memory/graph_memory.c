/* Graph memory nodes.
 *
 * The driver takes memory for a graph's allocation nodes when the graph is uploaded or launched, shares it between graphs
 * that do not need it at the same time, and keeps it for the device until cuDeviceGraphMemTrim. So a launch reserves what
 * the graph may need beyond what is reserved and idle, and is charged afterwards what the driver says it has reserved.
 * The mutex is held across the launch of a graph with allocations: between two such launches the figures would say
 * nothing. Other graphs do not come here. */
#include "cuda/memory/graph_memory.h"

#include <stdlib.h>

#include "cuda/memory/charge.h"
#include "cuda/memory/pool.h"

#define VC__MAX_DEVICES 64
#define VC__GROWTH_UNIT ((uint64_t)32 << 20) /* the largest step by which a driver is known to grow */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* Executable graph → bytes that its nodes allocate; `owner` is the device, `kind` 1 after its first launch. */
static struct vc_ledger graphs = VC_LEDGER_INITIALIZER;
static uint64_t devices;                   /* bit set of those on which some graph allocates */
static uint64_t charged[VC__MAX_DEVICES];  /* committed in the quota */
static uint64_t launched[VC__MAX_DEVICES]; /* bytes of all graphs that were ever launched: no more than that is in use */

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    vc_ledger_reset(&graphs);
    devices = 0;
    for (int device = 0; device < VC__MAX_DEVICES; device++)
        charged[device] = launched[device] = 0;
}

static void lock(void)
{
    static uint32_t watching;
    vc_region_get(); /* a forked child forgets first */
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    pthread_mutex_lock(&mutex);
}

static uint64_t figure(CUdevice device, int attribute)
{
    uint64_t bytes = 0;
    if (vc_real.cuDeviceGetGraphMemAttribute)
        vc_real.cuDeviceGetGraphMemAttribute(device, attribute, &bytes);
    return bytes;
}

/* Pre: locked. Bring the charge to what the driver holds, of which `held` bytes are reserved in the quota. False: it grew
 * beyond the limit; `held` stays reserved and the charge as it was. */
static bool true_up(struct vc_region *region, CUdevice device, uint64_t held)
{
    int card = vc_card_of_device(region, device);
    if (card < 0)
        return true;
    uint64_t now = figure(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), was = charged[device];
    uint64_t growth = now > was ? now - was : 0;
    if (growth > held && !vc_quota_reserve(region, (uint32_t)card, growth - held))
        return false;
    if (growth < held)
        vc_quota_rollback(region, (uint32_t)card, held - growth);
    if (growth > 0)
        vc_quota_commit(region, (uint32_t)card, growth, VC_QUOTA_PLAIN);
    else if (now < was)
        vc_quota_release(region, (uint32_t)card, was - now, VC_QUOTA_PLAIN);
    charged[device] = now;
    return true;
}

/* Pre: locked. Returns whether the quota became larger. */
static bool trim(struct vc_region *region, CUdevice device)
{
    uint64_t was = charged[device];
    if (!vc_real.cuDeviceGraphMemTrim || vc_real.cuDeviceGraphMemTrim(device) != CUDA_SUCCESS)
        return false;
    true_up(region, device, 0);
    return charged[device] < was;
}

bool vc_graph_memory_make_room(uint32_t card)
{
    struct vc_region *region = vc_region_get();
    bool more = false;
    /* Held: a launch is under way, perhaps this thread's own, which trims by itself. */
    if (!vc_load_relaxed(&devices) || pthread_mutex_trylock(&mutex) != 0)
        return false;
    for (CUdevice device = 0; device < VC__MAX_DEVICES; device++) {
        if ((devices >> device & 1) && vc_card_of_device(region, device) == (int)card)
            more |= trim(region, device);
    }
    pthread_mutex_unlock(&mutex);
    return more;
}

/* Pre: locked. Reserve what the graph may make the driver take beyond what it has; *held is that. Its own last launch may
 * still be in the driver's figure of what is in use: what the other graphs can use at most is a better bound then. */
static bool reserve(struct vc_region *region, const struct vc_entry *entry, uint64_t *held)
{
    CUdevice device = (CUdevice)entry->owner;
    uint64_t used = figure(device, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT);
    uint64_t others = launched[device] - (entry->kind ? entry->bytes : 0);
    uint64_t need = (used < others ? used : others) + entry->bytes;
    uint64_t have = figure(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
    *held = need > have ? vc_round_up(need - have, VC__GROWTH_UNIT) : 0;
    return *held == 0 || vc_quota_reserve(region, (uint32_t)entry->card, *held);
}

/* Pre: locked; not while room is made. */
static bool reserve_or_make_room(struct vc_region *region, const struct vc_entry *entry, uint64_t *held)
{
    uint32_t card = (uint32_t)entry->card;
    if (reserve(region, entry, held))
        return true;
    pthread_mutex_unlock(&mutex);
    bool more = vc_pools_make_room(card);
    lock();
    if (more && reserve(region, entry, held))
        return true;
    vc_quota_refused(region, card);
    return false;
}

/* Pre: locked. Charge what the driver took although it is over the limit: it is in use already, and nothing else shall be
 * given out beside it. */
static void charge_anyway(struct vc_region *region, CUdevice device, int card)
{
    uint64_t now = figure(device, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
    if (now > charged[device])
        vc_quota_charge(region, (uint32_t)card, now - charged[device], VC_QUOTA_PLAIN);
    charged[device] = now;
}

/* Pre: locked. */
static CUresult launch(struct vc_entry *entry, CUgraphExec graph, CUstream stream, CUresult (*call)(CUgraphExec, CUstream))
{
    struct vc_region *region = vc_region_get();
    CUdevice device = (CUdevice)entry->owner;
    uint64_t held;
    if (!reserve_or_make_room(region, entry, &held))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = call(graph, stream);
    if (!true_up(region, device, held)) {
        vc_quota_rollback(region, (uint32_t)entry->card, held);
        charge_anyway(region, device, entry->card);
    }
    if (result == CUDA_SUCCESS && !entry->kind) {
        entry->kind = 1;
        launched[device] += entry->bytes;
        vc_ledger_put(&graphs, entry); /* replaces itself */
    }
    return result;
}

CUresult vc_graph_memory_launch(CUgraphExec graph, CUstream stream, CUresult (*call)(CUgraphExec, CUstream))
{
    struct vc_entry entry;
    if (VC_LIKELY(!vc_load_relaxed(&devices)))
        return call(graph, stream);
    lock();
    if (!vc_ledger_get(&graphs, (uint64_t)(uintptr_t)graph, &entry)) {
        pthread_mutex_unlock(&mutex);
        return call(graph, stream);
    }
    CUresult result = launch(&entry, graph, stream, call);
    pthread_mutex_unlock(&mutex);
    return result;
}

/* Add up the allocation nodes of a graph and of the graphs in it. All on one device: of several, the first one's counts. */
static void add_nodes(CUgraph graph, struct vc_entry *sum)
{
    size_t count = 0;
    if (vc_real.cuGraphGetNodes(graph, NULL, &count) != CUDA_SUCCESS || count == 0)
        return;
    CUgraphNode *nodes = malloc(count * sizeof *nodes);
    if (nodes && vc_real.cuGraphGetNodes(graph, nodes, &count) == CUDA_SUCCESS) {
        for (size_t index = 0; index < count; index++) {
            union {
                CUDA_MEM_ALLOC_NODE_PARAMS allocation;
                unsigned char room[512]; /* of a later version */
            } parameters;
            CUgraph child;
            int type;
            if (vc_real.cuGraphNodeGetType(nodes[index], &type) != CUDA_SUCCESS)
                continue;
            if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC &&
                vc_real.cuGraphMemAllocNodeGetParams(nodes[index], &parameters.allocation) == CUDA_SUCCESS) {
                if (sum->bytes == 0)
                    sum->owner = (uint64_t)parameters.allocation.poolProps.location.id;
                sum->bytes += vc_round_up(parameters.allocation.bytesize, VC_CHUNK);
            } else if (type == CU_GRAPH_NODE_TYPE_GRAPH &&
                       vc_real.cuGraphChildGraphNodeGetGraph(nodes[index], &child) == CUDA_SUCCESS) {
                add_nodes(child, sum);
            }
        }
    }
    free(nodes);
}

/* The graph was made executable: remember what it allocates. An upload that went with it is charged, or undone. */
static CUresult end_instantiate(CUresult result, CUgraphExec *exec, CUgraph graph)
{
    if (result != CUDA_SUCCESS || !vc_real.cuGraphMemAllocNodeGetParams || !vc_real.cuGraphGetNodes)
        return result;
    struct vc_entry old, entry = {.key = (uint64_t)(uintptr_t)*exec};
    add_nodes(graph, &entry);
    if (entry.bytes == 0 && !vc_load_relaxed(&devices))
        return result;
    struct vc_region *region = vc_region_get();
    CUdevice device = (CUdevice)entry.owner;
    lock();
    vc_ledger_take(&graphs, entry.key, &old); /* a destroyed one's handle, come back */
    entry.card = vc_card_of_device(region, device);
    bool held = true;
    if (entry.bytes > 0 && entry.card >= 0 && device < VC__MAX_DEVICES) {
        vc_store_relaxed(&devices, devices | (uint64_t)1 << device);
        held = true_up(region, device, 0) && vc_ledger_put(&graphs, &entry);
    }
    if (!held) {
        vc_real.cuGraphExecDestroy(*exec);
        *exec = NULL;
        if (!trim(region, device))
            charge_anyway(region, device, entry.card);
        vc_quota_refused(region, (uint32_t)entry.card);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&mutex);
    return result;
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
    if (result == CUDA_SUCCESS && device >= 0 && device < VC__MAX_DEVICES && (vc_load_relaxed(&devices) >> device & 1)) {
        lock();
        true_up(vc_region_get(), device, 0);
        pthread_mutex_unlock(&mutex);
    }
    return result;
}
