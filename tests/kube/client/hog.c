/* A CUDA driver-API client for containers: fills its share until the driver refuses, says what it saw, stays alive. With the
 * argument "again" it gives all back and fills its share anew, twice a second, for as long as it lives. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int CUresult;
typedef int CUdevice;
typedef struct CUctx_st *CUcontext;
typedef unsigned long long CUdeviceptr;

CUresult cuInit(unsigned int flags);
CUresult cuDeviceGetCount(int *count);
CUresult cuDeviceGet(CUdevice *device, int ordinal);
CUresult cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device);
CUresult cuMemGetInfo_v2(size_t *free, size_t *total);
CUresult cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
CUresult cuMemFree_v2(CUdeviceptr pointer);

enum { STEP = 16 << 20, MOST = 4096 };

static void require(const char *what, CUresult result)
{
    if (result != 0) {
        printf("failed=%s result=%d\n", what, result);
        fflush(stdout);
        pause();
    }
}

/* Bytes taken until the driver refused; the last result in `result`. */
static unsigned long long fill(CUdeviceptr *taken, int *count, CUresult *result)
{
    *count = 0;
    *result = 0;
    while (*count < MOST && (*result = cuMemAlloc_v2(&taken[*count], STEP)) == 0)
        ++*count;
    return (unsigned long long)*count * STEP;
}

int main(int argc, char **argv)
{
    static CUdeviceptr taken[MOST];
    int devices = 0, count;
    CUdevice device;
    CUcontext context;
    CUresult result;
    size_t available, total;
    require("cuInit", cuInit(0));
    require("cuDeviceGetCount", cuDeviceGetCount(&devices));
    require("cuDeviceGet", cuDeviceGet(&device, 0));
    require("cuCtxCreate", cuCtxCreate_v2(&context, 0, device));
    require("cuMemGetInfo", cuMemGetInfo_v2(&available, &total));
    unsigned long long bytes = fill(taken, &count, &result);
    printf("devices=%d total=%zu taken=%llu result=%d\n", devices, total, bytes, result);
    fflush(stdout);
    for (int round = 1; argc > 1 && strcmp(argv[1], "again") == 0; round++) {
        while (count > 0)
            require("cuMemFree", cuMemFree_v2(taken[--count]));
        usleep(500000);
        bytes = fill(taken, &count, &result);
        require("cuMemGetInfo", cuMemGetInfo_v2(&available, &total));
        printf("round=%d total=%zu taken=%llu result=%d\n", round, total, bytes, result);
        fflush(stdout);
    }
    for (;;)
        pause();
}
