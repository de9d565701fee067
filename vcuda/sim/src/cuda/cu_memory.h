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

typedef enum { CU_BLOCK_PLAIN, CU_BLOCK_MANAGED, CU_BLOCK_POOL, CU_BLOCK_GRAPH, CU_BLOCK_HOST, CU_BLOCK_VMM,
               CU_BLOCK_IMPORTED } cu_block_kind;

/* A place inside a pool (cu_pool_space.c). */
typedef struct {
    struct cu_segment *segment; /* NULL where the pool does not fragment */
    size_t offset, bytes;
} cu_extent;

typedef struct cu_block {
    uintptr_t start;
    size_t bytes;   /* as asked for */
    size_t charged; /* by this block itself; what shares a chunk charges the chunk */
    cu_block_kind kind;
    int device; /* ordinal */
    unsigned flags; /* host and managed memory: as given; VMM: protection; imported: how */
    int registered; /* host memory that the application owns; imported: how often it is open */
    int references; /* graph memory: nodes that name it */
    int fixed;      /* a module's variable: not the application's to free */
    int uses;       /* graph memory: launches that hold it; 0: its node is not allocated */
    int held;       /* graph memory: allocated, and no free has been submitted */
    int freed;      /* in stream order, and its stream has not got there: no pointer of the application's any more */
    CUcontext ctx;  /* NULL: belongs to the device, as what comes from pools */
    CUmemoryPool pool;
    cu_extent extent;
    size_t counted; /* by the pool's used bytes */
    CUmemGenericAllocationHandle handle; /* VMM */
    unsigned long long id;
} cu_block;

/* All with cu_lock held. `charge` says whether the card pays here (pools and graphs pay in chunks of their own). `ctx` is
 * whose end ends the block too; NULL: nobody's. */
CUresult cu_place(CUcontext ctx, int device, size_t bytes, cu_block_kind kind, int charge, cu_block **block);
/* The same in chunks that small blocks of other drawers (below 6) do not share. */
CUresult cu_place_in(CUcontext ctx, int device, size_t bytes, cu_block_kind kind, int charge, int drawer, cu_block **block);
void cu_unplace(cu_block *block);
/* The block that contains an address, device or host; NULL if none does, or if it has been freed in stream order. */
cu_block *cu_find(uintptr_t address);
/* The part of the arena that the block is in, which other processes may map (cu_sharing.h): its name there, 0 while it has none. */
uint64_t *cu_arena_part(const cu_block *block, uintptr_t *start, size_t *bytes);
void cu_arena_shared(const cu_block *block, uint64_t shared);
/* Whether the card is paid for the block by itself or its slab: not what belongs to a pool, a module or a sparse array. */
int cu_arena_pays(const cu_block *block);
/* Whether the address is in a part that is shared. */
int cu_arena_is_shared(uintptr_t address);
/* Blocks outside the arena: host memory, VMM mappings, what other processes share. */
int cu_outside_add(const cu_block *block);
void cu_outside_remove(cu_block *block);
/* A mapping of imported memory. */
cu_block *cu_outside_find(CUmemGenericAllocationHandle handle, CUcontext ctx, unsigned flags);
/* Each block of the context (NULL: of none), in no order; may be unplaced by `visit`. */
void cu_each_block(CUcontext ctx, void (*visit)(cu_block *block));

/* Charge and discharge the device's card. Takes nothing but the card's lock; retries after trimming idle pools. */
CUresult cu_charge(int device, uint64_t bytes);
void cu_discharge(int device, uint64_t bytes);
/* The same; `managed` memory counts against no control group's limit. */
CUresult cu_charge_as(int device, uint64_t bytes, int managed);
void cu_discharge_as(int device, uint64_t bytes, int managed);
/* Physical memory by handle (cu_vmm.c); all with cu_lock held. Keep it like a mapping does, or (-1) let it go; -1: there is none. */
int cu_physical_keep(CUmemGenericAllocationHandle handle, int by);
/* What was exported and is open nowhere any more goes. cu_lock held. */
void cu_physical_sweep(void);
int cu_physical_device(CUmemGenericAllocationHandle handle);
/* A handle that no card pays for: a multicast object. */
CUresult cu_physical_add_free(int device, size_t bytes, CUmemGenericAllocationHandle *handle);
/* A handle's object is gone: what it kept is let go (cu_multicast.c). */
void cu_multicast_ended(CUmemGenericAllocationHandle handle);
/* The same for a sparse array. */
void cu_sparse_ended(const void *array);
/* The same for all sparse arrays of a context. */
void cu_sparse_context_ended(CUcontext ctx);

/* An injected allocation failure, slowness or loss; call once per allocating API call, no lock held. */
CUresult cu_alloc_fault(CUcontext ctx);
CUresult cu_alloc_fault_on(int device);

/* ---- what stream order frees (cu_order.c); all with cu_lock held ---- */

/* The block is the application's no longer, and is gone when the stream gets to where it is now. */
CUresult cu_order_free(CUstream stream, cu_block *block);
/* End all blocks whose streams have got to their frees. Costs nothing where none waits. */
void cu_order_settle(void);
/* The context's streams end: what they still had to free is freed now. */
void cu_order_end(CUcontext ctx);
/* The same for graph memory that is about to be unplaced. */
void cu_order_forget(const cu_block *block);
/* An extent of `pool` with `bytes` at least that work before `stream`'s next operation gives back; `any`: of any stream, after
 * a wait that is put into `stream`. -1: there is none. */
int cu_order_reuse(CUmemoryPool pool, size_t bytes, CUstream stream, int any, cu_extent *extent);
/* `stream` now waits for what another stream had submitted at `ticket`. */
void cu_order_follows(CUstream stream, int card, const sim_ticket *ticket);
/* The block's accounts end, and its place. */
void cu_block_end(cu_block *block);

/* Bring a managed block to a card (-1: to the host) if it is elsewhere and has the room; whether it moved. cu_lock held. */
int cu_managed_move(cu_block *block, int device);

/* ---- pools ---- */
CUmemoryPool cu_pool_default(int device); /* cu_lock held */
CUmemoryPool cu_pool_graph(int device);   /* cu_lock held */
/* The block's place goes back to its pool. cu_lock held. */
void cu_pool_forget(cu_block *block);
/* A graph's block while it is allocated, between its allocation and its free node. cu_lock held. */
CUresult cu_graph_memory_use(cu_block *block);
void cu_graph_memory_drop(cu_block *block);
/* Give back what pools hold beyond their release threshold: at synchronisation points. */
void cu_pools_settle(int device);
/* Give back all that pools of the device hold unused; the number of bytes. cu_lock held. */
uint64_t cu_pools_trim(int device);
/* End all allocations from the device's pools, and those of the pools that can be destroyed. cu_lock held. */
void cu_pools_reset(int device);
/* Free at once, or (with a stream) when the stream gets there. Takes cu_lock. */
CUresult cu_free_block(CUdeviceptr pointer, CUstream stream);

void cu_memory_end(CUcontext ctx);

#endif
