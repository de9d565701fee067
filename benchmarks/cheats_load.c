/* CUDA driver-API programs that a GPU-time limit is not made for: what benchmarks/cheats.py runs in a share.
 *
 * cheats_load pattern=NAME seconds=S [kernels=FILE]
 *
 * One pattern is one function that puts a round of work on the card and waits for it as such a program would; it is called
 * until the time is over, by as many threads and processes as its row says. On the simulated card a kernel's name says how long
 * it takes; FILE is the file of kernel times, for a kernel whose time changes while it runs. Needs no CUDA toolkit.
 */
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

static const char *const kernels[] = {"spin_10us",  "spin_50us",  "spin_100us", "spin_200us", "spin_300us", "spin_500us",
                                      "spin_1000us", "spin_20ms", "spin_100ms", "spin_900ms", "ragged", "grid"};

static handle load_module(void)
{
    static char image[FUNCTIONS * 40 + 1024];
    handle module;
    int length = sprintf(image, ".version 7.0\n.target sm_70\n.address_size 64\n");
    for (size_t i = 0; i < sizeof kernels / sizeof *kernels; i++)
        length += sprintf(image + length, ".visible .entry %s() {ret;}\n", kernels[i]);
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

static void launch(struct place *place, const char *name, handle stream)
{
    launch_blocks(place, name, 1, stream);
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

/* --- patterns: one round each --- */

static void greedy(struct place *place, const char *name, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        launch(place, name, place->streams[0]);
}

static void steady(struct place *place) { greedy(place, "spin_1000us", 64); }
static void short_kernels(struct place *place) { greedy(place, "spin_10us", 64); }
static void long_kernels(struct place *place) { greedy(place, "spin_20ms", 4); }

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

/* --- costs that change --- */

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

/* --- streams, contexts, threads, processes without end --- */

static void new_streams(struct place *place)
{
    handle streams[8];
    for (unsigned i = 0; i < 8; i++) {
        CALL(cuStreamCreate, &streams[i], 1);
        launch(place, "spin_1000us", streams[i]);
    }
    for (unsigned i = 0; i < 8; i++)
        CALL(cuStreamDestroy_v2, streams[i]);
    synchronize();
}

static void new_streams_hardly_waited(struct place *place)
{
    handle streams[8];
    for (unsigned i = 0; i < 8; i++) {
        CALL(cuStreamCreate, &streams[i], 1);
        launch(place, "spin_1000us", streams[i]);
    }
    for (unsigned i = 0; i < 8; i++)
        CALL(cuStreamDestroy_v2, streams[i]);
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

/* --- graphs --- */

static handle make_graph(struct place *place, unsigned kernels)
{
    handle graph;
    capture_on(place->streams[0]);
    for (unsigned i = 0; i < kernels; i++)
        launch(place, "spin_200us", place->streams[0]);
    CALL(cuStreamEndCapture, place->streams[0], &graph);
    return graph;
}

static void graphs(struct place *place)
{
    if (!place->executable) {
        place->graph = make_graph(place, 5);
        CALL(cuGraphInstantiateWithFlags, &place->executable, place->graph, 0ull);
    }
    for (unsigned i = 0; i < 8; i++)
        CALL(cuGraphLaunch, place->executable, place->streams[0]);
}

static void graphs_updated(struct place *place)
{
    struct {
        int result;
        handle error_node, error_from;
    } info;
    if (!place->executable) {
        place->graph = make_graph(place, 10);
        CALL(cuGraphInstantiateWithFlags, &place->executable, place->graph, 0ull);
    }
    CALL(cuGraphExecUpdate_v2, place->executable, place->graph, &info);
    CALL(cuGraphLaunch, place->executable, place->streams[0]);
}

static void graphs_made_anew(struct place *place)
{
    handle executable, graph = make_graph(place, 10);
    CALL(cuGraphInstantiateWithFlags, &executable, graph, 0ull);
    CALL(cuGraphLaunch, executable, place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
    CALL(cuGraphExecDestroy, executable);
    CALL(cuGraphDestroy, graph);
}

static void child_graphs(struct place *place)
{
    if (!place->executable) {
        handle node, child = make_graph(place, 5), parent;
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

/* --- processes that do not live long --- */

static pid_t child(void (*pattern)(struct place *), unsigned kill_after_us)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct place place = {0};
        open_context(&place);
        CALL(cuStreamCreate, &place.streams[0], 1);
        pattern(&place);
        if (kill_after_us)
            sleep_us(kill_after_us), raise(SIGKILL);
        synchronize();
        _exit(0);
    }
    return pid;
}

static void a_long_one(struct place *place) { launch(place, "spin_100ms", place->streams[0]); }

/* Each one is killed 20 ms into a kernel of 100 ms. */
static void killed_in_mid_kernel(struct place *place)
{
    (void)place;
    waitpid(child(a_long_one, 20000), NULL, 0);
}

static void a_very_long_one(struct place *place) { launch(place, "spin_900ms", place->streams[0]); }

static void stop(struct place *place)
{
    a_very_long_one(place);
    raise(SIGSTOP);
}

/* It sleeps from its launch on, with all its threads, and is killed 20 ms later. */
static void stopped_after_launch(struct place *place)
{
    (void)place;
    pid_t pid = child(stop, 0);
    waitpid(pid, NULL, WUNTRACED);
    sleep_us(20000);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* Three at a time, so that some of them are alive and wait at the gate meanwhile. No stop lasts: it may have come within the card's lock. */
static void stopped_in_turn(struct place *place)
{
    (void)place;
    pid_t pids[3];
    uint64_t stopped_ns[3] = {0};
    for (unsigned i = 0; i < 3; i++)
        pids[i] = child(stop, 0);
    for (unsigned left = 3; left != 0; sleep_us(500))
        for (unsigned i = 0; i < 3; i++) {
            if (!pids[i] || (!stopped_ns[i] && waitpid(pids[i], NULL, WUNTRACED | WNOHANG) != pids[i]))
                continue;
            stopped_ns[i] = stopped_ns[i] ? stopped_ns[i] : now_ns();
            if (now_ns() - stopped_ns[i] < 20000000)
                continue;
            kill(pids[i], SIGKILL);
            waitpid(pids[i], NULL, 0);
            pids[i] = 0;
            left--;
        }
}

enum { AT_ONCE = 4 };

static void each_of(void (*pattern)(struct place *), unsigned kill_after_us)
{
    pid_t pids[AT_ONCE];
    for (unsigned i = 0; i < AT_ONCE; i++)
        pids[i] = child(pattern, kill_after_us);
    for (unsigned i = 0; i < AT_ONCE; i++)
        waitpid(pids[i], NULL, 0);
}

static void killed_after_launch(struct place *place)
{
    (void)place;
    each_of(a_very_long_one, 1500);
}

static void end(struct place *place)
{
    a_very_long_one(place);
    sleep_us(1500);
    _exit(0);
}

static void ended_after_launch(struct place *place)
{
    (void)place;
    each_of(end, 0);
}

static void become_another(struct place *place)
{
    a_very_long_one(place);
    sleep_us(1500);
    execl("/bin/sleep", "sleep", "0.02", (char *)NULL);
    _exit(1);
}

static void exec_after_launch(struct place *place)
{
    (void)place;
    each_of(become_another, 0);
}

static void some(struct place *place) { greedy(place, "spin_1000us", 8); }

static void fork_tree(struct place *place)
{
    pid_t pids[4];
    (void)place;
    for (unsigned i = 0; i < 4; i++)
        pids[i] = child(some, 0);
    for (unsigned i = 0; i < 4; i++)
        waitpid(pids[i], NULL, 0);
}

struct pattern {
    const char *name;
    void (*round)(struct place *);
    unsigned threads, processes, forks; /* `forks`: the process itself never opens a context */
};

static const struct pattern patterns[] = {
#define PATTERN(name, ...) {#name, name, __VA_ARGS__}
    PATTERN(steady, 1, 1, 0),
    PATTERN(short_kernels, 1, 1, 0),
    PATTERN(long_kernels, 1, 1, 0),
    PATTERN(one_by_one, 1, 1, 0),
    PATTERN(one_by_one_100us, 1, 1, 0),
    PATTERN(polled, 1, 1, 0),
    PATTERN(sets, 1, 1, 0),
    PATTERN(sets_2d, 1, 1, 0),
    PATTERN(tiny_sets, 1, 1, 0),
    PATTERN(copies, 1, 1, 0),
    PATTERN(tiny_copies, 1, 1, 0),
    PATTERN(copies_unified, 1, 1, 0),
    PATTERN(copies_peer, 1, 1, 0),
    PATTERN(copies_peer_3d, 1, 1, 0),
    PATTERN(never_seen, 1, 1, 0),
    PATTERN(modules_reloaded, 1, 1, 0),
    PATTERN(capture_destroyed, 1, 1, 0),
    PATTERN(capture_context_destroyed, 1, 1, 0),
    PATTERN(capture_left_open, 1, 1, 0),
    PATTERN(capture_to_graph, 1, 1, 0),
    PATTERN(kernel_times_change, 1, 1, 0),
    PATTERN(kernel_times_change_unwaited, 1, 1, 0),
    PATTERN(long_and_left_alone, 1, 1, 0),
    PATTERN(huge_after_tiny, 1, 1, 0),
    PATTERN(ever_new_sizes, 1, 1, 0),
    PATTERN(new_streams, 1, 1, 0),
    PATTERN(new_streams_hardly_waited, 1, 1, 0),
    PATTERN(new_contexts, 1, 1, 0),
    PATTERN(streams_in_turn, 1, 1, 0),
    {"threads_48", threads_round, 48, 1, 0},
    {"processes_24", threads_round, 1, 24, 0},
    PATTERN(priorities, 1, 1, 0),
    PATTERN(legacy_stream, 1, 1, 0),
    PATTERN(per_thread_stream, 2, 1, 0),
    PATTERN(graphs, 1, 1, 0),
    PATTERN(graphs_updated, 1, 1, 0),
    PATTERN(graphs_made_anew, 1, 1, 0),
    PATTERN(child_graphs, 1, 1, 0),
    PATTERN(graph_of_sets, 1, 1, 0),
    PATTERN(cooperative, 1, 1, 0),
    PATTERN(cluster_launches, 1, 1, 0),
    PATTERN(dependent_launches, 1, 1, 0),
    PATTERN(host_callbacks, 1, 1, 0),
    PATTERN(event_storm, 1, 1, 0),
    PATTERN(killed_in_mid_kernel, 1, 1, 1),
    PATTERN(stopped_after_launch, 1, 1, 1),
    PATTERN(stopped_in_turn, 1, 1, 1),
    PATTERN(killed_after_launch, 1, 1, 1),
    PATTERN(ended_after_launch, 1, 1, 1),
    PATTERN(exec_after_launch, 1, 1, 1),
    PATTERN(fork_tree, 1, 1, 1),
};

static const struct pattern *chosen;
static handle shared_context, shared_module;
static uint64_t end_ns;

static void *work(void *unused)
{
    struct place place = {.context = shared_context, .module = shared_module};
    if (!chosen->forks) {
        CALL(cuCtxSetCurrent, place.context);
        for (unsigned i = 0; i < MOST_STREAMS; i++)
            CALL(cuStreamCreate, &place.streams[i], 1);
    }
    for (; now_ns() < end_ns; place.round++)
        chosen->round(&place);
    return unused;
}

static void one_process(void)
{
    pthread_t threads[MOST_THREADS];
    if (!chosen->forks) {
        struct place place = {0};
        open_context(&place);
        shared_context = place.context;
        shared_module = place.module;
    }
    for (unsigned i = 1; i < chosen->threads; i++)
        pthread_create(&threads[i], NULL, work, NULL);
    work(NULL);
    for (unsigned i = 1; i < chosen->threads; i++)
        pthread_join(threads[i], NULL);
}

int main(int count, char **arguments)
{
    for (int i = 1; i < count; i++) {
        char name[64] = "";
        if (sscanf(arguments[i], "pattern=%63s", name) == 1) {
            for (size_t n = 0; n < sizeof patterns / sizeof *patterns; n++)
                if (strcmp(patterns[n].name, name) == 0)
                    chosen = &patterns[n];
        } else if (sscanf(arguments[i], "seconds=%lf", &seconds) != 1 &&
                   sscanf(arguments[i], "kernels=%511s", kernels_file) != 1) {
            chosen = NULL;
            break;
        }
    }
    if (!chosen) {
        for (size_t n = 0; n < sizeof patterns / sizeof *patterns; n++)
            puts(patterns[n].name);
        return count > 1 ? 2 : 0;
    }
    end_ns = now_ns() + (uint64_t)(seconds * 1e9);
    pid_t children[MOST_PROCESSES];
    for (unsigned i = 1; i < chosen->processes; i++)
        if ((children[i] = fork()) == 0) {
            one_process();
            _exit(0);
        }
    one_process();
    for (unsigned i = 1; i < chosen->processes; i++)
        waitpid(children[i], NULL, 0);
    _exit(0); /* whatever captures is still under way */
}
