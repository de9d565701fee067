/* A process's view of its container's region: finding it, mapping it, owning a slot in it.
 *
 * Locking of this module: vc_region_get and vc_region_slot (slot.h) may be called from any thread at any time, also in
 * a forked child; they take a private mutex only on their slow path (first call in a process) and never hold it across a call
 * of the driver. The structure they return lives as long as the process. */
#ifndef VC_REGION_H
#define VC_REGION_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "region/abi.h"
#include "base/atomic.h"
#include "region/descriptor.h"

enum vc_region_state {
    VC_REGION_ABSENT,   /* nothing is configured: pass everything through */
    VC_REGION_ENFORCED, /* limits and usage are mapped */
    VC_REGION_UNCOUNTED, /* limits are mapped, usage can't be used: memory refused, guaranteed share, no lending */
    VC_REGION_DAMAGED,  /* limits exist but can't be read: memory refused, compute unthrottled */
};

/* What this process has witnessed (witness.h). */
struct vc_witness {
    pthread_mutex_t mutex;
    int descriptor; /* a file description of its own: its locks end with it */
    void *page;     /* keeps the locks where the descriptor is closed */
    uint64_t bytes[VC_MAX_CARDS];
    uint32_t behind[VC_MAX_CARDS]; /* memory was given back while another thread held the mutex, which is to lower it */
};

struct vc_region {
    enum vc_region_state state;
    uint32_t card_count;            /* cards of the share; 0 in ABSENT and DAMAGED */
    const struct vc_limits *limits; /* read-only mapping; NULL in ABSENT and DAMAGED */
    struct vc_usage *usage;         /* shared in ENFORCED, private zeroed memory in UNCOUNTED; else NULL */

    /* Private to this folder. */
    struct vc_slot *slot;        /* own slot, or NULL while none is claimed */
    uint64_t next_claim_ns;      /* after a failed claim: not again before this time */
    uint32_t contending;         /* one thread of the process at a time holds its reservation while it waits */
    pthread_mutex_t slow_mutex;  /* claiming and reaping: OFD locks of one process never conflict with each other */
    struct vc_usage_file file;
    uint64_t held_bytes[VC_MAX_CARDS]; /* granted to this process: what no other process can write; its slot never says less */
    uint32_t seen_slots;               /* at least so many slots are in use, whatever slot_high_water says */
    uint32_t damaged;                  /* our slot was written by somebody else: memory is refused */
    struct vc_witness witness;
    struct vc_hold *holds;  /* what this process holds that another one owns (shared.h); guarded by slow_mutex */
    uint64_t shared_chunks; /* numbers that were given to what it owns and others may hold */
};

/* What the first look found. It lives in a page that the kernel wipes in a forked child, however it forked: there both
 * pointers read NULL again. */
struct vc_region_page {
    struct vc_region *region;
    const struct vc_card_limit *only; /* the limits of the share's only card, or of no card; NULL with several cards */
    uint32_t lock; /* PID of the process of which a thread holds it, or 0 */
};
extern struct vc_region_page *vc__region_page __attribute__((visibility("hidden")));

/* The limits that alone decide about this process's work, or NULL if it takes more than a look to say: several cards, or
 * nobody has looked yet. Without a share they name no limit. For the launch path: two loads, no call. */
static inline const struct vc_card_limit *vc_region_only_limit(void)
{
    return vc_load_acquire(&vc_load_relaxed(&vc__region_page)->only);
}

/* The region of this process, never NULL; found and mapped at the first call in a process (and again in a forked
 * child, which must not inherit its parent's slot). Cost after that: two loads. Says once on stderr why a region is
 * absent, uncounted or damaged. */
struct vc_region *vc__region_open(void);
static inline struct vc_region *vc_region_get(void)
{
    struct vc_region *region = vc_load_acquire(&vc_load_relaxed(&vc__region_page)->region);
    return VC_LIKELY(region != NULL) ? region : vc__region_open();
}

/* Open the region in `directory` for this process instead of looking for it; for programs that are not the shims
 * (tests, benchmarks). Pre: vc_region_get was not called yet in this process. Post: as vc_region_get. */
struct vc_region *vc_region_get_at(const char *directory);

/* Index of the card with this UUID ("GPU-…", "MIG-…"; case-insensitive) in limits and usage, or -1. */
int vc_region_card(const struct vc_region *region, const char *uuid);

/* How many leading slots may be in use: sum over [0, vc_region_slots) instead of all VC_MAX_SLOTS. Sequentially
 * consistent, as the quota needs it. A tenant may lower the shared word; what this process has seen stays. Pre: region->usage != NULL. */
static inline uint32_t vc_region_slots(const struct vc_region *region)
{
    uint32_t slots = vc_load(&region->usage->slot_high_water), seen = vc_load_relaxed(&region->seen_slots);
    slots = slots > seen ? slots : seen;
    return slots <= VC_MAX_SLOTS ? slots : VC_MAX_SLOTS;
}

/* The limit fields of one card at one moment. */
struct vc_card_view {
    uint64_t memory_bytes;
    uint64_t overhead_bytes;
    uint64_t context_bytes;
    uint64_t physical_bytes; /* with VC_CARD_OVERSELL: what may be on the card for certain */
    uint32_t cores;
    uint32_t core_limit;
    uint32_t flags;
    uint32_t priority;
};

/* Read one card's limits under the seqlock; wait-free for at most 1 ms. Pre: card < card_count. Returns whether the
 * fields belong together; if a writer died half-way (false) each field is still an old or a new value, never torn, and
 * may be used. The identity of the cards never changes while a region lives. */
bool vc_limits_read(const struct vc_limits *limits, uint32_t card, struct vc_card_view *view);

#endif
