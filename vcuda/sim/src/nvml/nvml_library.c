/* Initialisation, shutdown, and the checks that every call makes. */
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "nvml_internal.h"

sim_state *nv_state;

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int init_count;
static int64_t wall_minus_monotonic_ns; /* fixed per initialisation: the same moment always has the same time stamp */

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned flags);

static void read_clocks(void)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    wall_minus_monotonic_ns = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec - (int64_t)sim_now();
}

/* What opening the control node says, as the genuine library reports it. */
static nvmlReturn_t open_control_node(void)
{
    char path[3200];
    snprintf(path, sizeof path, "%s/nvidiactl", sim_device_folder(nv_state));
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0) {
        close(fd);
        return NVML_SUCCESS;
    }
    switch (errno) {
    case ENXIO: /* a node with no driver behind it */
    case ENODEV:
        return NVML_SUCCESS;
    case EACCES:
        return NVML_ERROR_NO_PERMISSION;
    case EPERM: /* the device cgroup's answer */
        return NVML_ERROR_UNKNOWN;
    default:
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
}

static pid_t attached_by;

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned flags)
{
    char why[512];
    nvmlReturn_t result = NVML_SUCCESS;
    if (flags & ~(unsigned)(NVML_INIT_FLAG_NO_GPUS | NVML_INIT_FLAG_NO_ATTACH))
        return NVML_ERROR_INVALID_ARGUMENT;
    pthread_mutex_lock(&init_mutex);
    if (init_count == 0) {
        /* A forked child has its parent's attachment, but may have closed what it stands on: it makes its own. */
        if (!nv_state || attached_by != getpid())
            nv_state = sim_attach(NULL, why, sizeof why);
        attached_by = getpid();
        result = nv_state ? open_control_node() : NVML_ERROR_DRIVER_NOT_LOADED;
        if (result == NVML_SUCCESS) {
            read_clocks();
            nv_cards_load();
        }
    }
    if (result == NVML_SUCCESS)
        init_count++;
    pthread_mutex_unlock(&init_mutex);
    return result;
}

/* As in the genuine library, these calls go through the linkage table: an interposer sees the inner one too. */
NVML_API nvmlReturn_t nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

NVML_API nvmlReturn_t nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

NVML_API nvmlReturn_t nvmlShutdown(void)
{
    pthread_mutex_lock(&init_mutex);
    const nvmlReturn_t result = init_count > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (init_count > 0)
        init_count--;
    pthread_mutex_unlock(&init_mutex);
    return result;
}

nvmlReturn_t nv_ready(void)
{
    return atomic_load_explicit(&init_count, memory_order_acquire) > 0 ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
}

nvmlReturn_t nv_check(nvmlDevice_t device, int arguments_ok)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (device < nv_cards || device >= nv_cards + nv_card_count || !device->visible || !arguments_ok)
        return NVML_ERROR_INVALID_ARGUMENT;
    const nvmlDevice_t card = nv_card_of(device);
    sim_slow_call(nv_state, card->index);
    return nv_is_lost(card->index) ? NVML_ERROR_GPU_IS_LOST : NVML_SUCCESS;
}

nvmlReturn_t nv_check_card(nvmlDevice_t device, int arguments_ok)
{
    const nvmlReturn_t result = nv_check(device, arguments_ok);
    return result == NVML_SUCCESS && device->parent >= 0 ? NVML_ERROR_NOT_SUPPORTED : result;
}

nvmlReturn_t nv_text(const char *text, char *buffer, unsigned size)
{
    if (strlen(text) >= size)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    memcpy(buffer, text, strlen(text) + 1);
    return NVML_SUCCESS;
}

unsigned long long nv_wall_us(uint64_t monotonic_ns)
{
    return (unsigned long long)((int64_t)monotonic_ns + wall_minus_monotonic_ns) / 1000;
}

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
    static const char *const texts[] = {
        "Success",
        "Uninitialized",
        "Invalid Argument",
        "Not Supported",
        "Insufficient Permissions",
        "Already Initialized",
        "Not Found",
        "Insufficient Size",
        "Insufficient External Power",
        "Driver Not Loaded",
        "Timeout",
        "Interrupt Request Issue",
        "NVML Shared Library Not Found",
        "Function Not Found",
        "Corrupted infoROM",
        "GPU is lost",
        "GPU requires reset",
        "GPU access blocked by the operating system",
        "Driver/library version mismatch",
        "In use by another client",
        "Insufficient Memory",
        "No data",
        "vGPU ECC not supported",
        "Insufficient Resources",
        "Invalid Frequency",
        "Argument version mismatch",
        "Requested functionality has been deprecated",
        "System is not in ready state",
        "No supported GPUs were found",
    };
    const unsigned number = (unsigned)result;
    return number < sizeof texts / sizeof *texts ? texts[number] : "Unknown Error";
}
