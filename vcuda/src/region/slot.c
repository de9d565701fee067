/* Claiming, judging and freeing slots. */
#include "region/slot.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/log.h"
#include "region/abandoned.h"
#include "region/descriptor.h"
#include "region/extent.h"

#define VC__CLAIM_INTERVAL_NS 10000000u
#define VC__TURN_NS UINT64_C(20000000000) /* a process that is stopped in its turn must not stop all others for ever */
#define VC__TURN_PAUSE_NS 1000000u

/* Beyond the data: a lock needs no bytes of the file. First who holds each slot, then whose turn it is. */
static struct flock lock_of(uint32_t index, short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)VC_USAGE_FILE_BYTES + index, .l_len = 1};
}

static bool set_lock(int descriptor, uint32_t index, short type)
{
    struct flock lock = lock_of(index, type);
    return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

static bool try_lock(int descriptor, uint32_t index)
{
    return set_lock(descriptor, index, F_WRLCK);
}

static void unlock(int descriptor, uint32_t index)
{
    set_lock(descriptor, index, F_UNLCK);
}

bool vc_slot_locked(int descriptor, uint32_t index)
{
    struct flock lock = lock_of(index, F_WRLCK);
    return fcntl(descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

bool vc_slot_alive(const struct vc_identity *self, const struct vc_slot *slot, bool locked)
{
    if (locked)
        return true;
    struct vc_identity owner = {
        .pid = vc_load_relaxed(&slot->pid),
        .start_ticks = vc_load_relaxed(&slot->start_ticks),
        .pid_namespace = vc_load_relaxed(&slot->pid_namespace),
    };
    enum vc_presence presence = vc_process_presence(self, &owner);
    if (presence == VC_EXITING)
        return true;
    /* Present, not ending, without its lock: it has called exec (its memory went with the old image), unless it could
     * lose the lock. */
    return presence == VC_PRESENT && !(vc_load_relaxed(&slot->flags) & VC_SLOT_LOCK_MAPPED);
}

/* Where the application closed it, the mapping keeps our locks. */
int vc_slots_descriptor(struct vc_region *region)
{
    if (!vc_descriptor_is_usage(&region->file, region->file.descriptor))
        region->file.descriptor = vc_descriptor_open(&region->file);
    return region->file.descriptor;
}

/* What a dead process has left on the cards is charged to its container. */
static void settle_work(struct vc_region *region, uint32_t index)
{
    for (uint32_t card = 0; card < VC_MAX_CARDS; card++) {
        if (vc_load(&region->usage->slots[index].state) != VC_SLOT_FREE && card < region->card_count)
            vc_add(&region->usage->cards[card].left_ns,
                   vc_abandoned_take(region->limits, region->usage, card, index, vc_now_ns(), true));
        vc_abandoned_close(&region->usage->cards[card], index);
    }
}

/* Pre: we hold the slot's lock. Idempotent, so that it may be interrupted anywhere. What is committed goes first: half done it
 * is a reservation, which the next one whom it hinders clears away; the other way round nobody would be hindered, and the
 * container would see too little free memory for ever. */
static void clear_slot(struct vc_region *region, uint32_t index)
{
    struct vc_slot *slot = &region->usage->slots[index];
    settle_work(region, index);
    for (uint32_t card = 0; card < VC_MAX_CARDS; card++) {
        vc_store(&slot->cards[card].committed_bytes, 0);
        vc_store(&slot->cards[card].reserved_bytes, 0);
        memset(&slot->cards[card], 0, sizeof slot->cards[card]);
    }
    vc_store(&slot->state, VC_SLOT_FREE);
}

/* Its process is dead, and others hold some of what it owned: the rest is free. Returns whether there was any. */
static bool leave_shared(struct vc_region *region, uint32_t index)
{
    struct vc_slot *slot = &region->usage->slots[index];
    bool any = false;
    int descriptor = vc_descriptor_open(&region->file); /* of its own: it sees what we hold, too */
    settle_work(region, index);
    for (uint32_t card = 0; card < VC_MAX_CARDS; card++) {
        struct vc_slot_card *one = &slot->cards[card];
        uint64_t committed = vc_load(&one->committed_bytes), exported = vc_load(&one->exported_bytes);
        uint64_t held = exported == 0 || descriptor < 0 ? exported : vc_extent_bytes(descriptor, index, card);
        uint64_t left = held < committed ? held : committed;
        any |= committed != left || vc_load(&one->reserved_bytes) != left;
        vc_store(&one->committed_bytes, left);
        vc_store(&one->reserved_bytes, left);
    }
    if (descriptor >= 0)
        close(descriptor);
    return any;
}

/* Pre: region->slow_mutex held. A lock of our own is none that we would see. */
static bool is_held(const struct vc_region *region, int descriptor, uint32_t index)
{
    const struct vc_hold *hold = region->holds;
    while (hold && hold->extent.slot != index)
        hold = hold->next;
    return hold || vc_extent_any(descriptor, index);
}

uint32_t vc_slot_tag(const struct vc_region *region, uint32_t index)
{
    uint64_t mixed = (region->limits->header.instance ^ vc_load_relaxed(&region->usage->slots[index].claimed_ns)) * UINT64_C(0x9e3779b97f4a7c15);
    return (uint32_t)(mixed >> (64 - VC_TAG_BITS));
}

bool vc_slots_take_turn(struct vc_region *region, uint32_t card)
{
    uint64_t deadline = vc_now_ns() + VC__TURN_NS;
    for (;;) {
        pthread_mutex_lock(&region->slow_mutex);
        int descriptor = vc_slots_descriptor(region);
        bool ours = descriptor >= 0 && try_lock(descriptor, VC_MAX_SLOTS + card);
        pthread_mutex_unlock(&region->slow_mutex);
        if (ours || descriptor < 0 || vc_now_ns() > deadline)
            return ours;
        vc_sleep_ns(VC__TURN_PAUSE_NS);
    }
}

void vc_slots_end_turn(struct vc_region *region, uint32_t card)
{
    pthread_mutex_lock(&region->slow_mutex);
    unlock(vc_slots_descriptor(region), VC_MAX_SLOTS + card);
    pthread_mutex_unlock(&region->slow_mutex);
}

static void fill_slot(struct vc_slot *slot, const struct vc_identity *self, uint64_t flags)
{
    vc_store_relaxed(&slot->pid, self->pid);
    vc_store_relaxed(&slot->start_ticks, self->start_ticks);
    vc_store_relaxed(&slot->pid_namespace, self->pid_namespace);
    memcpy(slot->comm, self->comm, sizeof slot->comm);
    vc_store_relaxed(&slot->claimed_ns, vc_now_ns());
    vc_store_relaxed(&slot->flags, flags);
    vc_store(&slot->state, VC_SLOT_CLAIMED);
}

struct vc_slot *vc_slot_claim(struct vc_region *region)
{
    int descriptor = vc_slots_descriptor(region);
    if (descriptor < 0)
        return NULL;
    struct vc_identity self;
    vc_identify_self(&self);
    for (uint32_t index = 0; index < VC_MAX_SLOTS; index++) {
        struct vc_slot *slot = &region->usage->slots[index];
        if (!try_lock(descriptor, index))
            continue;
        if (vc_load(&slot->state) != VC_SLOT_FREE && (vc_slot_alive(&self, slot, false) || is_held(region, descriptor, index))) {
            unlock(descriptor, index);
            continue;
        }
        clear_slot(region, index);
        /* Before the first reservation: who sums later sees this slot, and who summed before is seen by us. */
        uint32_t high_water = vc_load(&region->usage->slot_high_water);
        while (high_water < index + 1 && !__atomic_compare_exchange_n(&region->usage->slot_high_water, &high_water, index + 1,
                                                                      true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            ;
        vc_store(&region->seen_slots, index + 1);
        /* A mapping of its own: the one of the whole file may belong to a descriptor that was closed. Kept for the process's life. */
        bool mapped = vc_descriptor_pins(descriptor) && vc_descriptor_pin(descriptor);
        fill_slot(slot, &self, mapped ? VC_SLOT_LOCK_MAPPED : 0);
        return slot;
    }
    return NULL;
}

uint32_t vc_slots_reap(struct vc_region *region)
{
    if (region->state != VC_REGION_ENFORCED)
        return 0;
    uint32_t reaped = 0;
    pthread_mutex_lock(&region->slow_mutex);
    int descriptor = vc_slots_descriptor(region);
    struct vc_identity self = {0};
    for (uint32_t index = 0; descriptor >= 0 && index < vc_region_slots(region); index++) {
        struct vc_slot *slot = &region->usage->slots[index];
        if (slot == vc_load_relaxed(&region->slot) || vc_load(&slot->state) == VC_SLOT_FREE)
            continue;
        if (!try_lock(descriptor, index))
            continue;
        if (self.pid == 0)
            vc_identify_self(&self);
        if (vc_load(&slot->state) != VC_SLOT_FREE && !vc_slot_alive(&self, slot, false)) {
            bool held = is_held(region, descriptor, index);
            reaped += held ? leave_shared(region, index) : 1;
            if (!held)
                clear_slot(region, index);
        }
        unlock(descriptor, index);
    }
    pthread_mutex_unlock(&region->slow_mutex);
    return reaped;
}

/* Whether that slot's process is gone. Errors count as alive. */
static bool is_gone(struct vc_region *region, uint32_t index)
{
    bool gone = false;
    pthread_mutex_lock(&region->slow_mutex);
    int descriptor = vc_slots_descriptor(region);
    if (descriptor >= 0 && !vc_slot_locked(descriptor, index)) {
        struct vc_identity self;
        vc_identify_self(&self);
        gone = !vc_slot_alive(&self, &region->usage->slots[index], false);
    }
    pthread_mutex_unlock(&region->slow_mutex);
    return gone;
}

/* Of other processes with work on the card whose end nobody saw the next one from `*index` on that was last paid for until then at the latest. */
static bool next_abandoned(struct vc_region *region, uint32_t card, uint64_t until_ns, uint32_t *index)
{
    const struct vc_usage *usage = region->usage;
    for (uint32_t half = *index / 64, from = *index % 64; half < 2; half++, from = 0)
        for (uint64_t open = vc_load_acquire(&usage->cards[card].open_slots[half]) >> from << from; open != 0; open &= open - 1) {
            *index = half * 64 + (uint32_t)__builtin_ctzll(open);
            const struct vc_slot *slot = &usage->slots[*index];
            if (slot != vc_load_relaxed(&region->slot) && vc_load_acquire(&slot->cards[card].predicted_finish_ns) <= until_ns)
                return true;
        }
    return false;
}

uint64_t vc_slots_abandoned(struct vc_region *region, uint32_t card, uint64_t now_ns, uint64_t known_ns, uint64_t *dead_ns, bool *standing)
{
    *dead_ns = 0;
    *standing = false;
    if (region->state != VC_REGION_ENFORCED)
        return 0;
    struct vc_card_usage *usage = &region->usage->cards[card];
    uint64_t stopped = 0, dead = vc_load_relaxed(&usage->left_ns) ? __atomic_exchange_n(&usage->left_ns, 0, __ATOMIC_RELAXED) : 0;
    for (uint32_t index = 0; next_abandoned(region, card, now_ns - VC_ABANDONED_AFTER_NS, &index); index++) {
        bool gone = is_gone(region, index);
        uint64_t until = gone ? now_ns : vc_abandoned_known_until(region->usage, card, index, known_ns, now_ns);
        *(gone ? &dead : &stopped) += vc_abandoned_take(region->limits, region->usage, card, index, until, gone);
        *standing |= !gone; /* also where it waited for all of it: the arbiter goes by its lock, which its helper had not let go of */
    }
    *dead_ns = dead;
    return stopped + dead;
}

bool vc_slots_excuse(struct vc_region *region, uint32_t card, uint64_t free_ns)
{
    bool stopped = false;
    for (uint32_t index = 0; region->state == VC_REGION_ENFORCED && next_abandoned(region, card, free_ns, &index); index++)
        if (!is_gone(region, index)) {
            vc_abandoned_excuse(region->limits, region->usage, card, index, free_ns);
            stopped = true;
        }
    return stopped;
}

struct vc_slot *vc_region_slot(struct vc_region *region)
{
    struct vc_slot *slot = vc_load_acquire(&region->slot);
    if (VC_LIKELY(slot != NULL) || region->state != VC_REGION_ENFORCED)
        return slot;
    if (vc_now_ns() < vc_load_relaxed(&region->next_claim_ns))
        return NULL;
    pthread_mutex_lock(&region->slow_mutex);
    slot = region->slot;
    if (!slot) {
        slot = vc_slot_claim(region);
        if (!slot) {
            vc_store_relaxed(&region->next_claim_ns, vc_now_ns() + VC__CLAIM_INTERVAL_NS);
            vc_add(&region->usage->slot_shortage, 1);
            vc_log_once(VC_NOTICE_NO_SLOT, "%d processes of this container hold GPU memory already, the most that it may have; GPU memory is refused to this one until "
                        "one of them ends", VC_MAX_SLOTS);
        }
        vc_store_release(&region->slot, slot);
    }
    pthread_mutex_unlock(&region->slow_mutex);
    return slot;
}
