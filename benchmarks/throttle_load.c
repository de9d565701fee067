/* A CUDA driver-API program that puts work on the card: what benchmarks/throttle.py and the throttle's tests run in a share.
 *
 * throttle_load kernel=NAME seconds=S [sync=N] [pause_us=U] [streams=N] [graph=N] [cost=N] [threads=N] [wait=1]
 *               [rounds=N] [progress=FILE] [host_us=U] [blocks=N]
 *
 * Launches kernel NAME for S seconds, waits for the card after every N launches (0: never) and then U us; with host_us=U the
 * host is busy for U us between two launches; with graph=N one
 * launch is a graph of N captured kernels; with cost=N it measures N single launches instead, and as many
 * in groups of 16 by the processor's tick counter. wait=1: starts at a line on stdin. A kernel takes `rounds` turns of a loop on
 * a real card; on the simulated one its name says how long it takes, whatever `blocks` says of its grid.
 * progress=FILE: kernels that have ended are counted in the first 8 bytes of FILE, by the kernels themselves; where they
 * compute nothing, by a host function behind each. Prints one line of JSON. Needs no CUDA toolkit: it finds libcuda.so.1
 * as any program does.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

typedef void *handle;

static int (*cuInit)(unsigned);
static int (*cuDeviceGet)(int *, int);
static int (*cuCtxCreate_v2)(handle *, unsigned, int);
static int (*cuCtxSetCurrent)(handle);
static int (*cuCtxSynchronize)(void);
static int (*cuModuleLoadData)(handle *, const void *);
static int (*cuModuleGetFunction)(handle *, handle, const char *);
static int (*cuStreamCreate)(handle *, unsigned);
static int (*cuLaunchKernel)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **,
                             void **);
static int (*cuStreamBeginCapture_v2)(handle, int);
static int (*cuStreamEndCapture)(handle, handle *);
static int (*cuGraphInstantiateWithFlags)(handle *, handle, unsigned long long);
static int (*cuGraphLaunch)(handle, handle);
static int (*cuMemHostRegister_v2)(void *, size_t, unsigned);
static int (*cuMemHostGetDevicePointer_v2)(uint64_t *, void *, unsigned);
static int (*cuLaunchHostFunc)(handle, void (*)(void *), void *);

struct entry {
    const char *name;
    void *pointer;
};

static const struct entry functions[] = {
#define FUNCTION(name) {#name, &name}
    FUNCTION(cuInit),           FUNCTION(cuDeviceGet),         FUNCTION(cuCtxCreate_v2),
    FUNCTION(cuCtxSetCurrent),  FUNCTION(cuCtxSynchronize),    FUNCTION(cuModuleLoadData),
    FUNCTION(cuModuleGetFunction), FUNCTION(cuStreamCreate),   FUNCTION(cuLaunchKernel),
    FUNCTION(cuStreamBeginCapture_v2), FUNCTION(cuStreamEndCapture), FUNCTION(cuGraphInstantiateWithFlags),
    FUNCTION(cuGraphLaunch),
};
static const struct entry progress_functions[] = {
    FUNCTION(cuMemHostRegister_v2), FUNCTION(cuMemHostGetDevicePointer_v2), FUNCTION(cuLaunchHostFunc),
};

enum { GROUP = 16, BURST = 200, MOST_STREAMS = 16, MOST_BURSTS = 100000, MOST_THREADS = 8 };

struct options {
    char kernel[128], progress[512];
    double seconds;
    unsigned long long rounds;
    unsigned sync, pause_us, streams, graph, cost, threads, wait, host_us, blocks;
};

static struct options options = {.kernel = "spin_1000us", .seconds = 1, .streams = 1, .threads = 1, .blocks = 1};
static handle context, function;
static uint64_t bursts[MOST_BURSTS];
static unsigned burst_count;
static _Atomic uint64_t *ended;  /* kernels that have ended, in the progress file; NULL: nobody asked */
static uint64_t ended_on_device; /* where a kernel counts; 0: it does not */
static int counted_by_host;

static void check(int result, const char *what)
{
    if (result == 0)
        return;
    fprintf(stderr, "throttle_load: %s failed with CUDA error %d\n", what, result);
    exit(1);
}

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static void pause_for(unsigned us)
{
    struct timespec pause = {us / 1000000, (long)(us % 1000000) * 1000};
    if (us)
        nanosleep(&pause, NULL);
}

static void work_for(unsigned us)
{
    for (uint64_t end = now_ns() + us * 1000ull; us && now_ns() < end;)
        ;
}

static void load_functions(const struct entry *entries, size_t count)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    for (size_t i = 0; i < count; i++) {
        void *address = library ? dlsym(library, entries[i].name) : NULL;
        if (!address) {
            fprintf(stderr, "throttle_load: no %s: %s\n", entries[i].name, dlerror());
            exit(1);
        }
        memcpy(entries[i].pointer, &address, sizeof address);
    }
}

/* A chain of multiplications that depend on each other, so that no compiler shortens it; then one count per kernel. */
static const char kernel_text[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry %s(.param .u64 rounds, .param .u64 ended)\n{\n"
    "\t.reg .pred %%more, %%first;\n\t.reg .u32 %%thread;\n\t.reg .u64 %%left, %%ended, %%value;\n"
    "\tld.param.u64 %%left, [rounds];\n\tld.param.u64 %%ended, [ended];\n"
    "\tmov.u32 %%thread, %%tid.x;\n\tcvt.u64.u32 %%value, %%thread;\n"
    "next:\n\tsetp.eq.u64 %%more, %%left, 0;\n\t@%%more bra done;\n"
    "\tmad.lo.u64 %%value, %%value, 6364136223846793005, 1442695040888963407;\n"
    "\tsub.u64 %%left, %%left, 1;\n\tbra next;\n"
    "done:\n\tsetp.eq.u64 %%first, %%ended, 0;\n\t@%%first ret;\n"
    "\tsetp.eq.u64 %%first, %%value, 0;\n\t@%%first st.global.u64 [%%ended + 8], %%value;\n"
    "\tsetp.ne.u32 %%first, %%thread, 0;\n\t@%%first ret;\n"
    "\tred.sys.global.add.u64 [%%ended], 1;\n\tret;\n}\n";

static void load_kernel(void)
{
    char image[2048];
    int device;
    snprintf(image, sizeof image, kernel_text, options.kernel);
    check(cuInit(0), "cuInit");
    check(cuDeviceGet(&device, 0), "cuDeviceGet");
    check(cuCtxCreate_v2(&context, 0, device), "cuCtxCreate");
    handle module;
    check(cuModuleLoadData(&module, image), "cuModuleLoadData");
    check(cuModuleGetFunction(&function, module, options.kernel), "cuModuleGetFunction");
}

static void count_one(void *unused)
{
    (void)unused;
    atomic_fetch_add_explicit(ended, 1, memory_order_relaxed);
}

static void launch(handle stream)
{
    void *arguments[] = {&options.rounds, &ended_on_device};
    check(cuLaunchKernel(function, options.blocks, 1, 1, 32, 1, 1, 0, stream, arguments, NULL), "cuLaunchKernel");
    if (counted_by_host)
        check(cuLaunchHostFunc(stream, count_one, NULL), "cuLaunchHostFunc");
}

/* Map the progress file, for the card too; one kernel tells who is to count. */
static void begin_progress(void)
{
    int file = open(options.progress, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    void *page = MAP_FAILED;
    if (file >= 0 && ftruncate(file, 4096) == 0)
        page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (page == MAP_FAILED) {
        perror(options.progress);
        exit(1);
    }
    ended = page;
    load_functions(progress_functions, sizeof progress_functions / sizeof *progress_functions);
    enum { DEVICEMAP = 2 };
    if (cuMemHostRegister_v2(page, 4096, DEVICEMAP) == 0)
        check(cuMemHostGetDevicePointer_v2(&ended_on_device, page, 0), "cuMemHostGetDevicePointer");
    unsigned long long rounds = options.rounds;
    options.rounds = 1;
    launch(NULL);
    check(cuCtxSynchronize(), "cuCtxSynchronize");
    options.rounds = rounds;
    counted_by_host = atomic_load(ended) == 0;
    atomic_store(ended, 0);
}

static handle make_graph(handle stream)
{
    handle graph, executable;
    check(cuStreamBeginCapture_v2(stream, 0), "cuStreamBeginCapture");
    for (unsigned i = 0; i < options.graph; i++)
        launch(stream);
    check(cuStreamEndCapture(stream, &graph), "cuStreamEndCapture");
    check(cuGraphInstantiateWithFlags(&executable, graph, 0), "cuGraphInstantiate");
    return executable;
}

struct outcome {
    uint64_t launches, first_ns, last_ns;
};

static void *work(void *argument)
{
    struct outcome *outcome = argument;
    handle streams[MOST_STREAMS], graph = NULL;
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    for (unsigned i = 0; i < options.streams; i++)
        check(cuStreamCreate(&streams[i], 1), "cuStreamCreate");
    if (options.graph)
        graph = make_graph(streams[0]);
    uint64_t start = now_ns(), end = start + (uint64_t)(options.seconds * 1e9), burst = start;
    outcome->first_ns = start;
    while (now_ns() < end) {
        handle stream = streams[outcome->launches % options.streams];
        if (graph)
            check(cuGraphLaunch(graph, stream), "cuGraphLaunch");
        else
            launch(stream);
        outcome->launches++;
        work_for(options.host_us);
        if (!options.sync || outcome->launches % options.sync)
            continue;
        check(cuCtxSynchronize(), "cuCtxSynchronize");
        if (burst_count < MOST_BURSTS && options.threads == 1)
            bursts[burst_count++] = now_ns() - burst;
        pause_for(options.pause_us);
        burst = now_ns();
    }
    check(cuCtxSynchronize(), "cuCtxSynchronize");
    outcome->last_ns = now_ns();
    return NULL;
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

static uint64_t percentile(uint64_t *values, unsigned count, double part)
{
    qsort(values, count, sizeof *values, ascending);
    unsigned index = (unsigned)(part * count);
    return count ? values[index < count ? index : count - 1] : 0;
}

static uint64_t ticks(void)
{
#if defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#else
    return now_ns();
#endif
}

enum { WARM_NS = 300000000 };
/* Who launches that much is measured for 2 s once, until it is known how long a launch is on its way to the card. */
static const uint64_t WARM_GROUPS_NS = 5000000000;

/* Launches in groups, because one alone is shorter than the clock's own cost: ticks per launch, in tenths. */
static unsigned measure_groups(handle stream, uint64_t *tenths)
{
    unsigned groups = options.cost / GROUP, done = 0;
    uint64_t began_ns = now_ns();
    for (unsigned i = 0; done < groups; i++) {
        int warm = now_ns() > began_ns + WARM_GROUPS_NS;
        uint64_t from = ticks();
        for (unsigned k = 0; k < GROUP; k++)
            launch(stream);
        if (warm)
            tenths[done++] = (ticks() - from) * 10 / GROUP;
        if (i % 8 == 7) {
            check(cuCtxSynchronize(), "cuCtxSynchronize");
            pause_for(options.pause_us / 4);
        }
    }
    return groups;
}

/* Single launches, timed one by one in bursts that stay within the credit; the clock's own cost is taken off. The first launch of a burst is told
 * apart: it wakes who sleeps, a helper or a card; and so are others that record an event. */
static void measure_cost(void)
{
    handle stream;
    uint64_t *cost = calloc(options.cost, sizeof *cost), *quiet = calloc(options.cost, sizeof *quiet);
    uint64_t *first = calloc(options.cost, sizeof *first), *recording = calloc(options.cost, sizeof *recording);
    /* The driver made for this says how many events were recorded; behind another one all launches count as quiet. */
    const volatile uint64_t *events = dlsym(dlopen("libcuda.so.1", RTLD_NOW), "throttle_events");
    uint64_t clock_cost = UINT64_MAX;
    uint64_t sum = 0, began_ns = now_ns();
    if (!cost || !quiet || !first || !recording)
        exit(1);
    check(cuStreamCreate(&stream, 1), "cuStreamCreate");
    for (unsigned i = 0; i < 1000; i++) {
        uint64_t from = now_ns(), took = now_ns() - from;
        clock_cost = took < clock_cost ? took : clock_cost;
    }
    unsigned done = 0, quiets = 0, firsts = 0, recordings = 0;
    for (unsigned i = 0; done < options.cost; i++) {
        uint64_t recorded = events ? *events : 0, from = now_ns();
        launch(stream);
        uint64_t took = now_ns() - from;
        took = took > clock_cost ? took - clock_cost : 0;
        if (i >= 2000 && from > began_ns + WARM_NS) { /* the first ones load, learn and warm up, and a process's first quarter of a second is all marked */
            cost[done++] = took;
            sum += took;
            if (!events || *events == recorded)
                quiet[quiets++] = took;
            if (i % BURST == 0)
                first[firsts++] = took;
            else if (events && *events != recorded)
                recording[recordings++] = took;
        }
        if (i % BURST == BURST - 1) {
            check(cuCtxSynchronize(), "cuCtxSynchronize");
            pause_for(options.pause_us);
        }
    }
    uint64_t *tenths = calloc(options.cost, sizeof *tenths), from_ns = now_ns(), from_ticks = ticks();
    if (!tenths)
        exit(1);
    unsigned groups = measure_groups(stream, tenths);
    double ticks_per_ns = (double)(ticks() - from_ticks) / (double)(now_ns() - from_ns);
    printf("{\"launches\": %u, \"group_p50_ticks\": %.1f, \"ticks_per_ns\": %.3f, \"mean_ns\": %.1f, \"p50_ns\": %llu, "
           "\"p99_ns\": %llu, \"quiet_launches\": %u, \"quiet_p99_ns\": %llu, \"first_launches\": %u, \"first_p50_ns\": %llu, "
           "\"recording_launches\": %u, \"recording_p50_ns\": %llu}\n",
           options.cost, (double)percentile(tenths, groups, 0.50) / 10, ticks_per_ns, (double)sum / options.cost,
           (unsigned long long)percentile(cost, options.cost, 0.50), (unsigned long long)percentile(cost, options.cost, 0.99), quiets,
           (unsigned long long)percentile(quiet, quiets, 0.99), firsts, (unsigned long long)percentile(first, firsts, 0.50), recordings,
           (unsigned long long)percentile(recording, recordings, 0.50));
    free(cost);
    free(quiet);
    free(first);
    free(recording);
    free(tenths);
}

static void read_options(int count, char **arguments)
{
    struct {
        const char *name;
        unsigned *value;
    } numbers[] = {{"sync", &options.sync},       {"pause_us", &options.pause_us}, {"streams", &options.streams},
                   {"graph", &options.graph},     {"cost", &options.cost},         {"threads", &options.threads},
                   {"wait", &options.wait},       {"host_us", &options.host_us},
                   {"blocks", &options.blocks}};
    for (int i = 1; i < count; i++) {
        char *value = strchr(arguments[i], '=');
        size_t length = value ? (size_t)(value - arguments[i]) : 0;
        int known = 0;
        if (value && strncmp(arguments[i], "kernel", length) == 0)
            known = snprintf(options.kernel, sizeof options.kernel, "%s", value + 1) > 0;
        else if (value && strncmp(arguments[i], "progress", length) == 0)
            known = snprintf(options.progress, sizeof options.progress, "%s", value + 1) > 0;
        else if (value && strncmp(arguments[i], "seconds", length) == 0)
            known = (options.seconds = atof(value + 1)) > 0;
        else if (value && strncmp(arguments[i], "rounds", length) == 0)
            known = (options.rounds = strtoull(value + 1, NULL, 10)) > 0;
        for (size_t n = 0; value && !known && n < sizeof numbers / sizeof *numbers; n++)
            if (strlen(numbers[n].name) == length && strncmp(arguments[i], numbers[n].name, length) == 0)
                *numbers[n].value = (unsigned)atoi(value + 1), known = 1;
        if (!known) {
            fprintf(stderr, "throttle_load: unknown option %s; see the top of benchmarks/throttle_load.c\n", arguments[i]);
            exit(2);
        }
    }
    if (options.streams < 1 || options.streams > MOST_STREAMS || options.threads < 1 || options.threads > MOST_THREADS) {
        fprintf(stderr, "throttle_load: 1 to %d streams, 1 to %d threads\n", MOST_STREAMS, MOST_THREADS);
        exit(2);
    }
}

int main(int count, char **arguments)
{
    char line[16];
    read_options(count, arguments);
    load_functions(functions, sizeof functions / sizeof *functions);
    load_kernel();
    if (options.progress[0])
        begin_progress();
    if (options.wait && (puts("ready"), fflush(stdout), !fgets(line, sizeof line, stdin)))
        return 1;
    if (options.cost) {
        measure_cost();
        return 0;
    }
    struct outcome outcomes[MOST_THREADS] = {{0}};
    pthread_t threads[MOST_THREADS];
    for (unsigned i = 1; i < options.threads; i++)
        pthread_create(&threads[i], NULL, work, &outcomes[i]);
    work(&outcomes[0]);
    for (unsigned i = 1; i < options.threads; i++)
        pthread_join(threads[i], NULL);
    uint64_t launches = 0;
    for (unsigned i = 0; i < options.threads; i++)
        launches += outcomes[i].launches;
    unsigned warm = burst_count / 10;
    printf("{\"launches\": %llu, \"seconds\": %.6f, \"bursts\": %u, \"burst_p50_ns\": %llu, \"burst_p99_ns\": %llu}\n",
           (unsigned long long)launches, (double)(outcomes[0].last_ns - outcomes[0].first_ns) / 1e9, burst_count,
           (unsigned long long)percentile(bursts + warm, burst_count - warm, 0.50),
           (unsigned long long)percentile(bursts + warm, burst_count - warm, 0.99));
    return 0;
}
