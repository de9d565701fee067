/* Long work that is launched as if it were short, where nobody measures it or where it runs on into others' leases. */
#pragma once
#include "elsewhere.h"
#include "processes.h"
#include "streams.h"

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

/* Beside others it was charged half of what it took, and these the rest. */
static void long_behind_a_waited_short_one(struct place *place)
{
    static handle shorter, longer;
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_10us");
        longer = launched_by_argument(place, "spin_1900us");
    }
    launch_by_argument(place, shorter);
    CALL(cuStreamSynchronize, place->streams[0]);
    sleep_us(900);
    launch_by_argument(place, longer);
    sleep_us(900);
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

/* It behaves for as long as everything is marked, and ends before its own samples are sure. */
static void behave_then_hide(struct place *place)
{
    handle shortest = launched_by_argument(place, "spin_10us");
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint64_t until_ns = now_ns() + 260000000; now_ns() < until_ns; sleep_us(3000))
        prove_short(place, shortest, 1);
    for_so_long(place, 140000000);
}

/* Four at a time, one after another. */
static void long_behind_a_short_one_by_the_young(struct place *place)
{
    static pid_t pids[4];
    for (unsigned i = 0; i < 4; i++) {
        if (pids[i] && waitpid(pids[i], NULL, WNOHANG) != pids[i])
            continue;
        pids[i] = child(behave_then_hide, 0);
        sleep_us(place->round == 0 ? 20000 : 0);
    }
    sleep_us(1000);
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

/* Between captures in quick succession nobody is sure to ask. */
static void long_behind_a_short_one_beside_captures(struct place *place)
{
    static pthread_t thread;
    if (place->round == 0)
        pthread_create(&thread, NULL, toggle_capture, place->streams[1]);
    long_behind_a_short_one(place);
}

/* What began behind a callback was charged its estimate, and nothing found that it was longer. */
static void long_behind_callbacks_in_turn(struct place *place)
{
    static handle shorter, longer;
    handle stream = place->streams[place->round % 4];
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_1us");
        longer = launched_by_argument(place, "spin_50us");
    }
    CALL(cuLaunchHostFunc, stream, naps, (void *)3000);
    for (unsigned i = 0; i < 16; i++)
        launch_by_argument_on(place, i < 8 ? shorter : longer, stream);
}
