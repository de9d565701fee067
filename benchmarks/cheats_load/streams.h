/* Streams, contexts and threads without end. */
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

static void threads_round(struct place *place)
{
    for (unsigned i = 0; i < 8; i++)
        launch(place, "spin_100us", place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
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
