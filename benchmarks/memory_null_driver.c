/* A libcuda that gives out addresses and nothing else: behind the shim it shows what the shim itself adds to an allocation.
 *
 * benchmarks/memory.py builds it with -DCARD_UUID. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef void *handle;
#define API __attribute__((visibility("default"))) int

static unsigned long long next = 1ull << 32, freed;
static char dummy;

API cuInit(unsigned flags) { return (int)flags; }
API cuDeviceGet(int *device, int ordinal) { return *device = ordinal; }
API cuDeviceGetCount(int *count) { *count = 1; return 0; }
API cuCtxCreate_v2(handle *context, unsigned flags, int device) { *context = &dummy; return (int)flags + device; }
API cuCtxGetCurrent(handle *context) { *context = &dummy; return 0; }
API cuCtxGetDevice(int *device) { return *device = 0; }

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

/* The last freed address is given again, as a driver does: the shim's books must bear that. */
API cuMemAlloc_v2(unsigned long long *pointer, size_t bytes)
{
    if (freed) {
        *pointer = freed;
        freed = 0;
    } else {
        *pointer = next;
        next += (bytes + 511) / 512 * 512;
    }
    return 0;
}

API cuMemFree_v2(unsigned long long pointer)
{
    freed = pointer;
    return 0;
}
