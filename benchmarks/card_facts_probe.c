/* Measures a card with events: launch gap, resolution of events, and, beside a greedy neighbour, slices and pauses. Prints JSON.
 *
 * benchmarks/card_facts.py runs it alone and beside a load; no share must be in between.
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef void *handle;
enum { KERNELS = 4000, SHORT_KERNELS = 3000, SAMPLES = 200, MANY = 11 };

static const char image[] = ".version 7.0\n.target sm_70\n.address_size 64\n"
                            ".visible .entry spin_100us(.param .u64 rounds)\n{\n"
                            "\t.reg .pred %more;\n\t.reg .u64 %left, %value;\n\tld.param.u64 %left, [rounds];\n\tmov.u64 %value, 1;\n"
                            "next:\n\tsetp.eq.u64 %more, %left, 0;\n\t@%more bra done;\n"
                            "\tmad.lo.u64 %value, %value, 6364136223846793005, 1442695040888963407;\n"
                            "\tsub.u64 %left, %left, 1;\n\tbra next;\ndone:\n\tsetp.eq.u64 %more, %value, 0;\n"
                            "\t@%more st.global.u64 [%value], %value;\n\tret;\n}\n";
static handle function, stream;
static unsigned long long rounds = 10000;

static void *find(const char *name)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW), *address = library ? dlsym(library, name) : NULL;
    if (!address) {
        fprintf(stderr, "no %s: %s\n", name, dlerror());
        exit(1);
    }
    return address;
}

/* Looked up once: a look-up between an event and a launch would be measured. */
#define CALL(name, types, ...)                                               \
    do {                                                                     \
        static int(*driver) types;                                           \
        void *address = driver ? NULL : find(name);                          \
        if (!driver)                                                         \
            memcpy(&driver, &address, sizeof address);                       \
        int result = driver(__VA_ARGS__);                                    \
        if (result != 0) {                                                   \
            fprintf(stderr, "%s failed with CUDA error %d\n", name, result); \
            exit(1);                                                         \
        }                                                                    \
    } while (0)

static handle make_event(void)
{
    handle event;
    CALL("cuEventCreate", (handle *, unsigned), &event, 0);
    return event;
}

static void record(handle event) { CALL("cuEventRecord", (handle, handle), event, stream); }
static void wait_for_card(void) { CALL("cuCtxSynchronize", (void)); }

static void launch(void)
{
    void *parameters[] = {&rounds};
    CALL("cuLaunchKernel",
         (handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **), function, 1,
         1, 1, 32, 1, 1, 0, stream, parameters, NULL);
}

static double elapsed_ns(handle from, handle to)
{
    float milliseconds;
    CALL("cuEventElapsedTime", (float *, handle, handle), &milliseconds, from, to);
    return (double)milliseconds * 1e6;
}

static int ascending(const void *left, const void *right)
{
    double a = *(const double *)left, b = *(const double *)right;
    return a < b ? -1 : a > b;
}

static double median(double *values, unsigned count)
{
    qsort(values, count, sizeof *values, ascending);
    return count ? values[count / 2] : 0;
}

/* The time between events around `kernels` launches onto an idle card. */
static double around(unsigned kernels)
{
    static double samples[SAMPLES];
    handle from = make_event(), to = make_event();
    for (unsigned i = 0; i < SAMPLES; i++) {
        wait_for_card();
        record(from);
        for (unsigned k = 0; k < kernels; k++)
            launch();
        record(to);
        wait_for_card();
        samples[i] = elapsed_ns(from, to);
    }
    return median(samples, SAMPLES);
}

/* How much longer short kernels take each, when an event is recorded behind every one of them. */
static double cost_of_events(void)
{
    double took[2];
    handle from = make_event(), between = make_event(), to = make_event();
    unsigned long long long_rounds = rounds;
    rounds = rounds / 10 + 1;
    for (unsigned with = 0; with < 2; with++) {
        wait_for_card();
        for (unsigned k = 0; k < SHORT_KERNELS; k++) {
            launch();
            if (k == SHORT_KERNELS / 10)
                record(from);
            if (with)
                record(between);
        }
        record(to);
        wait_for_card();
        took[with] = elapsed_ns(from, to);
    }
    rounds = long_rounds;
    return (took[1] - took[0]) / (SHORT_KERNELS * 0.9);
}

/* The smallest difference between the ends of kernels that are not equally long. */
static double smallest_step(const double *ends)
{
    static double lengths[KERNELS];
    for (unsigned i = 1; i < KERNELS; i++)
        lengths[i - 1] = ends[i] - ends[i - 1];
    qsort(lengths, KERNELS - 1, sizeof *lengths, ascending);
    double least = 0;
    for (unsigned i = 1; i < KERNELS - 1; i++) {
        double step = lengths[i] - lengths[i - 1];
        if (step > 0.01 && (least == 0 || step < least))
            least = step;
    }
    return least;
}

int main(void)
{
    handle context, module;
    int device;
    CALL("cuInit", (unsigned), 0);
    CALL("cuDeviceGet", (int *, int), &device, 0);
    CALL("cuCtxCreate_v2", (handle *, unsigned, int), &context, 0, device);
    CALL("cuModuleLoadData", (handle *, const void *), &module, image);
    CALL("cuModuleGetFunction", (handle *, handle, const char *), &function, module, "spin_100us");
    CALL("cuStreamCreate", (handle *, unsigned), &stream, 1);
    launch();
    wait_for_card();
    double one = around(1);
    if (one > 0)
        rounds = (unsigned long long)((double)rounds * 100000 / one) + 1; /* about 100 us on a real card */
    one = around(1);
    double event_cost = cost_of_events(), more = around(MANY), kernel = (more - one) / (MANY - 1);

    static handle events[KERNELS];
    static double ends[KERNELS], slices[KERNELS], pauses[KERNELS];
    for (unsigned i = 0; i < KERNELS; i++)
        events[i] = make_event();
    for (unsigned i = 0; i < KERNELS; i++) {
        launch();
        record(events[i]);
    }
    wait_for_card();
    for (unsigned i = 1; i < KERNELS; i++)
        ends[i] = elapsed_ns(events[0], events[i]);
    unsigned count = 0;
    double last = 0;
    for (unsigned i = 1; i < KERNELS; i++) {
        double pause = ends[i] - ends[i - 1] - kernel;
        if (pause < 2 * kernel)
            continue;
        if (last > 0) {
            pauses[count] = pause;
            slices[count++] = ends[i] - last - pause; /* from one pause's end to the next one's, less the pause itself */
        }
        last = ends[i];
    }
    printf("{\"launch_gap_ns\": %.1f, \"event_step_ns\": %.3f, \"kernel_ns\": %.0f, \"pauses\": %u, \"slice_ns\": %.0f, "
           "\"pause_ns\": %.0f, \"event_cost_ns\": %.0f}\n",
           one - kernel, smallest_step(ends), kernel, count, median(slices, count), median(pauses, count), event_cost);
    return 0;
}
