/* Context cost by NVML. The real library is asked, not our shim of it: its figures are the card's, not the share's. */
#include "cuda/context/measure.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>
#include <unistd.h>

#define VC__MOST_UNLISTED 16 /* a process's figure leaves out one part in so many at most; more is a neighbour's */
#define VC__NVML "libnvidia-ml.so.1"
#define VC__NVML_ALIAS "libnvidia-ml-driver.so.1"

struct memory_info { /* nvmlMemory_t */
    unsigned long long total, free, used;
};

struct process_info { /* nvmlProcessInfo_t of the _v2 and _v3 calls */
    unsigned int pid;
    unsigned long long used_bytes;
    unsigned int gpu_instance, compute_instance;
};

static struct {
    int (*init)(void);
    int (*by_uuid)(const char *, void **);
    int (*memory)(void *, struct memory_info *);
    int (*processes)(void *, unsigned int *, struct process_info *);
    bool usable;
} nvml;

static void load(void)
{
    /* By its usual name first, so that our shim comes before the real one that it needs: both have the same SONAME, and an
     * application that asks for NVML later gets whichever was loaded first. Where that is no shim, it is the real one. */
    void *usual = dlopen(VC__NVML, RTLD_NOW | RTLD_LOCAL);
    void *library = usual ? dlopen(VC__NVML_ALIAS, RTLD_NOW | RTLD_NOLOAD) : NULL;
    library = library ? library : usual;
    if (!library)
        return;
    nvml.init = (int (*)(void))dlsym(library, "nvmlInit_v2");
    nvml.by_uuid = (int (*)(const char *, void **))dlsym(library, "nvmlDeviceGetHandleByUUID");
    nvml.memory = (int (*)(void *, struct memory_info *))dlsym(library, "nvmlDeviceGetMemoryInfo");
    nvml.processes =
        (int (*)(void *, unsigned int *, struct process_info *))dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    if (!nvml.processes)
        nvml.processes =
            (int (*)(void *, unsigned int *, struct process_info *))dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v2");
    nvml.usable = nvml.init && nvml.by_uuid && nvml.memory && nvml.processes && nvml.init() == 0;
}

static bool sample(struct vc_measure *measure)
{
    struct memory_info memory;
    struct process_info processes[VC_MEASURE_PROCESSES];
    unsigned int count = VC_MEASURE_PROCESSES;
    if (nvml.memory(measure->device, &memory) != 0 || nvml.processes(measure->device, &count, processes) != 0)
        return false;
    measure->used_bytes = memory.used;
    measure->count = count;
    for (unsigned int index = 0; index < count; index++)
        measure->processes[index] = (struct vc_measured_process){processes[index].pid, processes[index].used_bytes};
    return true;
}

/* What a process held then; 0: it was not there. */
static uint64_t bytes_of(const struct vc_measure *measure, unsigned int pid)
{
    for (unsigned int index = 0; index < measure->count; index++)
        if (measure->processes[index].pid == pid)
            return measure->processes[index].bytes;
    return 0;
}

void vc_measure_begin(struct vc_measure *measure, const char *uuid)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
    memset(measure, 0, sizeof *measure);
    if (!nvml.usable || nvml.by_uuid(uuid, &measure->device) != 0 || !sample(measure))
        measure->device = NULL;
}

uint64_t vc_measure_end(const struct vc_measure *measure)
{
    struct vc_measure now = {.device = measure->device};
    if (!measure->device || !sample(&now))
        return 0;
    uint64_t own_before = bytes_of(measure, (unsigned int)getpid()), own = bytes_of(&now, (unsigned int)getpid());
    uint64_t least = 0;
    int64_t listed = 0; /* what the processes that are listed grew by */
    for (unsigned int index = 0; index < now.count; index++) {
        uint64_t before = bytes_of(measure, now.processes[index].pid), bytes = now.processes[index].bytes;
        listed += (int64_t)(bytes - before);
        if (before == 0 && bytes > 0 && (least == 0 || bytes < least))
            least = bytes;
    }
    for (unsigned int index = 0; index < measure->count; index++)
        if (bytes_of(&now, measure->processes[index].pid) == 0)
            listed -= (int64_t)measure->processes[index].bytes; /* it has ended */
    int64_t grown = (int64_t)(now.used_bytes - measure->used_bytes) - listed;
    uint64_t unlisted = grown > 0 ? (uint64_t)grown : 0, ours = own > own_before ? own - own_before : least;
    if (ours > 0)
        return ours + (unlisted <= ours / VC__MOST_UNLISTED ? unlisted : 0);
    return own == 0 ? unlisted : 0;
}
