/* External memory: what another API of the card made, imported by descriptor and mapped as buffers. */
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cu_sharing.h"

enum { OPAQUE_FD = 1, MAGIC = 0x65787431 };

struct CUextMemory_st {
    int magic;
    struct CUextMemory_st *next;
    CUcontext ctx; /* whose end is its own */
    CUmemGenericAllocationHandle handle;
    size_t bytes;
};

typedef struct {
    int type;
    union {
        int fd;
        struct {
            void *handle;
            const void *name;
        } win32;
    } handle;
    unsigned long long size;
    unsigned int flags, reserved[16];
} memory_descriptor;

typedef struct {
    unsigned long long offset, size;
    unsigned int flags, reserved[16];
} buffer_descriptor;

_Static_assert(sizeof(memory_descriptor) == 104 && sizeof(buffer_descriptor) == 88, "ABI");

static struct CUextMemory_st *imports; /* under cu_lock */

/* Memory of an API that is not simulated is on the card all the same: who imports it first is taken to have made it. */
CU_EXPORT CUresult cuImportExternalMemory(struct CUextMemory_st **memory, const memory_descriptor *given)
{
    CUcontext ctx;
    uint64_t shared, bytes = 0;
    CUresult bad = cu_current(&ctx);
    if (bad || !memory || !given || !given->size)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (given->type != OPAQUE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    const off_t length = lseek(given->handle.fd, 0, SEEK_END);
    struct CUextMemory_st *made = length < 0 || (uint64_t)length < given->size ? NULL : calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_INVALID_VALUE;
    const size_t whole = (given->size + CU_CHUNK - 1) / CU_CHUNK * CU_CHUNK;
    pthread_mutex_lock(&cu_lock);
    const int device = cu_find_shared(given->handle.fd, &shared, &bytes);
    bad = cu_physical_import(dup(given->handle.fd), shared, device < 0 ? ctx->device : device, bytes ? bytes : whole,
                             &made->handle);
    if (!bad) {
        close(given->handle.fd); /* "ownership of the file descriptor is transferred" */
        made->magic = MAGIC;
        made->ctx = ctx;
        made->bytes = given->size;
        made->next = imports;
        imports = made;
        *memory = made;
    }
    pthread_mutex_unlock(&cu_lock);
    if (bad)
        free(made);
    return bad;
}

static void end(struct CUextMemory_st *memory)
{
    struct CUextMemory_st **link = &imports;
    while (*link != memory)
        link = &(*link)->next;
    *link = memory->next;
    memory->magic = 0;
    cu_physical_release(memory->handle);
    free(memory);
}

static CUresult memory_of(struct CUextMemory_st *memory)
{
    const struct CUextMemory_st *one = imports;
    while (one && one != memory)
        one = one->next;
    return one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Buffers that are mapped keep the memory until they are freed. */
CU_EXPORT CUresult cuDestroyExternalMemory(struct CUextMemory_st *memory)
{
    CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    bad = memory_of(memory);
    if (!bad)
        end(memory);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, struct CUextMemory_st *memory,
                                                   const buffer_descriptor *given)
{
    cu_block *block;
    CUresult bad = cu_initialised();
    if (bad || !pointer || !given || !given->size || given->flags || given->offset % 4096)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    bad = memory_of(memory);
    if (!bad && (given->offset > memory->bytes || given->size > memory->bytes - given->offset))
        bad = CUDA_ERROR_INVALID_VALUE;
    if (!bad)
        bad = cu_physical_map(memory->handle, memory->ctx, given->offset, given->size, &block);
    if (!bad) {
        block->flags = CU_IMPORT_EXTERNAL;
        *pointer = block->start;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

void cu_external_context_ended(CUcontext ctx)
{
    for (struct CUextMemory_st *one = imports, *next; one; one = next) {
        next = one->next;
        if (one->ctx == ctx)
            end(one);
    }
}
