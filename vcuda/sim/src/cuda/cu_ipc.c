/* cuIpc* memory handles, and pools that processes share. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cu_pool.h"
#include "cu_sharing.h"

typedef struct {
    char reserved[64];
} ipc_handle;

CU_EXPORT CUresult cuIpcGetMemHandle(ipc_handle *handle, CUdeviceptr pointer)
{
    cu_share share;
    const CUresult bad = cu_initialised();
    if (bad || !handle)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    cu_block *block = cu_find((uintptr_t)pointer);
    const int ours = block && block->kind == CU_BLOCK_PLAIN && cu_arena_pays(block) &&
                     !cu_share_block(block, CU_IMPORT_IPC, &share);
    pthread_mutex_unlock(&cu_lock);
    if (!ours)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(handle, &share, sizeof *handle);
    return CUDA_SUCCESS;
}

/* A handle that is open in the context already is counted. */
static cu_block *open_in(CUcontext ctx, const cu_share *share)
{
    const CUmemGenericAllocationHandle handle = cu_physical_shared(share->shared);
    return handle ? cu_outside_find(handle, ctx, CU_IMPORT_IPC) : NULL;
}

CU_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, ipc_handle handle, unsigned int flags)
{
    CUcontext ctx;
    cu_share share;
    CUresult bad = cu_current(&ctx);
    if (bad || !pointer || flags != 1) /* CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, which is required */
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    memcpy(&share, &handle, sizeof share);
    pthread_mutex_lock(&cu_lock);
    cu_block *block = open_in(ctx, &share);
    if (!block)
        bad = cu_share_open(&share, CU_IMPORT_IPC, ctx, &block);
    if (!bad) {
        block->registered++; /* how often it is open */
        *pointer = block->start + share.offset;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuIpcOpenMemHandle(CUdeviceptr *pointer, ipc_handle handle, unsigned int flags)
{
    return cuIpcOpenMemHandle_v2(pointer, handle, flags);
}

CU_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    cu_block *block = cu_find((uintptr_t)pointer);
    if (!block || block->kind != CU_BLOCK_IMPORTED || block->flags != CU_IMPORT_IPC)
        bad = CUDA_ERROR_INVALID_VALUE;
    else if (--block->registered == 0)
        cu_physical_unmap(block);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

/* ---- pools ---- */

typedef struct {
    uint64_t magic;
    int32_t card;
} pool_file;
#define POOL_MAGIC 0x6c6f6f50764d5353ull

CU_EXPORT CUresult cuMemPoolExportToShareableHandle(void *handle, CUmemoryPool pool, CUmemAllocationHandleType type,
                                                    unsigned long long flags)
{
    CUresult bad = cu_pool_of(pool);
    if (bad || !handle || flags || (int)type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || pool->imported ||
        (int)pool->props.handleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || pool->place != CU_POOL_ON_CARD)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    if (pool->shared_fd < 0) {
        const pool_file content = {POOL_MAGIC, cu_process.devices[pool->device].card};
        pool->shared_fd = memfd_create("cuda-pool", MFD_CLOEXEC);
        if (pool->shared_fd >= 0 && pwrite(pool->shared_fd, &content, sizeof content, 0) != sizeof content)
            bad = CUDA_ERROR_OUT_OF_MEMORY;
    }
    const int given = bad ? -1 : dup(pool->shared_fd);
    pthread_mutex_unlock(&cu_lock);
    if (given < 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *(int *)handle = given;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type,
                                                      unsigned long long flags)
{
    pool_file content = {0};
    const int fd = (int)(intptr_t)handle;
    const CUresult bad = cu_initialised();
    if (bad || !pool || flags || (int)type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        pread(fd, &content, sizeof content, 0) != sizeof content || content.magic != POOL_MAGIC ||
        cu_ordinal_of(content.card) < 0)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    *pool = cu_pool_imported(cu_ordinal_of(content.card), dup(fd));
    pthread_mutex_unlock(&cu_lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Of a pool that has been exported, and not before ("from an already shared memory pool"). */
CU_EXPORT CUresult cuMemPoolExportPointer(cu_share *data, CUdeviceptr pointer)
{
    const CUresult bad = cu_initialised();
    if (bad || !data)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    cu_block *block = cu_find((uintptr_t)pointer);
    const int ours = block && block->kind == CU_BLOCK_POOL && block->pool->shared_fd >= 0 &&
                     !cu_share_block(block, CU_IMPORT_POOL, data);
    pthread_mutex_unlock(&cu_lock);
    return ours ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, const cu_share *data)
{
    cu_block *block;
    CUresult bad = cu_pool_of(pool);
    if (bad || !pointer || !data || !pool->imported)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    bad = cu_share_open(data, CU_IMPORT_POOL, NULL, &block);
    if (!bad) { /* the block that is shared lies somewhere in the chunks that are mapped */
        block->extent.offset = data->offset;
        block->pool = pool;
        pool->blocks++;
        *pointer = block->start + data->offset;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad == CUDA_ERROR_INVALID_HANDLE ? CUDA_ERROR_INVALID_VALUE : bad;
}
