/* A libcuda that does nothing but keep a clock: every launch takes 10 us of a stream's time, events are moments of it.
 *
 * Behind the shim it shows what the shim itself adds to a launch; benchmarks/throttle.py builds it with -DCARD_UUID.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef void *handle;
#define API __attribute__((visibility("default"))) int

static const uint64_t KERNEL_NS = 10000;
static uint64_t busy_until;
static int waited_for; /* all of it, since the last launch: the next one begins when it comes, not when the last one ended */
static char dummy;
static __thread handle current;

static uint64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

API cuInit(unsigned flags) { return (int)flags; }
API cuDeviceGet(int *device, int ordinal) { return *device = ordinal; }
API cuDeviceGetCount(int *count) { *count = 1; return 0; }

API cuDeviceGetUuid_v2(unsigned char *uuid, int device)
{
    const char *text = CARD_UUID + 4; /* after "GPU-" */
    for (int i = 0; i < 16; text += 2) {
        unsigned byte;
        text += *text == '-';
        sscanf(text, "%2x", &byte);
        uuid[i++] = (unsigned char)byte;
    }
    return device;
}

API cuCtxCreate_v2(handle *context, unsigned flags, int device) { *context = current = &dummy; return (int)flags * device; }
API cuCtxDestroy_v2(handle context) { return context != &dummy; }
API cuCtxSetCurrent(handle context) { current = context; return 0; }
API cuCtxGetCurrent(handle *context) { *context = current; return 0; }
/* What interposers that are not ours ask before the first launch. */
API cuDriverGetVersion(int *version) { *version = 12040; return 0; }
API cuDeviceGetAttribute(int *value, int attribute, int device) { *value = attribute == 39 ? 2048 : 108; return device; }
API cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)1 << 34; return device; }
API cuDevicePrimaryCtxRetain(handle *context, int device) { *context = &dummy; return device; }
API cuDevicePrimaryCtxRelease_v2(int device) { return device; }

API cuMemGetInfo_v2(size_t *left, size_t *total) { *left = *total = (size_t)1 << 34; return 0; }
API cuCtxGetDevice(int *device) { return *device = 0; }
API cuModuleLoadData(handle *module, const void *image) { *module = (void *)image; return 0; }
API cuModuleGetFunction(handle *function, handle module, const char *name) { *function = &dummy; return !module || !name; }
API cuStreamCreate(handle *stream, unsigned flags) { *stream = malloc(1); return (int)(flags & 2); }

API cuCtxSynchronize(void)
{
    while (now_ns() < busy_until) {
        struct timespec pause = {0, 100000};
        nanosleep(&pause, NULL);
    }
    waited_for = 1;
    return 0;
}

/* The launch itself must cost next to nothing: the clock is only read where an event needs it, and behind a wait. */
API cuLaunchKernel(handle f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, handle s,
                   void **p, void **x)
{
    (void)f, (void)a, (void)b, (void)c, (void)d, (void)e, (void)g, (void)h, (void)s, (void)p, (void)x;
    if (waited_for) {
        busy_until = now_ns();
        waited_for = 0;
    }
    busy_until += KERNEL_NS;
    return 0;
}

API cuEventCreate(uint64_t **event, unsigned flags) { *event = calloc(1, sizeof **event); return (int)flags; }
API cuEventDestroy_v2(uint64_t *event) { free(event); return 0; }

/* How many were recorded: throttle_load looks at it around a launch. */
__attribute__((visibility("default"))) volatile uint64_t throttle_events;

API cuEventRecord(uint64_t *event, handle stream)
{
    throttle_events++;
    uint64_t now = now_ns();
    if (busy_until < now)
        busy_until = now;
    *event = busy_until;
    return !stream;
}

API cuEventQuery(const uint64_t *event) { return now_ns() < *event ? 600 : 0; }

API cuEventElapsedTime(float *milliseconds, const uint64_t *from, const uint64_t *to)
{
    *milliseconds = (float)((double)(int64_t)(*to - *from) / 1e6);
    return 0;
}

API cuThreadExchangeStreamCaptureMode(int *mode) { return *mode = 0; }

#define UNUSED(name) API name(void) { return 801; }
UNUSED(cuStreamBeginCapture_v2)
UNUSED(cuStreamEndCapture)
UNUSED(cuGraphInstantiateWithFlags)
UNUSED(cuGraphLaunch)
