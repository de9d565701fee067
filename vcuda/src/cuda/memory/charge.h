/* One allocation's way through the quota: begin, then end with what the driver said.
 *
 * The driver's heaps take memory from the card in chunks of 2 MiB that small allocations share. So a small allocation is
 * charged the chunk that its address lies in, once for all that lie there, and the chunk is released with the last of
 * them: exact whatever the driver's own rules are, and without asking it. */
#ifndef VC_CHARGE_H
#define VC_CHARGE_H

#include "cuda/driver/cards.h"
#include "base/ledger.h"
#include "region/quota.h"

enum vc_memory_kind {
    VC_MEMORY_PLAIN,
    VC_MEMORY_MANAGED,
    VC_MEMORY_OVERSOLD, /* asked for as plain memory, given as managed memory */
    VC_MEMORY_OPAQUE, /* arrays: no address, the driver says the size */
    VC_MEMORY_SMALL_ARRAY, /* charged with its shape (small_array.h), whose number is in `bytes` */
    VC_MEMORY_POOL,   /* charged by its pool, listed here to find the pool again */
};

/* The driver takes memory from the card in pieces of this size; smaller allocations share one. */
#define VC_CHUNK ((uint64_t)2 << 20)

struct vc_charge {
    struct vc_region *region;
    CUcontext context; /* current when the charge began; NULL if it was begun for a device */
    int card;          /* >= 0: `reserved` is booked; VC_CARD_UNKNOWN: nothing is, the driver will refuse by itself */
    uint64_t reserved;
    bool managed; /* what is reserved need not be on the card */
};

/* Memory on its way back to the driver. */
struct vc_freeing {
    struct vc_entry entry;
    uint64_t bytes; /* of quota that become free when the driver has freed it */
};

uint64_t vc_round_up(uint64_t bytes, uint64_t multiple); /* saturates */

/* Reserve for the current context, or for a device. CUDA_ERROR_OUT_OF_MEMORY: refused, nothing is reserved, do not call
 * the driver. Before it refuses it gives back what the process's own pools hold idle, and tries again. */
CUresult vc_charge_current(struct vc_charge *charge, uint64_t bytes);
CUresult vc_charge_device(struct vc_charge *charge, CUdevice device, uint64_t bytes);

/* For managed memory, which an oversold share may have beyond its physical part. */
CUresult vc_charge_managed(struct vc_charge *charge, uint64_t bytes);

/* For plain memory that may be replaced by managed memory where the share is oversold: charge->managed then says so, a
 * line on stderr once in a process, and a counter in usage. */
CUresult vc_charge_either(struct vc_charge *charge, uint64_t bytes);

/* Change what is reserved to exactly `bytes`. False: that is over the limit; the reservation is as before. */
bool vc_charge_resize(struct vc_charge *charge, uint64_t bytes);

/* The driver put `bytes` at `pointer`: commit the chunks that this took from the card, and record it. False (over the
 * limit, or no host memory): the reservation is gone, the caller frees it and refuses. */
bool vc_charge_keep(struct vc_charge *charge, CUdeviceptr pointer, uint64_t bytes, enum vc_memory_kind kind);

/* The same for memory without an address: commits what is reserved. */
bool vc_charge_keep_opaque(struct vc_charge *charge, const void *handle);

/* The memory that `old` (NULL: none) stands for now takes `bytes` in all, for which what it takes more is reserved: commit
 * that, or give back what it takes less, and record it under the key. False (no host memory): everything is as before. */
bool vc_charge_replace(const struct vc_charge *charge, const struct vc_freeing *old, uint64_t key, uint64_t bytes);

/* Record a small array, charged with its shape. False: no host memory. */
bool vc_charge_record_array(const struct vc_charge *charge, uint32_t shape, const void *handle);

/* Record memory that its pool has charged. False: no host memory. */
bool vc_charge_record_pooled(CUdeviceptr pointer, uint64_t bytes, uint64_t pool, int card);

/* The driver refused. */
void vc_charge_drop(const struct vc_charge *charge);

/* Take out what is recorded under a pointer or handle, before the driver frees it; false: not ours, just forward. */
bool vc_charge_take(uint64_t key, struct vc_freeing *freeing);
/* After the driver's answer: release it, or (result is an error) record it again. */
void vc_charge_freed(const struct vc_freeing *freeing, CUresult result);

/* Everything that dies with a context, taken out like the above; free(3) the array. */
struct vc_freeing *vc_charge_take_context(CUcontext context, size_t *count);

#endif
