/* Preloaded: while told to fail, or for so many times, the shim, and nobody else, gets no memory of the host. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <string.h>

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);

static int failing, failed;

/* From now on the next `count` fail; -1: all. Returns how often it failed since the last time. */
int fail_allocations(int count)
{
    int times = failed;
    failing = count;
    failed = 0;
    return times;
}

static int fails(const void *caller)
{
    static const char name[] = "/lib64/libcuda.so.1";
    Dl_info found;
    if (!failing || !dladdr(caller, &found) || !found.dli_fname)
        return 0;
    size_t length = strlen(found.dli_fname);
    if (length < sizeof name - 1 || strcmp(found.dli_fname + length - (sizeof name - 1), name) != 0)
        return 0;
    failed++;
    failing -= failing > 0;
    return 1;
}

void *malloc(size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes)
{
    return fails(__builtin_return_address(0)) ? NULL : __libc_realloc(old, bytes);
}
