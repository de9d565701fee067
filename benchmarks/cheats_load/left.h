/* Kernels that nobody waits for, left where it is hard to ask whether they are done. */
#pragma once
#include "costs.h"
#include "processes.h"

/* A kernel that was proven short is long for once, and left alone there. */
static void leave_long(struct place *place, void (*leave)(struct place *))
{
    if (place->round == 0) {
        write_kernel_time(20000);
        sleep_us(8000); /* until the card has read it */
        for (unsigned i = 0; i < 20; i++) {
            launch(place, "ragged", place->streams[0]);
            synchronize();
        }
    }
    write_kernel_time(100000000);
    sleep_us(12000); /* the simulated card looks at the file every 10 ms */
    leave(place);
    write_kernel_time(20000);
    sleep_us(8000); /* until the card has read it */
    sleep_us(100000);
}

static void leave_on_own(struct place *place)
{
    CALL(cuLaunchKernel_ptsz, function_of(place, "ragged"), 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
}

/* On a thread's own stream, which nobody else can ask. */
static void left_on_own(struct place *place)
{
    leave_long(place, leave_on_own);
}

static void *launch_and_end(void *place)
{
    CALL(cuCtxSetCurrent, ((struct place *)place)->context);
    leave_on_own(place);
    return place;
}

static void leave_by_thread(struct place *place)
{
    pthread_t thread;
    pthread_create(&thread, NULL, launch_and_end, place);
    pthread_join(thread, NULL);
}

/* On the stream of a thread that ends. */
static void left_by_threads(struct place *place)
{
    leave_long(place, leave_by_thread);
}

static void leave_on_destroyed(struct place *place)
{
    handle stream;
    CALL(cuStreamCreate, &stream, 1);
    launch(place, "ragged", stream);
    CALL(cuStreamDestroy_v2, stream);
}

/* On a stream that is destroyed at once. */
static void left_on_destroyed(struct place *place)
{
    leave_long(place, leave_on_destroyed);
}

static void *destroy_streams(void *context)
{
    CALL(cuCtxSetCurrent, context);
    for (;;) {
        handle stream;
        CALL(cuStreamCreate, &stream, 1);
        sleep_us(300);
        CALL(cuStreamDestroy_v2, stream);
        sleep_us(200);
    }
    return context;
}

static void leave(struct place *place)
{
    launch(place, "ragged", place->streams[1]);
}

/* While another thread destroys streams all the time. */
static void left_among_destroyed(struct place *place)
{
    pthread_t thread;
    if (place->round == 0)
        pthread_create(&thread, NULL, destroy_streams, place->context);
    leave_long(place, leave);
}

/* While a capture is open on another stream. */
static void left_while_capturing(struct place *place)
{
    if (place->round == 0)
        CALL(cuStreamBeginCapture_v2, place->streams[2], 2);
    leave_long(place, leave);
}

static void leave_and_capture(struct place *place)
{
    handle graph = NULL;
    if (place->round)
        CALL(cuStreamEndCapture, place->streams[2], &graph);
    if (graph)
        CALL(cuGraphDestroy, graph);
    leave(place);
    CALL(cuStreamBeginCapture_v2, place->streams[2], 2);
}

/* Before one begins. */
static void left_before_capture(struct place *place)
{
    leave_long(place, leave_and_capture);
}

static struct place *working;

static void leave_and_work_elsewhere(struct place *place)
{
    launch(place, "ragged", place->streams[0]);
    CALL(cuCtxSetCurrent, working->context);
    for (uint64_t until = now_ns() + 100000000; now_ns() < until;) {
        launch(working, "spin_10us", working->streams[1]);
        CALL(cuStreamSynchronize, working->streams[1]);
    }
    CALL(cuCtxSetCurrent, place->context);
}

/* In a context while the process works, and waits, in another. */
static void left_in_another_context(struct place *place)
{
    static struct place other;
    working = place;
    if (!other.context) {
        open_context(&other);
        CALL(cuStreamCreate, &other.streams[0], 1);
    }
    other.round = place->round;
    leave_long(&other, leave_and_work_elsewhere);
}

static void leave_on_own_and_end(struct place *place)
{
    leave_long(place, leave_on_own);
    _exit(0);
}

/* Each process once, on its thread's own stream. */
static void ended_with_own(struct place *place)
{
    (void)place;
    waitpid(child(leave_on_own_and_end, 0), NULL, 0);
}

static void leave_on_legacy(struct place *place)
{
    handle capturing;
    CALL(cuStreamCreate, &capturing, 1);
    launch(place, "ragged", NULL);
    CALL(cuStreamBeginCapture_v2, capturing, 2);
}

static void leave_on_legacy_and_end(struct place *place)
{
    leave_long(place, leave_on_legacy);
    _exit(0);
}

/* … on the legacy stream, and nobody can be asked from then on. */
static void ended_with_capture(struct place *place)
{
    (void)place;
    waitpid(child(leave_on_legacy_and_end, 0), NULL, 0);
}
