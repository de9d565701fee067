/* Many streams, contexts and threads, and captures beside their work. */
#pragma once
#include "work.h"

static void work_on_new_streams(struct place *place)
{
    handle streams[8];
    for (unsigned i = 0; i < 8; i++) {
        CALL(cuStreamCreate, &streams[i], 1);
        launch(place, "spin_1000us", streams[i]);
    }
    for (unsigned i = 0; i < 8; i++)
        CALL(cuStreamDestroy_v2, streams[i]);
}

static void new_streams(struct place *place)
{
    work_on_new_streams(place);
    synchronize();
}

static void new_streams_hardly_waited(struct place *place)
{
    work_on_new_streams(place);
    if (place->round % 4 == 3)
        synchronize();
}

/* Destroyed with work on them: what a stream had to do it does all the same. Waited for now and then, or without a limit the queue would have no end. */
static void destroyed_at_work(struct place *place)
{
    handle stream;
    CALL(cuStreamCreate, &stream, 1);
    for (unsigned i = 0; i < 4; i++)
        launch(place, "spin_300us", stream);
    CALL(cuStreamDestroy_v2, stream);
    if (place->round % 64 == 63)
        synchronize();
}

static void *destroy_what_is_handed_over(void *handed)
{
    CALL(cuCtxSetCurrent, NULL);
    for (;;) {
        handle stream = atomic_exchange((_Atomic(handle) *)handed, NULL);
        if (stream)
            CALL(cuStreamDestroy_v2, stream);
        else
            sleep_us(20);
    }
    return handed;
}

/* … by another thread than the one that launched there. */
static void destroyed_by_another(struct place *place)
{
    static _Atomic(handle) handed;
    static pthread_t thread;
    handle stream;
    if (place->round == 0)
        pthread_create(&thread, NULL, destroy_what_is_handed_over, (void *)&handed);
    CALL(cuStreamCreate, &stream, 1);
    for (unsigned i = 0; i < 4; i++)
        launch(place, "spin_300us", stream);
    while (atomic_load(&handed))
        sleep_us(20);
    atomic_store(&handed, stream);
    if (place->round % 64 == 63)
        synchronize();
}

static void new_contexts(struct place *place)
{
    struct place other = {0};
    open_context(&other);
    CALL(cuStreamCreate, &other.streams[0], 1);
    for (unsigned i = 0; i < 8; i++)
        launch(&other, "spin_1000us", other.streams[0]);
    synchronize();
    CALL(cuCtxDestroy_v2, other.context);
    CALL(cuCtxSetCurrent, place->context);
}

static void streams_in_turn(struct place *place)
{
    for (unsigned i = 0; i < 64; i++)
        launch(place, "spin_300us", place->streams[i % MOST_STREAMS]);
}

/* More than anybody keeps apart, with work that lasts from 50 us to 1 ms. */
static void many_streams_in_turn(struct place *place)
{
    static handle streams[160];
    static const char *const kernels[] = {"spin_50us", "spin_300us", "spin_1000us"};
    if (place->round == 0)
        for (unsigned i = 0; i < 160; i++)
            CALL(cuStreamCreate, &streams[i], 1);
    for (unsigned i = 0; i < 160; i++)
        launch(place, kernels[i % 3], streams[i]);
}

/* Waits for nothing: bursts of less than 1 ms, and sleeps between. */
static void bursts_in_turn(struct place *place)
{
    for (unsigned i = 0; i < 16; i++)
        launch(place, "spin_50us", place->streams[place->round % 4]);
    sleep_us(600);
}

static void threads_round(struct place *place)
{
    for (unsigned i = 0; i < 8; i++)
        launch(place, "spin_100us", place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
}

/* A server that never waits within the driver: bursts, an event that is polled, a pause. */
static void polled_by_threads(struct place *place)
{
    static __thread handle event;
    if (!event)
        CALL(cuEventCreate, &event, 2);
    for (unsigned i = 0; i < 4; i++)
        launch(place, "spin_100us", place->streams[0]);
    CALL(cuEventRecord, event, place->streams[0]);
    while (driver("cuEventQuery")(event))
        sleep_us(50);
    sleep_us(1000 + place->round * 791 % 2000);
}

/* One works; the others' contexts have nothing on the card, but it turns to each of them for the record of an event. */
static void events_in_idle_contexts(struct place *place)
{
    static _Atomic(unsigned) threads;
    static __thread unsigned number;
    static __thread handle event;
    if (!number && (number = ++threads) > 1) {
        open_context(place);
        CALL(cuStreamCreate, &place->streams[0], 1);
        CALL(cuEventCreate, &event, 2);
    }
    if (number == 1) {
        steady(place);
        return;
    }
    CALL(cuEventRecord, event, place->streams[0]);
    CALL(cuEventSynchronize, event);
}

static void priorities(struct place *place)
{
    handle stream;
    CALL(cuStreamCreateWithPriority, &stream, 1, -5);
    for (unsigned i = 0; i < 16; i++)
        launch(place, "spin_500us", i % 2 ? stream : place->streams[0]);
    CALL(cuStreamSynchronize, stream);
    CALL(cuStreamDestroy_v2, stream);
}

static void legacy_stream(struct place *place)
{
    for (unsigned i = 0; i < 8; i++)
        launch(place, "spin_300us", NULL);
    synchronize();
}

static void per_thread_stream(struct place *place)
{
    for (unsigned i = 0; i < 8; i++)
        CALL(cuLaunchKernel_ptsz, function_of(place, "spin_300us"), 1, 1, 1, 32, 1, 1, 0, NULL, NULL, NULL);
    synchronize();
}

/* A stream carries its context: that one need not be current. */
static void no_current(struct place *place)
{
    handle function = function_of(place, "spin_20ms");
    CALL(cuCtxSetCurrent, NULL);
    for (unsigned i = 0; i < 16; i++)
        CALL(cuLaunchKernel, function, 1, 1, 1, 32, 1, 1, 0, place->streams[0], NULL, NULL);
    CALL(cuCtxSetCurrent, place->context);
}

static void foreign_stream(struct place *place)
{
    static struct place other;
    if (!other.context) {
        open_context(&other);
        CALL(cuStreamCreate, &other.streams[0], 1);
        other.graph = function_of(&other, "spin_20ms");
        CALL(cuCtxSetCurrent, place->context);
    }
    CALL(cuLaunchKernel, other.graph, 1, 1, 1, 32, 1, 1, 0, other.streams[0], NULL, NULL);
}

static void *toggle_capture(void *stream)
{
    CALL(cuCtxSetCurrent, NULL);
    for (;;) {
        handle graph = NULL;
        if (driver("cuStreamBeginCapture_v2")(stream, 2))
            continue;
        driver("cuStreamEndCapture")(stream, &graph);
        if (graph)
            CALL(cuGraphDestroy, graph);
    }
    return stream;
}

/* Another thread begins and ends captures on the stream all the time. */
static void capture_toggled(struct place *place)
{
    static pthread_t thread;
    if (place->round == 0)
        pthread_create(&thread, NULL, toggle_capture, place->streams[1]);
    driver("cuLaunchKernel")(function_of(place, "spin_20ms"), 1, 1, 1, 32, 1, 1, 0, place->streams[1], NULL, NULL);
}

/* What was launched without a mark is asked about while the stream joins another one's capture, which must not be lost by that. */
static void capture_joined(struct place *place)
{
    static pthread_t thread;
    static handle event;
    handle graph = NULL;
    if (place->round == 0) {
        CALL(cuEventCreate, &event, 2);
        pthread_create(&thread, NULL, toggle_capture, place->streams[3]);
    }
    launch(place, "spin_300us", place->streams[1]);
    sleep_us(3000 + (unsigned)(place->round % 64) * 10);
    CALL(cuStreamBeginCapture_v2, place->streams[2], 2);
    CALL(cuEventRecord, event, place->streams[2]);
    CALL(cuStreamWaitEvent, place->streams[1], event, 0);
    for (unsigned i = 0; i < 4; i++)
        launch(place, "spin_10us", place->streams[1]);
    CALL(cuEventRecord, event, place->streams[1]);
    CALL(cuStreamWaitEvent, place->streams[2], event, 0);
    CALL(cuStreamEndCapture, place->streams[2], &graph);
    CALL(cuGraphDestroy, graph);
}
