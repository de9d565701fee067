/* Kernels, sets, copies and captures: the work itself, in kinds that a charge may miss. */
#pragma once
#include "place.h"

static void greedy(struct place *place, const char *name, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        launch(place, name, place->streams[0]);
}

static void steady(struct place *place) { greedy(place, "spin_1000us", 64); }
static void short_kernels(struct place *place) { greedy(place, "spin_10us", 64); }
static void long_kernels(struct place *place) { greedy(place, "spin_20ms", 4); }

static void short_rounds(struct place *place)
{
    greedy(place, "spin_10us", 64);
    CALL(cuStreamSynchronize, place->streams[0]);
}

/* What an eager framework does: the host is slower than the card, which rests between any two kernels. */
static void host_bound(struct place *place)
{
    for (unsigned i = 0; i < 64; i++) {
        greedy(place, "spin_10us", 1);
        work_us(70);
    }
    CALL(cuStreamSynchronize, place->streams[0]);
}

static void one_by_one(struct place *place)
{
    greedy(place, "spin_10us", 1);
    CALL(cuStreamSynchronize, place->streams[0]);
}

static void one_by_one_100us(struct place *place)
{
    greedy(place, "spin_100us", 1);
    CALL(cuStreamSynchronize, place->streams[0]);
}

/* A server that is asked for little: nothing is launched for so long that nobody looks any more. */
static void requests_far_apart(struct place *place)
{
    for (unsigned i = 0; i < 5; i++)
        launch(place, "spin_1000us", place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
    sleep_us(50000);
}

static void polled(struct place *place)
{
    static int (*query)();
    query = driver("cuStreamQuery");
    greedy(place, "spin_200us", 8);
    while (query(place->streams[0]) == 600)
        sleep_us(20);
}

static void sets(struct place *place)
{
    need_memory(place);
    for (unsigned i = 0; i < 64; i++)
        CALL(cuMemsetD8Async, place->memory, 0, (size_t)(MIB - 16), place->streams[0]);
    synchronize();
}

static void sets_2d(struct place *place)
{
    need_memory(place);
    for (unsigned i = 0; i < 64; i++)
        CALL(cuMemsetD2D32Async, place->memory, (size_t)4096, 0, (size_t)1024, (size_t)250, place->streams[0]);
    synchronize();
}

static void tiny_sets(struct place *place)
{
    need_memory(place);
    for (unsigned i = 0; i < 512; i++)
        CALL(cuMemsetD32Async, place->memory, 0, (size_t)64, place->streams[0]);
    synchronize();
}

static void copies(struct place *place)
{
    need_memory(place);
    for (unsigned i = 0; i < 64; i++)
        CALL(cuMemcpyDtoDAsync_v2, place->memory, place->other_memory, (size_t)(MIB - 16), place->streams[0]);
    synchronize();
}

static void tiny_copies(struct place *place)
{
    need_memory(place);
    for (unsigned i = 0; i < 512; i++)
        CALL(cuMemcpyDtoDAsync_v2, place->memory, place->other_memory, (size_t)4096, place->streams[0]);
    synchronize();
}

static void copies_unified(struct place *place)
{
    need_memory(place);
    for (unsigned i = 0; i < 256; i++)
        CALL(cuMemcpyAsync, place->memory, place->other_memory, (size_t)65536, place->streams[0]);
    synchronize();
}

static void copies_peer(struct place *place)
{
    need_memory(place);
    for (unsigned i = 0; i < 256; i++)
        CALL(cuMemcpyPeerAsync, place->memory, place->context, place->other_memory, place->context, (size_t)65536,
             place->streams[0]);
    synchronize();
}

static void copies_peer_3d(struct place *place)
{
    struct {
        size_t source_at[4];
        unsigned source_type;
        void *source_host;
        uint64_t source;
        void *source_array;
        handle source_context;
        size_t source_pitch, source_height, target_at[4];
        unsigned target_type;
        void *target_host;
        uint64_t target;
        void *target_array;
        handle target_context;
        size_t target_pitch, target_height, width, height, depth;
    } copy = {.source_type = 2, .source = 0, .source_pitch = 65536, .source_height = 4, .target_type = 2, .target_pitch = 65536,
              .target_height = 4, .width = 65536, .height = 4, .depth = 4};
    need_memory(place);
    copy.source = place->memory;
    copy.target = place->other_memory;
    copy.source_context = copy.target_context = place->context;
    for (unsigned i = 0; i < 64; i++)
        CALL(cuMemcpy3DPeerAsync, &copy, place->streams[0]);
    synchronize();
}

/* A function's handle may come back as another's: a short one for the first rounds, then a long one. */
static void modules_reloaded(struct place *place)
{
    static const char *const names[] = {"spin_20us", "spin_5ms"};
    static char image[256];
    handle module, function;
    const char *name = names[place->round % 2];
    sprintf(image, ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry %s() {ret;}\n", name);
    CALL(cuModuleLoadData, &module, image);
    CALL(cuModuleGetFunction, &function, module, name);
    for (unsigned i = 0; i < 12; i++)
        CALL(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, place->streams[0], NULL, NULL);
    synchronize();
    CALL(cuModuleUnload, module);
}

static void capture_on(handle stream)
{
    enum { RELAXED = 2 };
    CALL(cuStreamBeginCapture_v2, stream, RELAXED);
}

static void never_seen(struct place *place)
{
    launch_new(place, place->streams[0]);
    synchronize();
}

/* While or after a capture, with functions that are new each time. */
static void capture_destroyed(struct place *place)
{
    if (place->round == 0) {
        handle stream;
        CALL(cuStreamCreate, &stream, 1);
        capture_on(stream);
        CALL(cuStreamDestroy_v2, stream);
    }
    never_seen(place);
}

static void capture_context_destroyed(struct place *place)
{
    if (place->round == 0) {
        handle context, stream;
        CALL(cuCtxCreate_v2, &context, 0, 0);
        CALL(cuStreamCreate, &stream, 1);
        capture_on(stream);
        CALL(cuCtxDestroy_v2, context);
        CALL(cuCtxSetCurrent, place->context);
    }
    never_seen(place);
}

/* The context may not be waited for while a stream of it captures. */
static void capture_left_open(struct place *place)
{
    if (place->round == 0)
        capture_on(place->streams[1]);
    launch_new(place, place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
}

static void capture_to_graph(struct place *place)
{
    enum { RELAXED = 2 };
    if (place->round == 0) {
        CALL(cuGraphCreate, &place->graph, 0);
        CALL(cuStreamBeginCaptureToGraph, place->streams[1], place->graph, NULL, NULL, (size_t)0, RELAXED);
    }
    launch_new(place, place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
}
