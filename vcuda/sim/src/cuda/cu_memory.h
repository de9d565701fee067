/* The process's memory map: device blocks in one reserved arena, host blocks, VMM mappings; and what is charged to
 * the card.
 *
 * A device pointer is a host address in a large mapping without reserve, so that copies and sets keep data and
 * untouched memory costs nothing. Blocks below 1 MiB share charged chunks of 2 MiB, larger ones are charged in
 * multiples of 2 MiB, as the driver does.
 */
#ifndef CU_MEMORY_H
#define CU_MEMORY_H

#include "cu_client.h"

#define CU_CHUNK (2ull << 20)

typedef enum { CU_BLOCK_PLAIN, CU_BLOCK_MANAGED, CU_BLOCK_POOL, CU_BLOCK_GRAPH, CU_BLOCK_HOST, CU_BLOCK_VMM } cu_block_kind;

typedef struct cu_block {
    uintptr_t start;
    size_t bytes;   /* as asked for */
    size_t charged; /* by this block itself; what shares a chunk charges the chunk */
    cu_block_kind kind;
    int device; /* ordinal */
    unsigned flags; /* host memory: as given */
    int registered; /* host memory that the application owns */
    int references; /* graph memory: nodes that name it */
    CUcontext ctx;
    CUmemoryPool pool;
    CUmemGenericAllocationHandle handle; /* VMM */
    unsigned long long id;
} cu_block;

/* All with cu_lock held. `charge` says whether the card pays here (pools and graphs pay in chunks of their own). */
CUresult cu_place(CUcontext ctx, size_t bytes, cu_block_kind kind, int charge, cu_block **block);
void cu_unplace(cu_block *block);
/* The block that contains an address, device or host; NULL if none does. */
cu_block *cu_find(uintptr_t address);
/* Blocks outside the arena: host memory and VMM mappings. */
int cu_outside_add(const cu_block *block);
void cu_outside_remove(cu_block *block);
/* Each block of the context, in no order; may be unplaced by `visit`. */
void cu_each_block(CUcontext ctx, void (*visit)(cu_block *block));

/* Charge and discharge the device's card. Takes nothing but the card's lock; retries after trimming idle pools. */
CUresult cu_charge(int device, uint64_t bytes);
void cu_discharge(int device, uint64_t bytes);
/* Physical memory by handle (cu_vmm.c); all with cu_lock held. Keep it like a mapping does, or (-1) let it go; -1: there is none. */
int cu_physical_keep(CUmemGenericAllocationHandle handle, int by);
int cu_physical_device(CUmemGenericAllocationHandle handle);
/* A handle that no card pays for: a multicast object. */
CUresult cu_physical_add_free(int device, size_t bytes, CUmemGenericAllocationHandle *handle);
/* A handle's object is gone: what it kept is let go (cu_multicast.c). */
void cu_multicast_ended(CUmemGenericAllocationHandle handle);
/* The same for a sparse array. */
void cu_sparse_ended(const void *array);

/* An injected allocation failure, slowness or loss; call once per allocating API call, no lock held. */
CUresult cu_alloc_fault(CUcontext ctx);
CUresult cu_alloc_fault_on(int device);

/* ---- pools ---- */
CUresult cu_pool_alloc(CUcontext ctx, CUmemoryPool pool, size_t bytes, CUdeviceptr *pointer);
void cu_pool_forget(cu_block *block); /* cu_lock held */
CUmemoryPool cu_pool_default(int device); /* cu_lock held */
CUmemoryPool cu_pool_graph(int device);   /* cu_lock held */
/* A graph's block while it is allocated, between its allocation and its free node. cu_lock held. */
CUresult cu_graph_memory_use(cu_block *block);
void cu_graph_memory_drop(cu_block *block);
/* Give back what pools hold beyond their release threshold: at synchronisation points. */
void cu_pools_settle(int device);
/* Give back all that pools of the device hold unused; the number of bytes. cu_lock held. */
uint64_t cu_pools_trim(int device);
CUresult cu_free_block(CUdeviceptr pointer);

void cu_memory_end(CUcontext ctx);

#endif
