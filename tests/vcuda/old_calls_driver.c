/* The simulated driver with calls that its version does not have: those of before CUDA 3.2, with 32-bit addresses, and newer ones.
 * Loaded as the real driver of a share; SIMULATED is the path of the simulated one, which this library needs by that path. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define API __attribute__((visibility("default"))) int
#define REAL(name) (*(int (**)())&(void *){real(#name)})

typedef unsigned long long address;

static void *real(const char *name)
{
    static void *driver;
    if (!driver)
        driver = dlopen(SIMULATED, RTLD_NOW | RTLD_LOCAL);
    return dlsym(driver, name);
}

/* Of the two figures either may be left out: nothing that NVIDIA publishes says that it may not. */
API cuMemGetInfo_v2(size_t *free_bytes, size_t *total)
{
    size_t ignored;
    return REAL(cuMemGetInfo_v2)(free_bytes ? free_bytes : &ignored, total ? total : &ignored);
}

API cuMemGetInfo(unsigned *free_bytes, unsigned *total)
{
    unsigned ignored;
    return REAL(cuMemGetInfo)(free_bytes ? free_bytes : &ignored, total ? total : &ignored);
}

/* An address of the old calls is a place in this table. */
static address addresses[64];

static unsigned remember(address found)
{
    unsigned place = 1;
    while (addresses[place])
        place++;
    addresses[place] = found;
    return place;
}

API cuMemAlloc(unsigned *pointer, unsigned bytes)
{
    address found = 0;
    int result = REAL(cuMemAlloc_v2)(&found, (size_t)bytes);
    if (result == 0)
        *pointer = remember(found);
    return result;
}

API cuMemAllocPitch(unsigned *pointer, unsigned *pitch, unsigned width, unsigned height, unsigned element)
{
    address found = 0;
    size_t row = 0;
    int result = REAL(cuMemAllocPitch_v2)(&found, &row, (size_t)width, (size_t)height, element);
    if (result == 0) {
        *pointer = remember(found);
        *pitch = (unsigned)row;
    }
    return result;
}

API cuMemFree(unsigned pointer)
{
    int result = pointer < 64 && addresses[pointer] ? REAL(cuMemFree_v2)(addresses[pointer]) : 1;
    if (result == 0)
        addresses[pointer] = 0;
    return result;
}

struct flat {
    size_t width, height;
    int format;
    unsigned channels;
};
struct solid {
    size_t width, height, depth;
    int format;
    unsigned channels, flags;
};

API cuArrayCreate(void **array, const unsigned *shape)
{
    struct flat given = {0};
    if (!shape)
        return 1;
    given = (struct flat){shape[0], shape[1], (int)shape[2], shape[3]};
    return REAL(cuArrayCreate_v2)(array, &given);
}

API cuArray3DCreate(void **array, const unsigned *shape)
{
    struct solid given = {0};
    if (!shape)
        return 1;
    given = (struct solid){shape[0], shape[1], shape[2], (int)shape[3], shape[4], shape[5]};
    return REAL(cuArray3DCreate_v2)(array, &given);
}

API cuCtxCreate_v4(void **context, void *parameters, unsigned flags, int device)
{
    return parameters ? 1 : REAL(cuCtxCreate_v2)(context, flags, device);
}

API cuCtxSynchronize_v2(void *context)
{
    int result = REAL(cuCtxPushCurrent_v2)(context);
    if (result != 0)
        return result;
    result = REAL(cuCtxSynchronize)();
    REAL(cuCtxPopCurrent_v2)(NULL);
    return result;
}

API cuMulticastBindMem_v2(address group, int device, size_t offset, address memory, size_t from, size_t bytes, address flags)
{
    return device ? 101 : REAL(cuMulticastBindMem)(group, offset, memory, from, bytes, flags);
}

API cuMulticastBindAddr_v2(address group, int device, size_t offset, address pointer, size_t bytes, address flags)
{
    return device ? 101 : REAL(cuMulticastBindAddr)(group, offset, pointer, bytes, flags);
}

/* A version of a call that nobody knew when the shim was built. */
static int newest(void)
{
    return 0;
}

API cuGetProcAddress_v2_ptsz(const char *name, void **function, int version, uint64_t flags, int *status)
{
    if (version >= 99000 && strcmp(name, "cuMemAlloc") == 0) {
        *function = (void *)newest;
        return 0;
    }
    return REAL(cuGetProcAddress_v2)(name, function, version, flags | 2, status);
}
