/* Giving extents, holding them, naming them. */
#include "region/shared.h"

#include <fcntl.h>
#include <stdlib.h>

#include "region/slot.h"

#define VC__NAMES ((off_t)1 << 61) /* beyond the extents; then name, card, slot, chunk */
#define VC__SLOT_BITS 7
#define VC__CARD_BITS 4
#define VC__NAME_BITS 20
#define VC__REST_BITS 25 /* more of the name: with the place alone, a tenant of many names soon has a neighbour's */
#define VC__RESTS ((off_t)1 << 62) /* then slot, chunk, rest */

_Static_assert(VC_MAX_SLOTS <= 1 << VC__SLOT_BITS && VC_MAX_CARDS <= 1 << VC__CARD_BITS, "numbers fit into their bits");
_Static_assert(VC__NAME_BITS + VC__CARD_BITS + VC__SLOT_BITS + VC_EXTENT_BITS == 61, "names fill the file's upper half");
_Static_assert(VC__SLOT_BITS + VC_EXTENT_BITS + VC__REST_BITS == 62, "and the rest what is left");

static struct flock range(short type, off_t start, off_t bytes)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = bytes};
}

bool vc_shared_new(struct vc_region *region, uint32_t cards, uint64_t bytes, struct vc_extent *extent)
{
    const struct vc_slot *own = vc_region_slot(region);
    uint64_t chunks = bytes / VC_EXTENT_CHUNK + (bytes % VC_EXTENT_CHUNK != 0);
    if (!own || chunks == 0 || chunks >> VC_EXTENT_BITS)
        return false;
    uint64_t first = __atomic_fetch_add(&region->shared_chunks, chunks, __ATOMIC_RELAXED);
    *extent = (struct vc_extent){(uint32_t)(own - region->usage->slots), cards, first, chunks};
    return (first + chunks) >> VC_EXTENT_BITS == 0;
}

bool vc_shared_end(struct vc_region *region, const struct vc_extent *extent)
{
    pthread_mutex_lock(&region->slow_mutex);
    int descriptor = vc_slots_descriptor(region); /* who holds it looks for the end after that; so one of us sees the other */
    bool ended = descriptor >= 0 && vc_extent_end(descriptor, extent) && !vc_extent_is_held(descriptor, extent);
    pthread_mutex_unlock(&region->slow_mutex);
    return ended;
}

/* Pre: region->slow_mutex held. What this process holds of that slot and some of those chunks; NULL: nothing. */
static struct vc_hold **hold_of(struct vc_region *region, const struct vc_extent *extent)
{
    struct vc_hold **link = &region->holds;
    while (*link && ((*link)->extent.slot != extent->slot || (*link)->extent.first >= extent->first + extent->chunks ||
                     extent->first >= (*link)->extent.first + (*link)->extent.chunks))
        link = &(*link)->next;
    return *link ? link : NULL;
}

bool vc_shared_hold(struct vc_region *region, const struct vc_extent *extent, uint32_t tag)
{
    bool held = false;
    if (region->state != VC_REGION_ENFORCED || extent->slot >= VC_MAX_SLOTS || !vc_region_slot(region))
        return false;
    pthread_mutex_lock(&region->slow_mutex);
    struct vc_hold **known = hold_of(region, extent), *made = known ? NULL : malloc(sizeof *made);
    const struct vc_slot *slot = &region->usage->slots[extent->slot];
    int descriptor = vc_slots_descriptor(region);
    if (known) { /* the same, or of another container, or of a former owner of the slot's: nobody pays for that here */
        held = (*known)->tag == tag && (*known)->extent.first == extent->first &&
               (*known)->extent.chunks == extent->chunks;
        (*known)->count += held;
    } else if (made && descriptor >= 0 && slot != region->slot && vc_extent_set(descriptor, F_RDLCK, extent)) {
        /* Whoever frees the slot looks for holders after its process has let go of its own lock: so we are seen, or it is gone. */
        held = vc_slot_locked(descriptor, extent->slot) && vc_load(&slot->state) == VC_SLOT_CLAIMED &&
               vc_slot_tag(region, extent->slot) == tag && !vc_extent_has_ended(descriptor, extent);
        if (!held)
            vc_extent_set(descriptor, F_UNLCK, extent);
    }
    if (held && made) {
        *made = (struct vc_hold){region->holds, *extent, tag, 1};
        region->holds = made;
    } else {
        free(made);
    }
    pthread_mutex_unlock(&region->slow_mutex);
    return held;
}

void vc_shared_let(struct vc_region *region, const struct vc_extent *extent)
{
    pthread_mutex_lock(&region->slow_mutex);
    struct vc_hold **known = hold_of(region, extent), *gone = known ? *known : NULL;
    if (gone && --gone->count == 0) {
        *known = gone->next;
        vc_extent_set(vc_slots_descriptor(region), F_UNLCK, &gone->extent);
        free(gone);
    }
    pthread_mutex_unlock(&region->slow_mutex);
}

void vc_shared_narrow(struct vc_region *region, const struct vc_extent *extent)
{
    pthread_mutex_lock(&region->slow_mutex);
    struct vc_hold **known = hold_of(region, extent);
    if (known) {
        struct vc_extent without = *extent;
        without.cards = (*known)->extent.cards & ~extent->cards;
        vc_extent_set(vc_slots_descriptor(region), F_UNLCK, &without);
        (*known)->extent.cards &= extent->cards;
    }
    pthread_mutex_unlock(&region->slow_mutex);
}

bool vc_shared_is_held(struct vc_region *region, const struct vc_extent *extent)
{
    pthread_mutex_lock(&region->slow_mutex);
    bool held = vc_extent_is_held(vc_slots_descriptor(region), extent);
    pthread_mutex_unlock(&region->slow_mutex);
    return held;
}

/* Names. */

static uint64_t mixed(uint64_t name)
{
    return (name ^ name >> 32) * UINT64_C(0x9e3779b97f4a7c15);
}

static off_t beginning_of(uint64_t name)
{
    return VC__NAMES + ((off_t)(mixed(name) >> (64 - VC__NAME_BITS)) << (VC__CARD_BITS + VC__SLOT_BITS + VC_EXTENT_BITS));
}

static off_t rest_of(uint64_t name, const struct vc_extent *extent)
{
    uint64_t rest = mixed(name) << VC__NAME_BITS >> (64 - VC__REST_BITS);
    return VC__RESTS + (off_t)(((uint64_t)extent->slot << VC_EXTENT_BITS | extent->first) << VC__REST_BITS | rest);
}

static bool name(struct vc_region *region, short type, uint64_t name, const struct vc_extent *extent)
{
    if (extent->cards == 0 || (extent->cards & (extent->cards - 1)) != 0)
        return false;
    uint64_t card = (uint64_t)__builtin_ctz(extent->cards), within = (card << VC__SLOT_BITS | extent->slot) << VC_EXTENT_BITS | extent->first;
    struct flock lock = range(type, beginning_of(name) + (off_t)within, (off_t)extent->chunks);
    struct flock rest = range(type, rest_of(name, extent), 1);
    pthread_mutex_lock(&region->slow_mutex);
    int descriptor = vc_slots_descriptor(region);
    bool done = fcntl(descriptor, F_OFD_SETLK, &rest) == 0 && fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
    pthread_mutex_unlock(&region->slow_mutex);
    return done;
}

bool vc_shared_publish(struct vc_region *region, uint64_t of, const struct vc_extent *extent)
{
    return name(region, F_WRLCK, of, extent);
}

void vc_shared_withdraw(struct vc_region *region, uint64_t of, const struct vc_extent *extent)
{
    name(region, F_UNLCK, of, extent);
}

static struct vc_extent extent_of(off_t within, off_t chunks)
{
    return (struct vc_extent){.slot = (uint64_t)within >> VC_EXTENT_BITS & (VC_MAX_SLOTS - 1),
                              .cards = 1u << ((uint64_t)within >> (VC_EXTENT_BITS + VC__SLOT_BITS)),
                              .first = (uint64_t)within & ((UINT64_C(1) << VC_EXTENT_BITS) - 1), .chunks = (uint64_t)chunks};
}

bool vc_shared_find(struct vc_region *region, uint64_t of, struct vc_extent *extent)
{
    off_t start = beginning_of(of), end = start + ((off_t)1 << (VC__CARD_BITS + VC__SLOT_BITS + VC_EXTENT_BITS));
    struct flock found, other;
    pthread_mutex_lock(&region->slow_mutex);
    int descriptor = vc_slots_descriptor(region);
    bool one = descriptor >= 0 && vc_extent_find(descriptor, start, end, &found) &&
               (found.l_start == start || !vc_extent_find(descriptor, start, found.l_start, &other)) &&
               (found.l_start + found.l_len >= end || !vc_extent_find(descriptor, found.l_start + found.l_len, end, &other));
    if (one) {
        *extent = extent_of(found.l_start - start, found.l_len);
        off_t rest = rest_of(of, extent);
        one = vc_extent_find(descriptor, rest, rest + 1, &other);
    }
    pthread_mutex_unlock(&region->slow_mutex);
    return one;
}
