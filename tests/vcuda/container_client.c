/* A driver-API program without any other library, for images made from nothing: `info`, `alloc MIB...`, `hold MIB`. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int cuInit(unsigned);
int cuDeviceGet(int *, int);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(unsigned long long *, size_t);
int cuMemGetInfo_v2(size_t *, size_t *);

static void need(const char *what, int result)
{
    if (result != 0) {
        printf("%s %d\n", what, result);
        exit(1);
    }
}

int main(int count, char **words)
{
    void *context;
    int device;
    unsigned long long pointer;
    size_t left, total;
    setvbuf(stdout, NULL, _IOLBF, 0);
    need("cuInit", cuInit(0));
    need("cuDeviceGet", cuDeviceGet(&device, 0));
    need("cuDevicePrimaryCtxRetain", cuDevicePrimaryCtxRetain(&context, device));
    need("cuCtxSetCurrent", cuCtxSetCurrent(context));
    need("cuMemGetInfo", cuMemGetInfo_v2(&left, &total));
    printf("total %zu\n", total >> 20);
    for (int at = 2; at < count; at++)
        printf("alloc %s: %d\n", words[at], cuMemAlloc_v2(&pointer, (size_t)atoi(words[at]) << 20));
    while (strcmp(words[1], "hold") == 0)
        pause();
    return 0;
}
