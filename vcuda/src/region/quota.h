/* The memory quota: reserve in the region, call the driver, then commit or roll back. No lock, exact across processes.
 *
 * A process adds to its own slot's `reserved_bytes`, then sums the slots of all processes. The add and the sum are
 * sequentially consistent, so of two that race at least one sees the other, and the sum of successful reservations
 * never exceeds the limit. Every counter has one writing process and dies with its slot: nothing that a SIGKILL
 * interrupts stays booked. `reserved_bytes` includes what is committed.
 *
 * The slots lie in a file that every process of the container may write. A process therefore also counts what it was granted where
 * nobody else can (held_bytes), and lets the kernel witness it (witness.h): an account that was damaged refuses, it never forgets.
 *
 * Pre of all functions: region->state is ENFORCED or UNCOUNTED, card < region->card_count. Any thread, no lock held. */
#ifndef VC_QUOTA_H
#define VC_QUOTA_H

#include "region/slot.h"

/* What a booking is for, besides the totals. */
enum vc_quota_kind {
    VC_QUOTA_PLAIN,
    VC_QUOTA_CONTEXT, /* one context: also counted in context_bytes and contexts */
    VC_QUOTA_MANAGED, /* also counted in managed_bytes */
    VC_QUOTA_OVERSOLD, /* managed memory in place of the plain memory that was asked for: counted in both */
};

/* Try to reserve. False: the limit is reached (or this process has no slot), nothing is booked. Takes at most 20 ms, and
 * that only while other processes' unfinished reservations stand in the way. */
bool vc_quota_reserve(struct vc_region *region, uint32_t card, uint64_t bytes);

/* The same for managed memory, which need not be on the card: where the share is oversold (VC_CARD_OVERSELL) only the quota
 * is looked at, while vc_quota_reserve also keeps what is not managed within physical_bytes. */
bool vc_quota_reserve_managed(struct vc_region *region, uint32_t card, uint64_t bytes);

/* Whether so much could fit beside the container's contexts if everything else were given back. False: to ask for room is of no use. */
bool vc_quota_could_fit(const struct vc_region *region, uint32_t card, uint64_t bytes, bool managed);

/* Reserve all that is left, for what nobody can tell the size of before it is there; returns how much. Of a whole card: nothing. It counts
 * as no peak: what is not needed goes back at once. */
uint64_t vc_quota_reserve_rest(struct vc_region *region, uint32_t card);

/* Whether the share is oversold: then memory that was refused may be had as managed memory. */
bool vc_quota_oversells(const struct vc_region *region, uint32_t card);

/* Count one refusal in usage; separate, because a caller may trim and try again before it refuses. */
void vc_quota_refused(struct vc_region *region, uint32_t card);

/* The driver granted what was reserved. */
void vc_quota_commit(struct vc_region *region, uint32_t card, uint64_t bytes, enum vc_quota_kind kind);

/* The driver did not grant it. */
void vc_quota_rollback(struct vc_region *region, uint32_t card, uint64_t bytes);

/* Committed memory was freed; call it after the driver's free returned, never before. */
void vc_quota_release(struct vc_region *region, uint32_t card, uint64_t bytes, enum vc_quota_kind kind);

/* Book memory that the driver has taken already (true-up of an estimate): never refused, may exceed the limit. */
void vc_quota_charge(struct vc_region *region, uint32_t card, uint64_t bytes, enum vc_quota_kind kind);

/* Bytes that the container uses on the card: commitments of all slots plus the card's overhead. */
uint64_t vc_quota_used(const struct vc_region *region, uint32_t card);

/* The limit in force; UINT64_MAX for a whole card. */
uint64_t vc_quota_limit(const struct vc_region *region, uint32_t card);

#endif
