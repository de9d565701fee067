/* One region, as a process has it open: two files mapped, a slot of its own. Which regions a process has: regions.h. */
#ifndef VC_REGION_H
#define VC_REGION_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/atomic.h"
#include "region/abi.h"
#include "region/descriptor.h"

enum vc_region_state {
    VC_REGION_ENFORCED, /* limits and usage are mapped */
    VC_REGION_UNCOUNTED, /* limits are mapped, usage can't be used: memory refused, guaranteed share, no lending */
    VC_REGION_DAMAGED,  /* limits exist but can't be read: memory and work refused */
};

/* What this process has witnessed (witness.h). */
struct vc_witness {
    pthread_mutex_t mutex;
    int descriptor; /* a file description of its own: its locks end with it */
    void *page;     /* keeps the locks where the descriptor is closed */
    uint64_t bytes[VC_MAX_CARDS];
    uint32_t behind[VC_MAX_CARDS]; /* memory was given back while another thread held the mutex, which is to lower it */
};

/* What this process has told of its charges (charged.h). */
struct vc_charged {
    pthread_mutex_t mutex;
    int descriptor; /* a file description of its own: its locks end with it */
    void *page;     /* keeps the locks where the descriptor is closed */
    uint64_t before_ns[VC_MAX_CARDS]; /* told by descriptions before this one … */
    uint64_t units[VC_MAX_CARDS];     /* … and by this one */
    bool locked_out;                  /* another process has locked what is to tell them */
    uint64_t found_before_ns[2][VC_MAX_CARDS], found_units[2][VC_MAX_CARDS]; /* what samples found, likewise … */
    bool found_locked_out;            /* … and that */
    uint64_t open_ns[VC_MAX_CARDS];   /* it has work there, and told so last then; 0: not … */
    uint64_t opens[VC_MAX_CARDS];     /* … which was asked for so often … */
    bool since[VC_MAX_CARDS];         /* … and when first is told */
};

struct vc_region {
    enum vc_region_state state;
    uint32_t card_count;            /* cards that the limits name; 0 in DAMAGED */
    const struct vc_limits *limits; /* read-only mapping; NULL in DAMAGED */
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
    struct vc_charged charged;
    struct vc_hold *holds;  /* what this process holds that another one owns (shared.h); guarded by slow_mutex */
    uint64_t shared_chunks; /* numbers that were given to what it owns and others may hold */
    uint64_t asked_ns;      /* when it last asked for a sample (overhead.h) … */
    uint64_t asked_work[VC_MAX_CARDS]; /* … and its launches and ledger changes then */
};

/* Whether a folder holds a region, in whatever state. */
bool vc_region_is_at(const char *directory);

/* Open the region in `directory`: fills in all of *region. Says once on stderr why one is uncounted or damaged. */
void vc_region_open(struct vc_region *region, const char *directory);

/* Nothing of it is needed. Pre: no slot was claimed in it. */
void vc_region_close(struct vc_region *region);

/* In a forked child: what is open belongs to the parent. The mappings are not the child's (MADV_DONTFORK). The descriptor shares the
 * parent's lock: it stays open, as the card's files do, so that the parent's memory counts as long as the child keeps it on the card. A
 * parent without a slot had none there; then it goes, by close, never by unlocking. */
void vc_region_forget(const struct vc_region *region);

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
