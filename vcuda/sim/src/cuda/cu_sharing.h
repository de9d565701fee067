/* Memory that processes hand to each other: by file descriptor, by IPC handle, through pools, as external memory. */
#ifndef CU_SHARING_H
#define CU_SHARING_H

#include "cu_memory.h"

#define CU_PHYSICAL_NAME "cuda-physical-" /* then the card's index: name of the memory files of cuMemCreate */

/* The name by which the machine knows the file's memory, whoever opens it. */
uint64_t cu_file_id(int fd);

/* All with cu_lock held. Share a handle's memory; a new descriptor of it, or -1. */
int cu_physical_export(CUmemGenericAllocationHandle handle, uint64_t *shared);
/* A handle of memory that is in `fd` (taken over, also by a failure). Nobody's memory any more is paid by this process. */
CUresult cu_physical_import(int fd, uint64_t shared, int device, size_t bytes, CUmemGenericAllocationHandle *handle);
/* Map part of it at an address of its own; as a block of `ctx`. */
CUresult cu_physical_map(CUmemGenericAllocationHandle handle, CUcontext ctx, size_t offset, size_t bytes, cu_block **made);
void cu_physical_unmap(cu_block *block);
/* Our handle of that memory; 0: none. */
CUmemGenericAllocationHandle cu_physical_shared(uint64_t shared);
void cu_physical_release(CUmemGenericAllocationHandle handle);

/* The ordinal of a card in this process; -1: not visible here. */
int cu_ordinal_of(int card);
/* Which visible card has the memory behind a descriptor, its size (0: nobody holds it any more) and its name. -1: none can have it. */
int cu_find_shared(int fd, uint64_t *shared, uint64_t *bytes);

/* What an imported block is: what ends it differs. */
enum { CU_IMPORT_IPC = 1, CU_IMPORT_POOL, CU_IMPORT_EXTERNAL };

/* A part of the arena that other processes may map: its file, and where the block is in it. */
typedef struct {
    uint64_t magic, shared;
    uint64_t offset, bytes, span; /* of the block, its size, size of the file */
    int32_t card, slot;
    uint32_t generation, kind;
    uint64_t unused[1];
} cu_share;
_Static_assert(sizeof(cu_share) == 64, "the size of a CUipcMemHandle and of a CUmemPoolPtrExportData");

/* Put the memory of the block's chunks into a file that others can open, and fill in `share`. 0, or -1. */
int cu_share_block(cu_block *block, uint32_t kind, cu_share *share);
/* Open it in another process. */
CUresult cu_share_open(const cu_share *share, uint32_t kind, CUcontext ctx, cu_block **made);
/* The file of a part of the arena that ends. */
void cu_share_unlink(uint64_t shared);

/* cu_external.c: the context's objects end with it. cu_lock held. */
void cu_external_context_ended(CUcontext ctx);

#endif
