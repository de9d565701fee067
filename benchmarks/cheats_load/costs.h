/* Work whose cost is not what it was, or not what it was measured at. */
#pragma once
#include "work.h"

static void write_kernel_time(unsigned long long ns)
{
    char temporary[560];
    snprintf(temporary, sizeof temporary, "%s.%d", kernels_file, (int)getpid());
    FILE *file = fopen(temporary, "w");
    if (!file)
        return;
    fprintf(file, "ragged %llu 0\ngrid 0 20000\n", ns);
    fclose(file);
    rename(temporary, kernels_file);
}

static void *change_kernel_time(void *unused)
{
    for (unsigned turn = 0;; turn++) {
        write_kernel_time(turn % 2 ? 20000000 : 20000);
        sleep_us(50000);
    }
    return unused;
}

static void kernel_times_change(struct place *place)
{
    pthread_t thread;
    if (place->round == 0)
        pthread_create(&thread, NULL, change_kernel_time, NULL);
    greedy(place, "ragged", 8);
    CALL(cuStreamSynchronize, place->streams[0]);
}

static void kernel_times_change_unwaited(struct place *place)
{
    pthread_t thread;
    if (place->round == 0)
        pthread_create(&thread, NULL, change_kernel_time, NULL);
    greedy(place, "ragged", 8);
}

/* Proven short, then long once: nothing is launched behind it, and nobody waits for it before it is done. */
static void long_and_left_alone(struct place *place)
{
    write_kernel_time(20000);
    sleep_us(12000); /* the simulated card looks at the file every 10 ms */
    for (unsigned i = 0; i < 12; i++) {
        greedy(place, "ragged", 1);
        CALL(cuStreamSynchronize, place->streams[0]);
    }
    write_kernel_time(300000000);
    sleep_us(12000);
    greedy(place, "ragged", 1);
    sleep_us(300000);
}

static void huge_after_tiny(struct place *place)
{
    if (place->round == 0)
        write_kernel_time(20000);
    for (unsigned i = 0; i < 20; i++)
        launch_blocks(place, "grid", 1, place->streams[0]);
    launch_blocks(place, "grid", 1000, place->streams[0]);
    synchronize();
}

static void ever_new_sizes(struct place *place)
{
    if (place->round == 0)
        write_kernel_time(20000);
    for (unsigned i = 0; i < 16; i++)
        launch_blocks(place, "grid", 1 + (unsigned)(place->round * 16 + i) * 7 % 97, place->streams[0]);
    synchronize();
}

/* A graph that a kernel launches: what that takes is told by its argument. */
static handle launched_by_argument(struct place *place, const char *name)
{
    enum { RELAXED = 2, FROM_CARD = 4 };
    handle graph, executable;
    CALL(cuStreamBeginCapture_v2, place->streams[0], RELAXED);
    launch(place, name, place->streams[0]);
    CALL(cuStreamEndCapture, place->streams[0], &graph);
    CALL(cuGraphInstantiateWithFlags, &executable, graph, (uint64_t)FROM_CARD);
    CALL(cuGraphUpload, executable, place->streams[0]);
    return executable;
}

static void launch_by_argument_on(struct place *place, handle executable, handle stream)
{
    void *arguments[] = {&executable};
    CALL(cuLaunchKernel, function_of(place, "sim_launch"), 1, 1, 1, 32, 1, 1, 0, stream, arguments, NULL);
}

static void launch_by_argument(struct place *place, handle executable)
{
    launch_by_argument_on(place, executable, place->streams[0]);
}

/* Its cost varies, and each round is over before the next. */
static void short_and_long_by_argument(struct place *place)
{
    static handle shorter, longer;
    if (!shorter) {
        shorter = launched_by_argument(place, "spin_100us");
        longer = launched_by_argument(place, "spin_1500us");
    }
    for (unsigned i = 0; i < 8; i++)
        launch_by_argument(place, shorter);
    launch_by_argument(place, longer);
    CALL(cuStreamSynchronize, place->streams[0]);
}
