/* Steps: streams, events, work in them, captures, and graphs with memory in them. */
#include <string.h>

#include "model.h"

static void stream(struct dice *dice)
{
    struct stream *one = &world.streams[roll(dice, STREAMS)];
    if (!one->held) {
        const unsigned flags = roll(dice, 3);
        const int result = cuStreamCreate(&one->handle, flags);
        say(" cuStreamCreate %u = %d", flags, result);
        *one = (struct stream){one->handle, world.current, !result, false, false};
        return;
    }
    if (roll(dice, 4))
        return;
    const int result = cuStreamDestroy_v2(one->handle);
    say(" cuStreamDestroy%s = %d", one->capturing ? " that captures" : "", result);
    if (!result)
        *one = (struct stream){0};
}

static void event(struct dice *dice)
{
    struct event *one = &world.events[roll(dice, EVENTS)];
    CUstream in = some_stream(dice, NULL);
    if (!one->held) {
        const int result = cuEventCreate(&one->handle, 2);
        say(" cuEventCreate = %d", result);
        *one = (struct event){one->handle, world.current, !result};
        return;
    }
    switch (roll(dice, 4)) {
    case 0:
        say(" cuEventSynchronize = %d", cuEventSynchronize(one->handle));
        break;
    case 1:
        say(" cuEventDestroy = %d", cuEventDestroy_v2(one->handle));
        *one = (struct event){0};
        break;
    default:
        say(" cuEventRecord = %d", cuEventRecord(one->handle, in));
    }
}

static void look_at_captures(void)
{
    for (int i = 0; i < STREAMS; i++) {
        int status = 0;
        if (world.streams[i].held)
            world.streams[i].capturing = !cuStreamIsCapturing(world.streams[i].handle, &status) && status != 0;
        world.streams[i].spoiled &= world.streams[i].capturing;
    }
}

/* Waiting for an event of a capture takes a stream into it. */
static void joined(struct dice *dice)
{
    const struct event *one = &world.events[roll(dice, EVENTS)];
    CUstream in = some_stream(dice, NULL);
    if (!one->held)
        return;
    say(" cuStreamWaitEvent = %d", cuStreamWaitEvent(in, one->handle, 0));
    look_at_captures();
}

static void synchronised(struct dice *dice)
{
    if (roll(dice, 2)) {
        say(" cuCtxSynchronize = %d", cuCtxSynchronize());
        return;
    }
    CUstream in = some_stream(dice, NULL);
    say(" cuStreamSynchronize = %d", cuStreamSynchronize(in));
}

static void set(struct dice *dice)
{
    const struct pointer *one = &world.pointers[roll(dice, POINTERS)];
    CUstream in = some_stream(dice, NULL);
    if (!one->kind || one->kind == CAPTURED || !one->bytes)
        return;
    const size_t bytes = one->bytes < 4096 ? one->bytes : 4096;
    say(" cuMemsetD8Async %zu = %d", bytes, cuMemsetD8Async(one->at, 1, bytes, in));
}

static void nothing(void *data)
{
    (void)data;
}

static void called(struct dice *dice)
{
    CUstream in = some_stream(dice, NULL);
    say(" cuLaunchHostFunc = %d", cuLaunchHostFunc(in, nothing, NULL));
}

static void captured(struct dice *dice)
{
    struct stream *one = &world.streams[roll(dice, STREAMS)];
    struct graph *into = &world.graphs[roll(dice, GRAPHS)];
    const int mode = roll(dice, 3) ? CU_STREAM_CAPTURE_MODE_RELAXED : (int)roll(dice, 4);
    if (!one->held)
        return;
    if (into->held && !into->spoiled && !roll(dice, 3))
        say(" cuStreamBeginCaptureToGraph %d = %d", mode,
            cuStreamBeginCaptureToGraph(one->handle, into->graph, NULL, NULL, 0, mode));
    else
        say(" cuStreamBeginCapture %d = %d", mode, cuStreamBeginCapture_v2(one->handle, mode));
    look_at_captures();
}

/* The graph takes a free place, or is thrown away. */
static void capture_ended(struct dice *dice)
{
    const unsigned first = roll(dice, STREAMS), place = roll(dice, GRAPHS);
    CUgraph made = NULL;
    bool spoiled = false;
    for (unsigned i = 0; i < STREAMS; i++) {
        struct stream *one = &world.streams[(first + i) % STREAMS];
        if (!one->held || !one->capturing)
            continue;
        const int result = cuStreamEndCapture(one->handle, &made);
        say(" cuStreamEndCapture = %d", result);
        spoiled = one->spoiled;
        break;
    }
    look_at_captures();
    for (int i = 0; made && i < GRAPHS; i++)
        if (world.graphs[i].graph == made) { /* it was captured into a graph that we have */
            world.graphs[i].spoiled |= spoiled;
            return;
        }
    if (made && !world.graphs[place].held)
        world.graphs[place] = (struct graph){.graph = made, .held = true, .spoiled = spoiled};
    else if (made)
        say(", cuGraphDestroy = %d", cuGraphDestroy(made));
}

static void end_streams(void)
{
    for (int i = 0; i < EVENTS; i++)
        if (world.events[i].held)
            say(" %d", cuEventDestroy_v2(world.events[i].handle));
    for (int i = 0; i < STREAMS; i++)
        if (world.streams[i].held)
            say(" %d", cuStreamDestroy_v2(world.streams[i].handle));
    memset(world.events, 0, sizeof world.events);
    memset(world.streams, 0, sizeof world.streams);
}

const struct kind work_kinds[] = {
    {"stream", 8, true, stream, NULL},      {"event", 6, true, event, NULL},        {"joined", 3, true, joined, NULL},
    {"synchronised", 6, true, synchronised, NULL}, {"set", 6, true, set, NULL},     {"called", 1, true, called, NULL},
    {"captured", 6, true, captured, NULL},  {"capture_ended", 4, false, capture_ended, end_streams}, {0},
};

/* ---- graphs ---- */

static void remember(struct graph *one, CUdeviceptr at)
{
    for (int i = 0; i < TAKEN; i++)
        if (!one->taken[i]) {
            one->taken[i] = at;
            return;
        }
}

static void graph(struct dice *dice)
{
    struct graph *one = &world.graphs[roll(dice, GRAPHS)];
    if (one->held) {
        if (roll(dice, 3))
            return;
        const int result = cuGraphDestroy(one->graph);
        say(" cuGraphDestroy = %d", result);
        if (!result)
            *one = (struct graph){0};
        return;
    }
    const struct graph *from = &world.graphs[roll(dice, GRAPHS)];
    const bool clone = from->held && !from->spoiled && !roll(dice, 4);
    CUgraph made = NULL;
    const int result = clone ? cuGraphClone(&made, from->graph) : cuGraphCreate(&made, 0);
    say(" %s = %d", clone ? "cuGraphClone" : "cuGraphCreate", result);
    if (!result)
        *one = (struct graph){.graph = made, .held = true};
}

static void add_memory(struct dice *dice, struct graph *one, const CUgraphNode *from, size_t count)
{
    CUDA_MEM_ALLOC_NODE_PARAMS memory = {.poolProps = {.allocType = 1, .location = {.type = 1}}, .bytesize = roll_bytes(dice)};
    memory.poolProps.location.id = (int)roll(dice, (unsigned)world.devices);
    CUgraphNode made = NULL;
    const int result = cuGraphAddMemAllocNode(&made, one->graph, from, count, &memory);
    say(" cuGraphAddMemAllocNode %zu on %d = %d", memory.bytesize, memory.poolProps.location.id, result);
    if (result)
        return;
    one->last = made;
    if (roll(dice, 3)) {
        const int freed = cuGraphAddMemFreeNode(&made, one->graph, &one->last, 1, memory.dptr);
        say(", cuGraphAddMemFreeNode = %d", freed);
        if (!freed)
            one->last = made;
    } else {
        remember(one, memory.dptr);
    }
}

static void add_kernel(struct dice *dice, struct graph *one, const CUgraphNode *from, size_t count)
{
    const struct code *code = &world.modules[roll(dice, MODULES)];
    CUdeviceptr at = 0;
    unsigned number = 0;
    void *parameters[] = {&at, &number};
    if (!code->held || !code->function)
        return;
    const model_kernel_params kernel = {.func = code->function, .gridDimX = 1, .gridDimY = 1, .gridDimZ = 1, .blockDimX = 32,
                                        .blockDimY = 1, .blockDimZ = 1, .kernelParams = parameters};
    CUgraphNode made = NULL;
    const int result = cuGraphAddKernelNode_v2(&made, one->graph, from, count, &kernel);
    say(" cuGraphAddKernelNode = %d", result);
    one->last = result ? one->last : made;
}

static void node(struct dice *dice)
{
    struct graph *one = &world.graphs[roll(dice, GRAPHS)];
    const struct graph *child = &world.graphs[roll(dice, GRAPHS)];
    size_t nodes = 0;
    CUgraphNode made = NULL;
    if (!one->held || one->spoiled || cuGraphGetNodes(one->graph, NULL, &nodes) || nodes > 20)
        return;
    const CUgraphNode last = one->last;
    const size_t count = last != NULL && roll(dice, 2);
    switch (roll(dice, 8)) {
    case 0:
        say(" cuGraphAddEmptyNode = %d", cuGraphAddEmptyNode(&made, one->graph, &last, count));
        break;
    case 1:
    case 2:
        add_kernel(dice, one, &last, count);
        break;
    case 3:
        if (child->held && !child->spoiled && child != one && !cuGraphGetNodes(child->graph, NULL, &nodes) && nodes < 8)
            say(" cuGraphAddChildGraphNode = %d", cuGraphAddChildGraphNode(&made, one->graph, &last, count, child->graph));
        break;
    default:
        add_memory(dice, one, &last, count);
    }
}

static void exec(struct dice *dice)
{
    struct graph *one = &world.execs[roll(dice, EXECS)];
    const struct graph *from = &world.graphs[roll(dice, GRAPHS)];
    if (one->held) {
        if (roll(dice, 3))
            return;
        const int result = cuGraphExecDestroy(one->exec);
        say(" cuGraphExecDestroy = %d", result);
        if (!result)
            *one = (struct graph){0};
        return;
    }
    if (!from->held || from->spoiled)
        return;
    const unsigned flags = roll(dice, 3) ? 0 : 1; /* 1: frees at the next launch */
    const int result = cuGraphInstantiateWithFlags(&one->exec, from->graph, flags);
    say(" cuGraphInstantiate %u = %d", flags, result);
    if (result)
        return;
    one->held = true;
    memcpy(one->taken, from->taken, sizeof one->taken);
}

static void graph_launched(struct dice *dice)
{
    const struct graph *one = &world.execs[roll(dice, EXECS)];
    CUstream in = some_stream(dice, NULL);
    if (!one->held || one->spoiled)
        return;
    if (!roll(dice, 6))
        say(" cuGraphUpload = %d", cuGraphUpload(one->exec, in));
    else
        say(" cuGraphLaunch = %d", cuGraphLaunch(one->exec, in));
}

static void graph_updated(struct dice *dice)
{
    struct graph *one = &world.execs[roll(dice, EXECS)];
    const struct graph *from = &world.graphs[roll(dice, GRAPHS)];
    model_update_result info = {0};
    if (!one->held || one->spoiled || !from->held || from->spoiled)
        return;
    const int result = cuGraphExecUpdate_v2(one->exec, from->graph, &info);
    say(" cuGraphExecUpdate = %d %d", result, info.result);
}

/* What a launch left allocated is freed outside of the graph. */
static void graph_freed(struct dice *dice)
{
    const struct graph *one = &world.execs[roll(dice, EXECS)];
    const CUdeviceptr at = one->taken[roll(dice, TAKEN)];
    CUstream in = some_stream(dice, NULL);
    if (!one->held || !at)
        return;
    const bool ordered = roll(dice, 3);
    say(" %s of a graph's = %d", ordered ? "cuMemFreeAsync" : "cuMemFree", ordered ? cuMemFreeAsync(at, in) : cuMemFree_v2(at));
}

static void graph_memory(struct dice *dice)
{
    const int device = (int)roll(dice, (unsigned)world.devices);
    if (roll(dice, 2)) {
        say(" cuDeviceGraphMemTrim %d = %d", device, cuDeviceGraphMemTrim(device));
        return;
    }
    for (int number = 0; number < 4; number++) {
        uint64_t value = 0;
        const int result = cuDeviceGetGraphMemAttribute(device, number, &value);
        say(" %d = %d", number, result); /* how much is in use depends on when a stream came to its end */
    }
}

static void end_graphs(void)
{
    for (int i = 0; i < EXECS; i++)
        if (world.execs[i].held)
            say(" %d", cuGraphExecDestroy(world.execs[i].exec));
    for (int i = 0; i < GRAPHS; i++)
        if (world.graphs[i].held)
            say(" %d", cuGraphDestroy(world.graphs[i].graph));
    memset(world.execs, 0, sizeof world.execs);
    memset(world.graphs, 0, sizeof world.graphs);
    for (int device = 0; device < world.devices; device++)
        say(" %d", cuDeviceGraphMemTrim(device));
}

const struct kind graph_kinds[] = {
    {"graph", 6, false, graph, end_graphs},    {"node", 14, true, node, NULL},
    {"exec", 9, true, exec, NULL},             {"graph_launched", 14, true, graph_launched, NULL},
    {"graph_updated", 3, true, graph_updated, NULL}, {"graph_freed", 6, true, graph_freed, NULL},
    {"graph_memory", 4, false, graph_memory, NULL},  {0},
};
