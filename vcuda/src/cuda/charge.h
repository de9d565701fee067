/* One allocation's way through the quota: begin, then end with what the driver said. */
#ifndef VC_CHARGE_H
#define VC_CHARGE_H

#include "cards.h"
#include "vc_ledger.h"
#include "vc_quota.h"

enum vc_memory_kind {
    VC_MEMORY_PLAIN,
    VC_MEMORY_MANAGED,
    VC_MEMORY_POOL, /* charged by its pool, listed here to find the pool again */
};

struct vc_charge {
    struct vc_region *region;
    CUcontext context; /* current when the charge began; NULL if it was begun for a device */
    int card;          /* >= 0: `bytes` are reserved; VC_CARD_UNKNOWN: nothing is, the driver will refuse by itself */
    uint64_t bytes;
};

/* What the driver really takes for a plain allocation of `bytes`. */
uint64_t vc_round_plain(uint64_t bytes);

/* Reserve for the current context, or for a device. CUDA_ERROR_OUT_OF_MEMORY: refused, nothing is reserved, do not call
 * the driver. Before it refuses it gives back what the process's own pools hold idle, and tries again. */
CUresult vc_charge_current(struct vc_charge *charge, uint64_t bytes);
CUresult vc_charge_device(struct vc_charge *charge, CUdevice device, uint64_t bytes);

/* The driver allocated `key`: commit and record it. False: no host memory to record it in; the reservation is gone, the
 * caller frees and refuses. */
bool vc_charge_keep(const struct vc_charge *charge, uint64_t key, enum vc_memory_kind kind);

/* The driver refused. */
void vc_charge_drop(const struct vc_charge *charge);

/* What is recorded under a pointer, taken out before the driver frees it; false: not ours, just forward. */
bool vc_charge_take(uint64_t key, struct vc_entry *entry);
/* After the driver's answer: release it, or (result is an error) record it again. */
void vc_charge_freed(const struct vc_entry *entry, CUresult result);

/* Record memory that its pool has charged. False: no host memory. */
bool vc_charge_record_pooled(uint64_t key, uint64_t bytes, uint64_t pool, uint32_t card);

/* Everything that dies with a context: taken out before, released or recorded again after. Free(3) the array. */
struct vc_entry *vc_charge_take_context(CUcontext context, size_t *count);

#endif
