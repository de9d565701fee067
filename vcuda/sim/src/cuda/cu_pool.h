/* What the parts of memory pools share: the pool, and how it gets, divides and gives back the card's memory. */
#ifndef CU_POOL_H
#define CU_POOL_H

#include "cu_memory.h"

/* Where a pool's memory lies. */
typedef enum { CU_POOL_ON_CARD, CU_POOL_ON_HOST, CU_POOL_MANAGED } cu_pool_place;

struct CUmemPoolHandle_st {
    int magic, device, alive, graph;
    int imported; /* from another process, which allocates */
    cu_pool_place place;
    struct CUmemPoolHandle_st *next;
    CUmemPoolProps props;
    uint32_t reached_by; /* bit per ordinal: cards beside its own that may access it */
    int reuse[3];      /* CU_MEMPOOL_ATTR_REUSE_*: after events, after completion, after a wait of the driver's own */
    uint64_t threshold, reserved, reserved_high, used, used_high;
    uint64_t taken;    /* of `reserved`: in use, or freed in an order that is not there yet */
    size_t blocks;     /* allocations that hold `taken` */
    int shared_fd;     /* exported or imported: names the pool to other processes; -1: neither */
    /* The ragged model only: */
    int ragged;
    uint64_t random;
    struct cu_segment *segments;
};

enum { CU_POOL_UNIT = 512 }; /* allocations are multiples of it */

static inline uint64_t cu_up(uint64_t bytes, uint64_t step)
{
    return (bytes + step - 1) / step * step;
}

/* Whether a handle is a pool's that the application may name. */
CUresult cu_pool_of(CUmemoryPool pool);
/* A pool of another process; takes over the descriptor. cu_lock held. */
CUmemoryPool cu_pool_imported(int device, int fd);

/* All with cu_lock held. How a pool on `device` manages its space: the card's `pools=`, or $VCUDA_SIM_POOLS.
 * What is drawn for the device's own pools, made `lazily`, is the same whoever asks for which of them first. */
void cu_space_begin(CUmemoryPool pool, int lazily);
/* A place of `bytes` in what the pool has; 0, or -1: it has none. */
int cu_space_take(CUmemoryPool pool, size_t bytes, cu_extent *extent);
void cu_space_give(CUmemoryPool pool, const cu_extent *extent);
/* Take so much from the card that cu_space_take succeeds. */
CUresult cu_space_grow(CUmemoryPool pool, size_t bytes);
/* Give back to the card what is not taken, as far as `keep` bytes stay; what was given back. */
uint64_t cu_space_release(CUmemoryPool pool, uint64_t keep);
/* What the attribute of used bytes says of `bytes` that were asked for. */
uint64_t cu_space_counted(const struct CUmemPoolHandle_st *pool, uint64_t bytes);

#endif
