/* Graphs, and other ways to launch than one kernel in one stream. */
#pragma once
#include "work.h"

static handle make_graph(struct place *place, const char *name, unsigned count)
{
    handle graph;
    capture_on(place->streams[0]);
    for (unsigned i = 0; i < count; i++)
        launch(place, name, place->streams[0]);
    CALL(cuStreamEndCapture, place->streams[0], &graph);
    return graph;
}

static void graphs(struct place *place)
{
    if (!place->executable) {
        place->graph = make_graph(place, "spin_200us", 5);
        CALL(cuGraphInstantiateWithFlags, &place->executable, place->graph, 0ull);
    }
    for (unsigned i = 0; i < 8; i++)
        CALL(cuGraphLaunch, place->executable, place->streams[0]);
}

static void launch_updated(struct place *place, handle graph)
{
    struct {
        int result;
        handle error_node, error_from;
    } info;
    if (!place->executable)
        CALL(cuGraphInstantiateWithFlags, &place->executable, graph, 0ull);
    CALL(cuGraphExecUpdate_v2, place->executable, graph, &info);
    CALL(cuGraphLaunch, place->executable, place->streams[0]);
}

static void graphs_updated(struct place *place)
{
    if (!place->graph)
        place->graph = make_graph(place, "spin_200us", 10);
    launch_updated(place, place->graph);
}

/* Proven short, and long at random: an update alone can tell. */
static void graphs_updated_long(struct place *place)
{
    static handle shorter, longer;
    if (!shorter) {
        shorter = make_graph(place, "spin_10us", 2);
        longer = make_graph(place, "spin_20ms", 2);
    }
    launch_updated(place, rand() % 8 ? shorter : longer);
}

static void graphs_made_anew(struct place *place)
{
    handle executable, graph = make_graph(place, "spin_200us", 10);
    CALL(cuGraphInstantiateWithFlags, &executable, graph, 0ull);
    CALL(cuGraphLaunch, executable, place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
    CALL(cuGraphExecDestroy, executable);
    CALL(cuGraphDestroy, graph);
}

static void child_graphs(struct place *place)
{
    if (!place->executable) {
        handle node, child = make_graph(place, "spin_200us", 5), parent;
        CALL(cuGraphCreate, &parent, 0);
        for (unsigned i = 0; i < 4; i++)
            CALL(cuGraphAddChildGraphNode, &node, parent, NULL, (size_t)0, child);
        CALL(cuGraphInstantiateWithFlags, &place->executable, parent, 0ull);
    }
    CALL(cuGraphLaunch, place->executable, place->streams[0]);
}

/* Sets and copies as nodes: one launch, much work. */
static void graph_of_sets(struct place *place)
{
    need_memory(place);
    if (!place->executable) {
        capture_on(place->streams[0]);
        for (unsigned i = 0; i < 200; i++)
            CALL(cuMemsetD8Async, place->memory, 0, (size_t)MIB, place->streams[0]);
        CALL(cuStreamEndCapture, place->streams[0], &place->graph);
        CALL(cuGraphInstantiateWithFlags, &place->executable, place->graph, 0ull);
    }
    CALL(cuGraphLaunch, place->executable, place->streams[0]);
    synchronize();
}

/* --- other ways to launch --- */

static void cooperative(struct place *place)
{
    for (unsigned i = 0; i < 16; i++)
        CALL(cuLaunchCooperativeKernel, function_of(place, "spin_300us"), 1, 1, 1, 32, 1, 1, 0, place->streams[0], NULL);
}

struct launch_config {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared_bytes;
    handle stream, attributes;
    unsigned attribute_count;
};

struct launch_attribute {
    int id;
    char pad[4];
    unsigned value[16];
};

static void launch_with(struct place *place, struct launch_attribute *attribute)
{
    struct launch_config config = {1, 1, 1, 32, 1, 1, 0, place->streams[0], attribute, 1};
    for (unsigned i = 0; i < 16; i++)
        CALL(cuLaunchKernelEx, &config, function_of(place, "spin_300us"), NULL, NULL);
}

static void cluster_launches(struct place *place)
{
    enum { CLUSTER_DIMENSION = 4 };
    struct launch_attribute attribute = {CLUSTER_DIMENSION, {0}, {1, 1, 1}};
    launch_with(place, &attribute);
}

static void dependent_launches(struct place *place)
{
    enum { PROGRAMMATIC_STREAM_SERIALIZATION = 6 };
    struct launch_attribute attribute = {PROGRAMMATIC_STREAM_SERIALIZATION, {0}, {1}};
    launch_with(place, &attribute);
}

static void nothing(void *unused)
{
    (void)unused;
}

static void host_callbacks(struct place *place)
{
    for (unsigned i = 0; i < 8; i++) {
        launch(place, "spin_300us", place->streams[0]);
        CALL(cuLaunchHostFunc, place->streams[0], nothing, NULL);
    }
    CALL(cuStreamSynchronize, place->streams[0]);
}

static void event_storm(struct place *place)
{
    static __thread handle event;
    if (!event)
        CALL(cuEventCreate, &event, 0);
    for (unsigned i = 0; i < 64; i++) {
        launch(place, "spin_50us", place->streams[0]);
        for (unsigned k = 0; k < 8; k++)
            CALL(cuEventRecord, event, place->streams[0]);
    }
    CALL(cuEventSynchronize, event);
}
