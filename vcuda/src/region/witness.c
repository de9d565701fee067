/* Keeping, shortening and comparing witnesses. */
#include "region/witness.h"

#include <fcntl.h>
#include <unistd.h>

#include "base/clock.h"
#include "region/descriptor.h"

#define VC__SLOT_BITS 24 /* of bytes for one slot and card: 32 TiB */
/* A process that ends gives back its slot a little earlier than its locks; on a busy machine one that frees may be interrupted in between. */
#define VC__PATIENCE_NS 1000000000u
#define VC__PAUSE_NS 500000u
#define VC__MOST_QUESTIONS 1024 /* more locks than processes have were made to hide behind */
#define VC__MOST_RANGES 256

struct range {
    off_t start, end;
};

/* Beyond the slots' locks. */
static off_t start_of(uint32_t slot, uint32_t card)
{
    return ((off_t)1 << 40) + ((off_t)(card * VC_MAX_SLOTS + slot) << VC__SLOT_BITS);
}

static bool set(int descriptor, short type, off_t start, off_t end)
{
    struct flock lock = {.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = end - start};
    return start >= end || fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

/* Some range that others hold within this one; false: there is none. */
static bool find(int descriptor, struct range within, struct range *found)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = within.start, .l_len = within.end - within.start};
    if (fcntl(descriptor, F_OFD_GETLK, &lock) != 0)
        lock.l_len = 0, lock.l_start = within.start; /* unknown: as much as can be */
    else if (lock.l_type == F_UNLCK)
        return false;
    off_t end = lock.l_len == 0 ? within.end : lock.l_start + lock.l_len;
    found->start = lock.l_start > within.start ? lock.l_start : within.start;
    found->end = end < within.end ? end : within.end;
    return true;
}

static off_t units_of(uint64_t bytes)
{
    uint64_t units = bytes / VC_WITNESS_UNIT + (bytes % VC_WITNESS_UNIT != 0);
    return (off_t)(units < (1u << VC__SLOT_BITS) ? units : (1u << VC__SLOT_BITS) - 1);
}

/* Our description of the usage file; a new one, with what is witnessed, where the application closed the old one. */
static int own_descriptor(struct vc_region *region)
{
    struct vc_witness *mine = &region->witness;
    if (vc_descriptor_is_usage(&region->file, mine->descriptor))
        return mine->descriptor;
    vc_descriptor_unpin(mine->page); /* with it the old description goes, and its locks */
    mine->page = NULL;
    mine->descriptor = vc_descriptor_open(&region->file);
    if (mine->descriptor < 0)
        return -1;
    mine->page = vc_descriptor_pin(mine->descriptor);
    uint32_t slot = (uint32_t)(region->slot - region->usage->slots);
    for (uint32_t card = 0; card < region->card_count; card++) {
        off_t start = start_of(slot, card);
        set(mine->descriptor, F_WRLCK, start, start + units_of(vc_load_relaxed(&mine->bytes[card])));
    }
    return mine->descriptor;
}

/* Whether the slot of each range that is locked says about as much as its lock. */
static bool agrees(struct vc_region *region, uint32_t card, struct range locked)
{
    for (off_t at = locked.start; at < locked.end;) {
        uint32_t slot = (uint32_t)((at - start_of(0, card)) >> VC__SLOT_BITS);
        off_t next = start_of(slot + 1, card), end = locked.end < next ? locked.end : next;
        uint64_t witnessed = (uint64_t)(end - start_of(slot, card)) * VC_WITNESS_UNIT;
        uint32_t seen = vc_load_relaxed(&region->seen_slots);
        if (seen < slot + 1)
            vc_store(&region->seen_slots, slot + 1); /* under our mutex */
        if (vc_load(&region->usage->slots[slot].cards[card].reserved_bytes) + VC_WITNESS_SLACK + VC_WITNESS_UNIT < witnessed)
            return false;
        at = next;
    }
    return true;
}

static bool others_agree(struct vc_region *region, int descriptor, uint32_t card)
{
    struct range open[VC__MOST_RANGES] = {{start_of(0, card), start_of(VC_MAX_SLOTS, card)}}, found;
    uint32_t count = 1;
    for (uint32_t question = 0; count > 0; question++) {
        struct range within = open[--count];
        if (!find(descriptor, within, &found))
            continue;
        if (question == VC__MOST_QUESTIONS || count + 2 > VC__MOST_RANGES || !agrees(region, card, found))
            return false;
        /* The kernel tells one of them, not the first. */
        if (within.start < found.start)
            open[count++] = (struct range){within.start, found.start};
        if (found.end < within.end)
            open[count++] = (struct range){found.end, within.end};
    }
    return true;
}

/* Give up what is witnessed beyond what is held; under our mutex. */
static void lower(struct vc_region *region, uint32_t card)
{
    struct vc_witness *mine = &region->witness;
    uint64_t held = (uint64_t)units_of(vc_load(&region->held_bytes[card])) * VC_WITNESS_UNIT;
    off_t start = start_of((uint32_t)(region->slot - region->usage->slots), card);
    int descriptor = held < mine->bytes[card] ? own_descriptor(region) : -1;
    if (descriptor < 0)
        return;
    set(descriptor, F_UNLCK, start + units_of(held), start + units_of(mine->bytes[card]));
    vc_store(&mine->bytes[card], held);
    uint64_t now = (uint64_t)units_of(vc_load(&region->held_bytes[card])) * VC_WITNESS_UNIT;
    if (now > held && set(descriptor, F_WRLCK, start, start + units_of(now)))
        vc_store(&mine->bytes[card], now); /* another thread took memory meanwhile, and found it witnessed */
}

/* Let go of our mutex, and do what others could not do because of us. */
static void leave(struct vc_region *region)
{
    struct vc_witness *mine = &region->witness;
    pthread_mutex_unlock(&mine->mutex);
    for (uint32_t card = 0; card < region->card_count;) {
        if (!vc_load(&mine->behind[card]) || pthread_mutex_trylock(&mine->mutex) != 0) {
            card++; /* who holds it by now looks when it leaves */
            continue;
        }
        vc_store(&mine->behind[card], 0);
        lower(region, card);
        pthread_mutex_unlock(&mine->mutex);
        card = 0;
    }
}

bool vc_witness_raise(struct vc_region *region, uint32_t card, const char **why)
{
    struct vc_witness *mine = &region->witness;
    pthread_mutex_lock(&mine->mutex);
    uint64_t deadline = 0, held;
    off_t start = start_of((uint32_t)(region->slot - region->usage->slots), card);
    *why = NULL;
    /* Other threads take and give back meanwhile. */
    while ((held = (uint64_t)units_of(vc_load(&region->held_bytes[card])) * VC_WITNESS_UNIT) > mine->bytes[card]) {
        int descriptor = own_descriptor(region);
        *why = descriptor < 0                                                     ? "it can't be opened again"
               : !set(descriptor, F_WRLCK, start, start + units_of(held))         ? "another process holds our locks on it"
               : !others_agree(region, descriptor, card)                          ? "the ledger of another process was overwritten"
                                                                                  : NULL;
        if (!*why) {
            vc_store(&mine->bytes[card], held);
            continue;
        }
        /* Nothing is granted yet: while we wait, nobody is to wait for us. Whoever frees memory changes its slot first. */
        if (descriptor >= 0)
            set(descriptor, F_UNLCK, start + units_of(mine->bytes[card]), start + units_of(held));
        uint64_t now = vc_now_ns();
        if (deadline == 0)
            deadline = now + VC__PATIENCE_NS;
        if (now > deadline)
            break;
        vc_sleep_ns(VC__PAUSE_NS);
        *why = NULL;
    }
    leave(region);
    return *why == NULL;
}

void vc_witness_lower(struct vc_region *region, uint32_t card)
{
    struct vc_witness *mine = &region->witness;
    vc_store(&mine->behind[card], 1); /* before the attempt: whoever holds the mutex looks at it when it has let go */
    if (pthread_mutex_trylock(&mine->mutex) == 0)
        leave(region);
}

uint64_t vc_witness_read(int descriptor, uint32_t slot, uint32_t card)
{
    struct range within = {start_of(slot, card), start_of(slot + 1, card)}, found;
    off_t last = within.start;
    for (int question = 0; question < 4 && find(descriptor, within, &found); question++) {
        last = found.end > last ? found.end : last;
        within.start = found.end;
        if (within.start >= within.end)
            break;
    }
    return (uint64_t)(last - start_of(slot, card)) * VC_WITNESS_UNIT;
}
