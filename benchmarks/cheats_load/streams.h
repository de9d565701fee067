/* Streams, contexts and threads without end. */
#pragma once
#include "costs.h"
#include "processes.h"

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

/* A server that is asked for little: nothing is launched for so long that nobody looks any more. */
static void requests_far_apart(struct place *place)
{
    for (unsigned i = 0; i < 5; i++)
        launch(place, "spin_1000us", place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
    sleep_us(50000);
}

/* The first of each burst is the one that is measured; what the others take is told by their argument. */
static void long_behind_a_short_one(struct place *place)
{
    static handle shorter, longer;
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_10us");
        longer = launched_by_argument(place, "spin_50us");
    }
    for (unsigned i = 0; i < 12; i++)
        launch_by_argument(place, i == 0 ? shorter : longer);
    sleep_us(700);
}

/* Plain ones before: so many launches may be on their way to the card as long as the hidden ones take. */
static void long_behind_many_launches(struct place *place)
{
    static handle shorter, longer;
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_1us");
        longer = launched_by_argument(place, "spin_50us");
    }
    launch_by_argument(place, shorter);
    for (unsigned i = 0; i < 200; i++)
        launch(place, "spin_1us", place->streams[0]);
    for (unsigned i = 0; i < 20; i++)
        launch_by_argument(place, longer);
    sleep_us(1500);
}

/* … after 0.4 s in which each launch waits behind a callback on the legacy stream, as if it were that long on its way. */
static void long_behind_slow_launches(struct place *place)
{
    static handle shorter, longer, blocking;
    static uint64_t began_ns;
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_1us");
        longer = launched_by_argument(place, "spin_100us");
        CALL(cuStreamCreate, &blocking, 0);
        began_ns = now_ns();
    }
    if (now_ns() < began_ns + 400000000) {
        CALL(cuLaunchHostFunc, NULL, naps, (void *)(uintptr_t)(place->round % 2 ? 5000 : 28));
        launch_by_argument_on(place, shorter, blocking);
        while (driver("cuStreamQuery")(blocking))
            sleep_us(100);
        return;
    }
    launch_by_argument(place, shorter);
    for (unsigned i = 0; i < 40; i++)
        launch(place, "spin_1us", place->streams[0]);
    for (unsigned i = 0; i < 8; i++)
        launch_by_argument(place, longer);
    sleep_us(1200);
}

/* What unloads any module makes the lanes anew. */
static void long_behind_a_short_one_and_unloads(struct place *place)
{
    static uint64_t unloaded_ns;
    long_behind_a_short_one(place);
    if (now_ns() < unloaded_ns + 30000000)
        return;
    unloaded_ns = now_ns();
    CALL(cuModuleUnload, load_module());
}

static void for_so_long(struct place *place, uint64_t ns)
{
    for (uint64_t until_ns = now_ns() + ns; now_ns() < until_ns;)
        long_behind_a_short_one(place);
}

static void for_80_ms(struct place *place) { for_so_long(place, 80000000); }
static void for_400_ms(struct place *place) { for_so_long(place, 400000000); }

/* Two at a time, each of which ends before anybody knows it. */
static void long_behind_a_short_one_by_children(struct place *place)
{
    (void)place;
    pid_t longer = child(for_400_ms, 0);
    for (unsigned i = 0; i < 5; i++)
        waitpid(child(for_80_ms, 0), NULL, 0);
    waitpid(longer, NULL, 0);
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

static void priorities(struct place *place)
{
    handle stream;
    CALL(cuStreamCreateWithPriority, &stream, 1, -5);
    for (unsigned i = 0; i < 16; i++)
        launch(place, "spin_500us", i % 2 ? stream : place->streams[0]);
    CALL(cuStreamSynchronize, stream);
    CALL(cuStreamDestroy_v2, stream);
}

/* Function and size are the same, what it takes is told by its argument, and nobody waits: so the longest of them run on into a neighbour's lease. */
static void long_among_priorities(struct place *place)
{
    static handle shorter, longer, first;
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_10us");
        longer = launched_by_argument(place, "spin_1000us");
        CALL(cuStreamCreateWithPriority, &first, 1, -5);
    }
    launch_by_argument_on(place, shorter, place->streams[0]);
    for (unsigned i = 0; i < 8; i++) {
        if (i == 4)
            launch_by_argument_on(place, longer, place->streams[0]);
        launch_by_argument_on(place, shorter, first);
    }
    sleep_us(400);
}

/* … of 40 launch sizes, each proven short, and another one each time: who had to wait for a lease has one of its own for longer than 4 ms, so what it launches from then on runs on into another's. */
static void many_sizes_long(struct place *place, unsigned most, unsigned every)
{
    enum { SIZES = 40, PROVEN = 10 };
    static handle kernels[2];
    static uint64_t leased_ns;
    static unsigned launched, leases, longs, times[2];
    if (!kernels[0]) {
        kernels[0] = launched_by_argument(place, "spin_500us");
        kernels[1] = launched_by_argument(place, "spin_1900us");
    }
    uint64_t begun = now_ns();
    unsigned is_long = launched++ > SIZES * PROVEN && leases % every == 0 && longs < most && begun > leased_ns + 4000000, size = times[is_long]++ % SIZES;
    void *arguments[] = {&kernels[is_long]};
    CALL(cuLaunchKernel, function_of(place, "sim_launch"), 1u << size % 10, 1, 1, 32u << size / 10, 1, 1, 0, place->streams[0], arguments, NULL);
    longs += is_long;
    if (now_ns() > begun + 3500000) {
        leased_ns = now_ns();
        leases++;
        longs = 0;
    }
}

static void one_of_many_sizes_long(struct place *place) { many_sizes_long(place, UINT32_MAX, 1); }

/* … and that hardly ever. */
static void one_of_many_sizes_seldom_long(struct place *place) { many_sizes_long(place, 2, 3); }

static void long_among_short_ones_on_own(struct place *place)
{
    static handle kernels[2];
    if (!kernels[0]) {
        kernels[0] = launched_by_argument(place, "spin_10us");
        kernels[1] = launched_by_argument(place, "spin_1000us");
    }
    for (unsigned i = 0; i < 10; i++) {
        void *arguments[] = {&kernels[i % 5 == 4]};
        CALL(cuLaunchKernel_ptsz, function_of(place, "sim_launch"), 1, 1, 1, 32, 1, 1, 0, NULL, arguments, NULL);
    }
    sleep_us(500);
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

/* Between captures in quick succession nobody is sure to ask. */
static void long_behind_a_short_one_beside_captures(struct place *place)
{
    static pthread_t thread;
    if (place->round == 0)
        pthread_create(&thread, NULL, toggle_capture, place->streams[1]);
    long_behind_a_short_one(place);
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
