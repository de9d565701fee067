/* All regions of this process, and the cards that they name: a container has the share that the device plugin gave it, and one for each
 * request of its claims, each with limits and account of its own.
 *
 * Locking: vc_regions_get may be called from any thread at any time, also in a forked child; it takes a private lock only on its slow path
 * (first call in a process) and never holds it across a call of the driver. What it returns lives as long as the process. */
#ifndef VC_REGIONS_H
#define VC_REGIONS_H

#include "region/region.h"

enum { VC_MAX_PROCESS_CARDS = 31 /* a set of them, and of those that nobody knows, is a word */ };

/* One card of the process: the region that limits it, and its number there. */
struct vc_card {
    struct vc_region *region;
    uint32_t index;
    const struct vc_card_limit *limit;
    struct vc_card_usage *usage;
};

struct vc_regions {
    bool any;  /* false: nothing is configured, pass everything through */
    bool lost; /* some limits can't be read: cards that no other region names may be theirs; memory and work refused there */
    uint32_t count, card_count;
    struct vc_card cards[VC_MAX_PROCESS_CARDS]; /* each once, in the order of their regions */
    struct vc_region all[VC_MAX_PROCESS_CARDS]; /* each with a card of its own */
};

/* What the first look found. It lives in a page that the kernel wipes in a forked child, however it forked: there both
 * pointers read NULL again. */
struct vc_regions_page {
    struct vc_regions *regions;
    const struct vc_card_limit *only; /* the limits of the process's only card, or of no card; NULL with several cards */
    uint32_t lock; /* PID of the process of which a thread holds it, or 0 */
};
extern struct vc_regions_page *vc__regions_page __attribute__((visibility("hidden")));

/* The limits that alone decide about this process's work, or NULL if it takes more than a look to say: several cards, or
 * nobody has looked yet. Without a share they name no limit. For the launch path: two loads, no call. */
static inline const struct vc_card_limit *vc_regions_only_limit(void)
{
    return vc_load_acquire(&vc_load_relaxed(&vc__regions_page)->only);
}

/* The regions of this process, never NULL; found and mapped at the first call in a process (and again in a forked
 * child, which must not inherit its parent's slots). Cost after that: two loads. Says once on stderr why a region is
 * absent, uncounted or damaged, or that two regions name one card. */
struct vc_regions *vc__regions_open(void);
static inline struct vc_regions *vc_regions_get(void)
{
    struct vc_regions *regions = vc_load_acquire(&vc_load_relaxed(&vc__regions_page)->regions);
    return VC_LIKELY(regions != NULL) ? regions : vc__regions_open();
}

/* Open what is in and below `directory` for this process instead of looking for it; for programs that are not the shims
 * (tests, benchmarks). Pre: vc_regions_get was not called yet in this process. Post: as vc_regions_get. */
struct vc_regions *vc_regions_get_at(const char *directory);

/* A card by its number in the process. Pre: number < card_count. */
static inline const struct vc_card *vc_card(uint32_t number)
{
    return &vc_regions_get()->cards[number];
}

/* Number in the process of the card with this UUID ("GPU-…", "MIG-…"; case-insensitive), or -1. */
int vc_regions_card(const struct vc_regions *regions, const char *uuid);

#endif
