/* The witness: what each process holds, kept by the kernel where no other process can change it.
 *
 * Everything in the usage file can be written by every process of the container, so a ledger of zeros there proves nothing. Beside
 * its slot a process therefore holds a byte-range lock (of its open file description, beyond the data) that is as long as its
 * memory is large: a byte for each VC_WITNESS_UNIT. Nobody but its owner can shorten it, it ends with its owner, and everybody can ask
 * the kernel for it. Before a process takes more than it has witnessed, it looks at the others' witnesses: a slot that says much less than
 * its witness was written by somebody else, and memory is refused.
 *
 * Raised in steps of a unit, lowered only when VC_WITNESS_SLACK is free: allocating and freeing in turn asks the kernel nothing. So
 * at most VC_WITNESS_SLACK and a unit per process can be hidden here; the manager, who sees the driver's figures, notices those. */
#ifndef VC_WITNESS_H
#define VC_WITNESS_H

#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"

#define VC_WITNESS_UNIT ((uint64_t)2 << 20)
#define VC_WITNESS_SLACK ((uint64_t)16 << 20)

/* Witness what region->held_bytes says now, and look whether the others' slots agree with their witnesses. False: they do not, or
 * ours can't be kept; *why says so, and what was witnessed before stays. Pre: own slot. Any thread; takes up to 1 s where they don't. */
bool vc_witness_raise(struct vc_region *region, uint32_t card, const char **why);

/* Give back what is no longer held. Any thread, never waits. */
void vc_witness_lower(struct vc_region *region, uint32_t card);

/* Bytes that the owner of a slot has witnessed on a card, as others see it; usable with a read-only descriptor. */
uint64_t vc_witness_read(int descriptor, uint32_t slot, uint32_t card);

#endif
