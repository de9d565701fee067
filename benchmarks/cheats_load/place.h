/* The driver, found as any program finds it, and one thread's place on the card. */
#pragma once
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef void *handle;

enum { MOST_STREAMS = 8, MOST_THREADS = 48, MOST_PROCESSES = 24, FUNCTIONS = 512, MIB = 1 << 20, BIG = 64 * MIB };

/* One thread's place on the card; threads of a process share the context. */
struct place {
    handle context, module, streams[MOST_STREAMS], graph, executable;
    uint64_t memory, other_memory;
    unsigned long long round;
};

static char kernels_file[512];
static double seconds = 5;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void sleep_us(unsigned us)
{
    struct timespec pause = {us / 1000000, (long)(us % 1000000) * 1000};
    nanosleep(&pause, NULL);
}

/* The host computes. */
static void work_us(unsigned us)
{
    const uint64_t until_ns = now_ns() + us * UINT64_C(1000);
    while (now_ns() < until_ns)
        continue;
}

/* --- the driver, found as any program finds it; every function takes at most 12 words --- */

static int (*driver(const char *name))()
{
    static void *library;
    void *address;
    int (*function)();
    if (!library)
        library = dlopen("libcuda.so.1", RTLD_NOW);
    address = library ? dlsym(library, name) : NULL;
    if (!address) {
        fprintf(stderr, "cheats_load: no %s: %s\n", name, dlerror());
        exit(3);
    }
    memcpy(&function, &address, sizeof function);
    return function;
}

#define CALL(name, ...)                                                                      \
    do {                                                                                     \
        static int (*found)();                                                               \
        if (!found)                                                                          \
            found = driver(#name);                                                           \
        int failed = found(__VA_ARGS__);                                                     \
        if (failed) {                                                                        \
            fprintf(stderr, "cheats_load: %s failed with CUDA error %d\n", #name, failed);   \
            exit(1);                                                                         \
        }                                                                                    \
    } while (0)

static const char *const kernels[] = {"spin_1us", "spin_10us", "spin_50us",   "spin_100us", "spin_200us", "spin_300us", "spin_500us",
                                      "spin_1000us", "spin_1500us", "spin_1900us", "spin_2000us", "spin_20ms", "spin_100ms", "spin_900ms", "ragged", "grid"};

static handle load_module(void)
{
    static char image[FUNCTIONS * 40 + 1024];
    handle module;
    int length = sprintf(image, ".version 7.0\n.target sm_70\n.address_size 64\n");
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        length += sprintf(image + length, ".visible .entry %s() {ret;}\n", kernels[i]);
    length += sprintf(image + length, ".visible .entry sim_launch(.param .u64 executable) {ret;}\n");
    for (unsigned i = 0; i < FUNCTIONS; i++)
        length += sprintf(image + length, ".entry new_%u_500us() {ret;}\n", i);
    CALL(cuModuleLoadData, &module, image);
    return module;
}

static void open_context(struct place *place)
{
    int device;
    CALL(cuInit, 0);
    CALL(cuDeviceGet, &device, 0);
    CALL(cuCtxCreate_v2, &place->context, 0, device);
    place->module = load_module();
}

static handle function_of(struct place *place, const char *name)
{
    handle function;
    CALL(cuModuleGetFunction, &function, place->module, name);
    return function;
}

static void launch_blocks(struct place *place, const char *name, unsigned blocks, handle stream)
{
    CALL(cuLaunchKernel, function_of(place, name), blocks, 1, 1, 32, 1, 1, 0, stream, NULL, NULL);
}

/* As a program that fills a card of 108 multiprocessors: 8 blocks on each for every 10 us. The simulated card goes by the name alone, but
 * a limit that counts blocks must not take them for nothing. */
static unsigned blocks_of(const char *name)
{
    const char *time = strrchr(name, '_');
    char unit = 0;
    unsigned amount = 1;
    if (!time || sscanf(time, "_%u%c", &amount, &unit) != 2)
        return 1;
    return 864 * (unit == 'm' ? 100 * amount : amount < 10 ? 1 : amount / 10);
}

static void launch(struct place *place, const char *name, handle stream)
{
    launch_blocks(place, name, blocks_of(name), stream);
}

static void synchronize(void)
{
    CALL(cuCtxSynchronize);
}

static void need_memory(struct place *place)
{
    if (!place->memory) {
        CALL(cuMemAlloc_v2, &place->memory, (size_t)BIG);
        CALL(cuMemAlloc_v2, &place->other_memory, (size_t)BIG);
    }
}

/* Kernels that no call named before: their cost is not known. A module that is used up is loaded again: its functions are new. */
static void launch_new(struct place *place, handle stream)
{
    char name[64];
    for (unsigned i = 0; i < 32; i++) {
        unsigned number = (unsigned)(place->round * 32 + i);
        if (number != 0 && number % FUNCTIONS == 0)
            place->module = load_module();
        snprintf(name, sizeof name, "new_%u_500us", number % FUNCTIONS);
        launch(place, name, stream);
    }
}
