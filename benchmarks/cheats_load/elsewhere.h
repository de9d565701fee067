/* Kernels between what takes time on a stream and none of the card's: copies over the bus, callbacks, waits for other streams. */
#pragma once
#include "costs.h"

static void *host_memory(void)
{
    static void *memory;
    if (!memory)
        CALL(cuMemAllocHost_v2, &memory, (size_t)MIB);
    return memory;
}

static void host_copies(struct place *place)
{
    need_memory(place);
    CALL(cuMemcpyHtoDAsync_v2, place->memory, host_memory(), (size_t)MIB, place->streams[0]);
    launch(place, "spin_100us", place->streams[0]);
    CALL(cuMemcpyDtoHAsync_v2, host_memory(), place->memory, (size_t)MIB, place->streams[0]);
}

/* A step of training: its batch comes in (0.2 ms), 40 kernels work on it, and the host prepares the next one. */
static void train(struct place *place, int waits_for_copy)
{
    need_memory(place);
    for (unsigned i = 0; i < 4; i++)
        if (waits_for_copy)
            CALL(cuMemcpyHtoD_v2, place->memory, host_memory(), (size_t)MIB);
        else
            CALL(cuMemcpyHtoDAsync_v2, place->memory, host_memory(), (size_t)MIB, place->streams[0]);
    for (unsigned i = 0; i < 40; i++)
        launch(place, "spin_200us", place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
    work_us(300);
}

static void training_steps(struct place *place)
{
    train(place, 0);
}

static void training_steps_that_wait(struct place *place)
{
    train(place, 1);
}

/* One stream copies while the other computes. */
static void host_copies_overlapped(struct place *place)
{
    need_memory(place);
    handle stream = place->streams[place->round % 2];
    CALL(cuMemcpyHtoDAsync_v2, place->memory, host_memory(), (size_t)MIB, stream);
    launch(place, "spin_100us", stream);
}

/* … and the kernels between last a thousand times as long from time to time. */
static void kernel_times_change_between_copies(struct place *place)
{
    pthread_t thread;
    if (place->round == 0)
        pthread_create(&thread, NULL, change_kernel_time, NULL);
    need_memory(place);
    for (unsigned i = 0; i < 8; i++) {
        CALL(cuMemcpyHtoDAsync_v2, place->memory, host_memory(), (size_t)MIB, place->streams[0]);
        greedy(place, "ragged", 1);
    }
    CALL(cuStreamSynchronize, place->streams[0]);
}

/* The same function is short behind one copy and long behind the next, each step is waited for. */
static void short_and_long_between_copies(struct place *place)
{
    static handle shorter, longer;
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_10us");
        longer = launched_by_argument(place, "spin_1900us");
    }
    need_memory(place);
    CALL(cuMemcpyHtoDAsync_v2, place->memory, host_memory(), (size_t)MIB, place->streams[0]);
    launch_by_argument_on(place, shorter, place->streams[0]);
    CALL(cuMemcpyHtoDAsync_v2, place->memory, host_memory(), (size_t)MIB, place->streams[0]);
    launch_by_argument_on(place, longer, place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
}

static void naps(void *us)
{
    sleep_us((unsigned)(uintptr_t)us);
}

static void callbacks_between(struct place *place)
{
    launch(place, "spin_1000us", place->streams[0]);
    CALL(cuLaunchHostFunc, place->streams[0], naps, (void *)1000);
}

static void behind_callbacks_of_another_stream(struct place *place)
{
    static __thread handle event;
    if (!event)
        CALL(cuEventCreate, &event, 2);
    CALL(cuLaunchHostFunc, place->streams[1], naps, (void *)700);
    CALL(cuEventRecord, event, place->streams[1]);
    CALL(cuStreamWaitEvent, place->streams[0], event, 0);
    launch(place, "spin_300us", place->streams[0]);
}

static void call_back_before_legacy(struct place *place, unsigned us)
{
    static __thread handle blocking;
    if (!blocking)
        CALL(cuStreamCreate, &blocking, 0);
    CALL(cuLaunchHostFunc, blocking, naps, (void *)(uintptr_t)us);
    launch(place, "spin_10us", NULL);
    CALL(cuStreamSynchronize, NULL);
}

/* The legacy stream waits for what blocking streams have to do before. */
static void callbacks_before_legacy(struct place *place) { call_back_before_legacy(place, 1000); }
static void long_callbacks_before_legacy(struct place *place) { call_back_before_legacy(place, 10000); }

/* … as a thread's own stream is. */
static void callbacks_of_a_thread_before_legacy(struct place *place)
{
    CALL(cuLaunchHostFunc_ptsz, NULL, naps, (void *)(uintptr_t)1000);
    launch(place, "spin_10us", NULL);
    CALL(cuStreamSynchronize, NULL);
}

/* Stages of a pipeline, each behind a host function of its own: the streams are ready at any time, and beside each other now and then. */
static void callbacks_in_turn(struct place *place)
{
    handle stream = place->streams[place->round % 7];
    CALL(cuLaunchHostFunc, stream, naps, (void *)(uintptr_t)(2500 + place->round * 1733 % 5000));
    for (unsigned i = 0; i < 8; i++)
        launch(place, "spin_50us", stream);
    sleep_us(500);
}

/* Proven short, then long behind a callback during which nothing of them can be seen. */
static void long_behind_a_callback(struct place *place)
{
    write_kernel_time(20000);
    sleep_us(12000); /* the simulated card looks at the file every 10 ms */
    for (unsigned i = 0; i < 12; i++) {
        greedy(place, "ragged", 1);
        CALL(cuStreamSynchronize, place->streams[0]);
    }
    CALL(cuLaunchHostFunc, place->streams[0], naps, (void *)40000);
    write_kernel_time(1000000);
    sleep_us(12000);
    greedy(place, "ragged", 30);
    CALL(cuStreamSynchronize, place->streams[0]);
}
