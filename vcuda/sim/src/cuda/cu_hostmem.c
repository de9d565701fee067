/* Pinned host memory, registered host memory. */
#include <stdlib.h>
#include <sys/mman.h>

#include "cu_memory.h"

static CUresult host_alloc(void **pointer, size_t bytes, unsigned flags)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !pointer || !bytes || flags > 7)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    void *where = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (where == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const cu_block block = {.start = (uintptr_t)where, .bytes = bytes, .kind = CU_BLOCK_HOST, .device = ctx->device,
                            .flags = flags, .ctx = ctx};
    pthread_mutex_lock(&cu_lock);
    const int failed = cu_outside_add(&block);
    pthread_mutex_unlock(&cu_lock);
    if (failed) {
        munmap(where, bytes);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = where;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    return host_alloc(pointer, bytes, flags);
}

CU_EXPORT CUresult cuMemAllocHost_v2(void **pointer, size_t bytes)
{
    return host_alloc(pointer, bytes, 0);
}

CU_EXPORT CUresult cuMemAllocHost(void **pointer, unsigned int bytes)
{
    return host_alloc(pointer, bytes, 0);
}

static CUresult forget(void *pointer, int registered, CUresult missing)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    size_t bytes = 0;
    pthread_mutex_lock(&cu_lock);
    cu_block *block = cu_find((uintptr_t)pointer);
    if (!block || block->start != (uintptr_t)pointer || block->kind != CU_BLOCK_HOST || block->registered != registered) {
        bad = missing;
    } else {
        bytes = block->bytes;
        cu_outside_remove(block);
    }
    pthread_mutex_unlock(&cu_lock);
    if (!bad && !registered) {
        bad = cu_context_wait(ctx);
        munmap(pointer, bytes);
    }
    return bad;
}

CU_EXPORT CUresult cuMemFreeHost(void *pointer)
{
    return pointer ? forget(pointer, 0, CUDA_ERROR_INVALID_VALUE) : cu_initialised();
}

CU_EXPORT CUresult cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (bad || !pointer || !bytes || flags > 15)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const cu_block block = {.start = (uintptr_t)pointer, .bytes = bytes, .kind = CU_BLOCK_HOST, .device = ctx->device,
                            .flags = flags, .registered = 1, .ctx = ctx};
    pthread_mutex_lock(&cu_lock);
    if (cu_find((uintptr_t)pointer) || cu_find((uintptr_t)pointer + bytes - 1))
        bad = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    else if (cu_outside_add(&block))
        bad = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    return cuMemHostRegister_v2(pointer, bytes, flags);
}

CU_EXPORT CUresult cuMemHostUnregister(void *pointer)
{
    return forget(pointer, 1, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
}

static CUresult host_info(void *pointer, CUdeviceptr *device_pointer, unsigned *flags)
{
    CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)pointer);
    if (!block || (block->kind != CU_BLOCK_HOST && block->kind != CU_BLOCK_MANAGED))
        bad = CUDA_ERROR_INVALID_VALUE;
    else if (flags)
        *flags = block->flags | 2; /* every allocation is mapped under unified addressing */
    pthread_mutex_unlock(&cu_lock);
    if (!bad && device_pointer)
        *device_pointer = (uintptr_t)pointer;
    return bad;
}

CU_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *device_pointer, void *pointer, unsigned int flags)
{
    return device_pointer && pointer && !flags ? host_info(pointer, device_pointer, NULL) : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemHostGetFlags(unsigned int *flags, void *pointer)
{
    return flags && pointer ? host_info(pointer, NULL, flags) : CUDA_ERROR_INVALID_VALUE;
}
