/* Giving extents, holding them, naming them. */
#include "region/shared.h"

#include <fcntl.h>
#include <stdlib.h>

#include "region/slot.h"

#define VC__PLACES 64u   /* where a name may be */
#define VC__SLOT_BITS 7
#define VC__CARD_BITS 4
#define VC__NAME_BITS 37 /* of a name in its record … */
#define VC__HOME_BITS 27 /* … and those that say where it is: with few, a tenant of many names soon has a neighbour's */

_Static_assert(VC_MAX_SLOTS == 1 << VC__SLOT_BITS && VC_MAX_CARDS == 1 << VC__CARD_BITS, "any number in their bits is one of a slot, of a card");
_Static_assert(VC__SLOT_BITS + VC_TAG_BITS + VC__NAME_BITS == 64 && VC__CARD_BITS + 2 * VC_EXTENT_BITS == 64, "a record is two words");

bool vc_shared_new(struct vc_region *region, uint32_t cards, uint64_t bytes, struct vc_extent *extent)
{
    const struct vc_slot *own = vc_region_slot(region);
    uint64_t chunks = bytes / VC_EXTENT_CHUNK + (bytes % VC_EXTENT_CHUNK != 0);
    if (!own || region->state != VC_REGION_ENFORCED || chunks == 0 || chunks >> VC_EXTENT_BITS)
        return false;
    uint64_t first = __atomic_fetch_add(&region->shared_chunks, chunks, __ATOMIC_RELAXED);
    *extent = (struct vc_extent){region, (uint32_t)(own - region->usage->slots), cards, first, chunks};
    return (first + chunks) >> VC_EXTENT_BITS == 0;
}

bool vc_shared_end(const struct vc_extent *extent)
{
    struct vc_region *region = extent->region;
    pthread_mutex_lock(&region->slow_mutex);
    int descriptor = vc_slots_descriptor(region); /* who holds it looks for the end after that; so one of us sees the other */
    bool ended = descriptor >= 0 && vc_extent_end(descriptor, extent) && !vc_extent_is_held(descriptor, extent);
    pthread_mutex_unlock(&region->slow_mutex);
    return ended;
}

/* Pre: the region's slow mutex is held. What this process holds of that slot and some of those chunks; NULL: nothing. */
static struct vc_hold **hold_of(const struct vc_extent *extent)
{
    struct vc_hold **link = &extent->region->holds;
    while (*link && ((*link)->extent.slot != extent->slot || (*link)->extent.first >= extent->first + extent->chunks ||
                     extent->first >= (*link)->extent.first + (*link)->extent.chunks))
        link = &(*link)->next;
    return *link ? link : NULL;
}

bool vc_shared_hold(const struct vc_extent *extent, uint32_t tag)
{
    struct vc_region *region = extent->region;
    bool held = false;
    if (region->state != VC_REGION_ENFORCED || extent->slot >= VC_MAX_SLOTS || !vc_region_slot(region))
        return false;
    pthread_mutex_lock(&region->slow_mutex);
    struct vc_hold **known = hold_of(extent), *made = known ? NULL : malloc(sizeof *made);
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

void vc_shared_let(const struct vc_extent *extent)
{
    struct vc_region *region = extent->region;
    pthread_mutex_lock(&region->slow_mutex);
    struct vc_hold **known = hold_of(extent), *gone = known ? *known : NULL;
    if (gone && --gone->count == 0) {
        *known = gone->next;
        vc_extent_set(vc_slots_descriptor(region), F_UNLCK, &gone->extent);
        free(gone);
    }
    pthread_mutex_unlock(&region->slow_mutex);
}

void vc_shared_narrow(const struct vc_extent *extent)
{
    struct vc_region *region = extent->region;
    pthread_mutex_lock(&region->slow_mutex);
    struct vc_hold **known = hold_of(extent);
    if (known) {
        struct vc_extent without = *extent;
        without.cards = (*known)->extent.cards & ~extent->cards;
        vc_extent_set(vc_slots_descriptor(region), F_UNLCK, &without);
        (*known)->extent.cards &= extent->cards;
    }
    pthread_mutex_unlock(&region->slow_mutex);
}

bool vc_shared_is_held(const struct vc_extent *extent)
{
    struct vc_region *region = extent->region;
    pthread_mutex_lock(&region->slow_mutex);
    bool held = vc_extent_is_held(vc_slots_descriptor(region), extent);
    pthread_mutex_unlock(&region->slow_mutex);
    return held;
}

/* Names: records of a table in the usage file, each in one of a few places that follow from its name, so that to find one takes as long
 * beside thousands as beside none. (A lock for each did not: the kernel looks through a file's locks one by one.) A record counts as long
 * as its slot is its owner's, by tag and lock: a dead process's are free to be written over. Who writes there what is not so cheats as
 * who locks what is not his: his own container pays. */

static uint64_t mixed(uint64_t name)
{
    return (name ^ name >> 32) * UINT64_C(0x9e3779b97f4a7c15);
}

static struct vc_name *place_of(const struct vc_region *region, uint64_t name, uint32_t index)
{
    uint64_t home = (mixed(name) & ((UINT64_C(1) << VC__HOME_BITS) - 1)) * VC_MAX_NAMES >> VC__HOME_BITS;
    return &region->usage->names[(home + index) % VC_MAX_NAMES];
}

/* Without a name: it is being written. */
static uint64_t owner_of(const struct vc_region *region, uint32_t slot)
{
    return ((uint64_t)slot << VC_TAG_BITS | vc_slot_tag(region, slot)) << VC__NAME_BITS;
}

static uint64_t named(uint64_t owner, uint64_t name)
{
    uint64_t part = mixed(name) >> (64 - VC__NAME_BITS);
    return owner | (part ? part : 1);
}

static uint32_t slot_of(uint64_t owner)
{
    return (uint32_t)(owner >> (VC__NAME_BITS + VC_TAG_BITS));
}

/* Whether the process that wrote it has its slot still, as far as the slot says. */
static bool is_owned(const struct vc_region *region, uint64_t owner)
{
    uint32_t slot = slot_of(owner);
    return owner >> VC__NAME_BITS << VC__NAME_BITS == owner_of(region, slot) && vc_load(&region->usage->slots[slot].state) == VC_SLOT_CLAIMED;
}

static uint64_t packed(const struct vc_extent *extent)
{
    uint64_t card = (uint64_t)__builtin_ctz(extent->cards);
    return (card << VC_EXTENT_BITS | extent->first) << VC_EXTENT_BITS | extent->chunks;
}

static struct vc_extent unpacked(struct vc_region *region, uint64_t owner, uint64_t place)
{
    const uint64_t number = (UINT64_C(1) << VC_EXTENT_BITS) - 1;
    return (struct vc_extent){.region = region, .slot = slot_of(owner), .cards = 1u << (place >> 2 * VC_EXTENT_BITS),
                              .first = place >> VC_EXTENT_BITS & number, .chunks = place & number};
}

/* Whether another process lives in that slot. */
static bool is_anothers(struct vc_region *region, uint32_t slot)
{
    pthread_mutex_lock(&region->slow_mutex);
    int descriptor = vc_slots_descriptor(region);
    bool lives = descriptor >= 0 && &region->usage->slots[slot] != region->slot && vc_slot_locked(descriptor, slot);
    pthread_mutex_unlock(&region->slow_mutex);
    return lives;
}

/* Write it into a record that is free, or (`ask`: the kernel is asked) whose process is dead. */
static bool publish(uint64_t name, const struct vc_extent *extent, bool ask)
{
    struct vc_region *region = extent->region;
    uint64_t writing = owner_of(region, extent->slot);
    for (uint32_t index = 0; index < VC__PLACES; index++) {
        struct vc_name *one = place_of(region, name, index);
        uint64_t was = vc_load(&one->owner);
        bool kept = was != 0 && is_owned(region, was) && (!ask || slot_of(was) == extent->slot || is_anothers(region, slot_of(was)));
        if (kept || !__atomic_compare_exchange_n(&one->owner, &was, writing, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        vc_store(&one->place, packed(extent));
        vc_store(&one->owner, named(writing, name));
        return true;
    }
    return false;
}

bool vc_shared_publish(uint64_t name, const struct vc_extent *extent)
{
    bool one_card = extent->cards != 0 && (extent->cards & (extent->cards - 1)) == 0;
    return one_card && (publish(name, extent, false) || publish(name, extent, true));
}

void vc_shared_withdraw(uint64_t name, const struct vc_extent *extent)
{
    struct vc_region *region = extent->region;
    uint64_t wanted = named(owner_of(region, extent->slot), name);
    for (uint32_t index = 0; index < VC__PLACES; index++) {
        struct vc_name *one = place_of(region, name, index);
        uint64_t was = wanted;
        if (vc_load(&one->owner) == wanted && vc_load(&one->place) == packed(extent))
            __atomic_compare_exchange_n(&one->owner, &was, 0, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
}

bool vc_shared_find(struct vc_region *region, uint64_t name, struct vc_extent *extent)
{
    uint32_t found = 0;
    if (region->state != VC_REGION_ENFORCED)
        return false;
    for (uint32_t index = 0; index < VC__PLACES; index++) {
        struct vc_name *one = place_of(region, name, index);
        uint64_t owner = vc_load(&one->owner), place = vc_load(&one->place);
        if (owner != named(owner >> VC__NAME_BITS << VC__NAME_BITS, name) || vc_load(&one->owner) != owner || !is_owned(region, owner) ||
            !is_anothers(region, slot_of(owner)))
            continue;
        *extent = unpacked(region, owner, place);
        found++;
    }
    return found == 1 && extent->chunks > 0;
}
