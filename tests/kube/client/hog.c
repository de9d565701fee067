/* A CUDA driver-API client for containers: fills its share until the driver refuses, says what it saw, stays alive. */
#include <stdio.h>
#include <stdlib.h>
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

enum { STEP = 16 << 20 };

static void require(const char *what, CUresult result)
{
    if (result != 0) {
        printf("failed=%s result=%d\n", what, result);
        fflush(stdout);
        pause();
    }
}

int main(void)
{
    int count = 0;
    CUdevice device;
    CUcontext context;
    size_t available, total;
    require("cuInit", cuInit(0));
    require("cuDeviceGetCount", cuDeviceGetCount(&count));
    require("cuDeviceGet", cuDeviceGet(&device, 0));
    require("cuCtxCreate", cuCtxCreate_v2(&context, 0, device));
    require("cuMemGetInfo", cuMemGetInfo_v2(&available, &total));
    unsigned long long taken = 0;
    CUresult result;
    CUdeviceptr pointer;
    while ((result = cuMemAlloc_v2(&pointer, STEP)) == 0)
        taken += STEP;
    printf("devices=%d total=%zu taken=%llu result=%d\n", count, total, taken, result);
    fflush(stdout);
    for (;;)
        pause();
}
