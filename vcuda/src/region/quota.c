/* Reserve, commit, roll back, release: the memory quota without a lock. */
#include "region/quota.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/stat.h>

#include "base/clock.h"
#include "base/log.h"
#include "region/slot.h"
#include "region/witness.h"

#define VC__PATIENCE_NS 20000000u
#define VC__BACKOFF_NS 20000u
#define VC__ATTEMPTS 64
#define VC__INTACT_ATTEMPTS 1000

static uint64_t add_saturated(uint64_t a, uint64_t b)
{
    return a + b >= a ? a + b : UINT64_MAX;
}

/* Sums over all slots; `pinned` are those without managed memory, which need not be on the card. */
struct sums {
    uint64_t reserved, committed, pinned_reserved, pinned_committed;
};

static struct sums sum_slots(const struct vc_region *region, uint32_t card)
{
    struct sums sums = {0};
    for (uint32_t index = 0, count = vc_region_slots(region); index < count; index++) {
        const struct vc_slot_card *slot = &region->usage->slots[index].cards[card];
        uint64_t managed = 0, reserved = 0, committed = 0;
        /* What is pinned must never be seen too small: only if managed memory is released between the loads, and then the
         * generation has changed. Without an answer all counts as pinned. */
        for (int attempt = 0; attempt < VC__ATTEMPTS; attempt++) {
            uint64_t generation = vc_load(&slot->generation);
            managed = vc_load(&slot->managed_bytes);
            reserved = vc_load(&slot->reserved_bytes);
            committed = vc_load(&slot->committed_bytes);
            if (vc_load(&slot->generation) == generation)
                break;
            managed = 0;
        }
        sums.reserved = add_saturated(sums.reserved, reserved);
        sums.committed = add_saturated(sums.committed, committed);
        sums.pinned_reserved = add_saturated(sums.pinned_reserved, reserved > managed ? reserved - managed : 0);
        sums.pinned_committed = add_saturated(sums.pinned_committed, committed > managed ? committed - managed : 0);
    }
    return sums;
}

static uint64_t sum_reserved(const struct vc_region *region, uint32_t card)
{
    uint64_t sum = 0;
    for (uint32_t index = 0, count = vc_region_slots(region); index < count; index++)
        sum = add_saturated(sum, vc_load(&region->usage->slots[index].cards[card].reserved_bytes));
    return sum;
}

static uint64_t sum_committed(const struct vc_region *region, uint32_t card)
{
    uint64_t sum = 0;
    for (uint32_t index = 0, count = vc_region_slots(region); index < count; index++)
        sum = add_saturated(sum, vc_load(&region->usage->slots[index].cards[card].committed_bytes));
    return sum;
}

uint64_t vc_quota_limit(const struct vc_region *region, uint32_t card)
{
    struct vc_card_view view;
    vc_limits_read(region->limits, card, &view);
    return view.flags & VC_CARD_WHOLE ? UINT64_MAX : view.memory_bytes;
}

uint64_t vc_quota_used(const struct vc_region *region, uint32_t card)
{
    uint64_t overhead = vc_load_relaxed(&region->limits->cards[card].overhead_bytes), limit;
    if (region->state == VC_REGION_UNCOUNTED && (limit = vc_quota_limit(region, card)) != UINT64_MAX)
        return limit;
    return add_saturated(sum_committed(region, card), overhead);
}

/* What may be in the ledger: the limits less what the container uses beside it. `pinned` without managed memory. */
struct bounds {
    uint64_t all, pinned;
};

static struct bounds bounds_of(const struct vc_region *region, uint32_t card, bool managed)
{
    struct vc_card_view view;
    vc_limits_read(region->limits, card, &view);
    struct bounds bounds = {UINT64_MAX, UINT64_MAX};
    if (view.flags & VC_CARD_WHOLE)
        return bounds;
    bounds.all = view.memory_bytes > view.overhead_bytes ? view.memory_bytes - view.overhead_bytes : 0;
    if ((view.flags & VC_CARD_OVERSELL) && !managed)
        bounds.pinned = view.physical_bytes > view.overhead_bytes ? view.physical_bytes - view.overhead_bytes : 0;
    return bounds;
}

bool vc_quota_could_fit(const struct vc_region *region, uint32_t card, uint64_t bytes, bool managed)
{
    struct vc_card_view view;
    vc_limits_read(region->limits, card, &view);
    if (view.flags & VC_CARD_WHOLE)
        return true;
    for (uint32_t index = 0, count = vc_region_slots(region); index < count; index++)
        bytes = add_saturated(bytes, vc_load(&region->usage->slots[index].cards[card].context_bytes));
    return bytes <= view.memory_bytes && (managed || !(view.flags & VC_CARD_OVERSELL) || bytes <= view.physical_bytes);
}

/* Whether all reservations together, our own included, are within the bounds. */
static bool fits(const struct vc_region *region, uint32_t card, struct bounds bounds)
{
    if (VC_LIKELY(bounds.pinned == UINT64_MAX))
        return sum_reserved(region, card) <= bounds.all;
    struct sums sums = sum_slots(region, card);
    return sums.reserved <= bounds.all && sums.pinned_reserved <= bounds.pinned;
}

/* Whether the bounds forbid it already beside what is committed. */
static bool is_full(const struct vc_region *region, uint32_t card, struct bounds bounds, uint64_t bytes)
{
    struct sums sums = sum_slots(region, card);
    return add_saturated(sums.committed, bytes) > bounds.all || add_saturated(sums.pinned_committed, bytes) > bounds.pinned;
}

/* Whether a process in a lower slot has a reservation under way: it goes first. */
static bool must_give_way(const struct vc_region *region, uint32_t card, const struct vc_slot *own)
{
    for (const struct vc_slot *slot = region->usage->slots; slot < own; slot++) {
        if (vc_load(&slot->cards[card].reserved_bytes) > vc_load(&slot->cards[card].committed_bytes))
            return true;
    }
    return false;
}

/* Our reservation is in the sum and the sum is over the limit. It stays ours if the limit allows it beside everything
 * committed and those in the way finish in time; otherwise it is taken back. */
static bool settle(struct vc_region *region, uint32_t card, struct vc_slot *own, uint64_t bytes, bool managed)
{
    uint64_t *reserved = &own->cards[card].reserved_bytes;
    uint64_t deadline = vc_now_ns() + VC__PATIENCE_NS;
    bool keeper = __atomic_exchange_n(&region->contending, 1, __ATOMIC_ACQUIRE) == 0;
    bool granted = false;
    for (;;) {
        struct bounds bounds = bounds_of(region, card, managed); /* they may change while we wait */
        if (is_full(region, card, bounds, bytes) || vc_now_ns() > deadline) {
            if (vc_slots_reap(region) == 0)
                break;
            deadline = vc_now_ns() + VC__PATIENCE_NS; /* at most VC_MAX_SLOTS times */
        } else if (!keeper || must_give_way(region, card, own)) {
            vc_sub(reserved, bytes);
            vc_sleep_ns(VC__BACKOFF_NS);
            vc_add(reserved, bytes);
        } else {
            sched_yield();
        }
        if (fits(region, card, bounds_of(region, card, managed))) {
            granted = true;
            break;
        }
    }
    if (!granted)
        vc_sub(reserved, bytes);
    if (keeper)
        vc_store_release(&region->contending, 0);
    return granted;
}

static void say_damaged(struct vc_region *region, const char *why)
{
    vc_add_relaxed(&region->usage->account_damaged, 1);
    vc_log_once(VC_NOTICE_ACCOUNT,
                "the container's account of GPU memory (%s) was damaged: %s; GPU memory is refused until the processes that hold it have "
                "ended",
                region->file.path, why);
    utimensat(AT_FDCWD, region->file.path, NULL, 0); /* whoever measures watches it (overhead.h): let them look now */
}

/* Whether our slot says at least what was granted to us. Other threads may be in the middle of a change, but not for ever. */
static bool slot_intact(const struct vc_region *region, uint32_t card, const struct vc_slot *own)
{
    for (int attempt = 0; attempt < VC__INTACT_ATTEMPTS; attempt++) {
        uint64_t held = vc_load(&region->held_bytes[card]);
        bool less = vc_load(&own->cards[card].reserved_bytes) < held;
        if (!less || vc_load(&region->held_bytes[card]) != held)
            return true;
        vc_cpu_relax();
    }
    return false;
}

/* What was reserved is granted: note it where nobody else can write. False: the account was damaged, and nothing is granted. */
static bool grant(struct vc_region *region, uint32_t card, uint64_t bytes, bool limited)
{
    const char *why;
    if (VC_LIKELY(vc_add(&region->held_bytes[card], bytes) <= vc_load_relaxed(&region->witness.bytes[card])))
        return true;
    if (!limited || vc_witness_raise(region, card, &why))
        return true;
    say_damaged(region, why);
    vc_sub(&region->held_bytes[card], bytes);
    return false;
}

static void give_back(struct vc_region *region, uint32_t card, uint64_t bytes)
{
    uint64_t held = vc_sub(&region->held_bytes[card], bytes);
    if (VC_UNLIKELY(held + VC_WITNESS_SLACK < vc_load_relaxed(&region->witness.bytes[card])))
        vc_witness_lower(region, card);
}

/* `peak` (NULL: nobody asks): what all hold with it. */
static bool reserve(struct vc_region *region, uint32_t card, uint64_t bytes, bool managed, uint64_t *peak)
{
    struct vc_slot *own = vc_region_slot(region);
    if (!own || vc_load_relaxed(&region->damaged))
        return false;
    struct bounds bounds = bounds_of(region, card, managed);
    if (VC_UNLIKELY((region->state == VC_REGION_UNCOUNTED && bounds.all != UINT64_MAX) ||
                    (vc_load_relaxed(&region->limits->flags) & VC_LIMITS_REFUSED)))
        return false;
    if (bytes > bounds.all || bytes > bounds.pinned)
        return false;
    uint64_t held = vc_load(&region->held_bytes[card]);
    if (VC_UNLIKELY(vc_add(&own->cards[card].reserved_bytes, bytes) < held + bytes) && !slot_intact(region, card, own)) {
        vc_store(&region->damaged, 1);
        vc_raise_to(&own->cards[card].reserved_bytes, vc_load(&region->held_bytes[card]));
        vc_raise_to(&own->cards[card].committed_bytes, vc_load(&region->held_bytes[card]));
        say_damaged(region, "the ledger of this process was overwritten");
        return false;
    }
    uint64_t sum = sum_reserved(region, card);
    if (VC_UNLIKELY(sum > bounds.all || (bounds.pinned != UINT64_MAX && !fits(region, card, bounds)))) {
        if (!settle(region, card, own, bytes, managed))
            return false;
        sum = sum_reserved(region, card);
        sum = sum < bounds.all ? sum : bounds.all;
    }
    if (VC_UNLIKELY(!grant(region, card, bytes, bounds.all != UINT64_MAX))) {
        vc_sub(&own->cards[card].reserved_bytes, bytes);
        return false;
    }
    if (peak)
        vc_raise_to(peak, sum);
    return true;
}

bool vc_quota_reserve(struct vc_region *region, uint32_t card, uint64_t bytes)
{
    return reserve(region, card, bytes, false, &region->usage->cards[card].memory_peak_bytes);
}

/* What of both bounds nobody has reserved. */
static uint64_t rest_of(const struct vc_region *region, uint32_t card, struct bounds bounds)
{
    struct sums sums = sum_slots(region, card);
    uint64_t all = bounds.all > sums.reserved ? bounds.all - sums.reserved : 0;
    uint64_t pinned = bounds.pinned > sums.pinned_reserved ? bounds.pinned - sums.pinned_reserved : 0;
    return all < pinned ? all : pinned;
}

uint64_t vc_quota_reserve_rest(struct vc_region *region, uint32_t card)
{
    uint64_t before = 0;
    for (int attempt = 0; attempt < VC__ATTEMPTS; attempt++) {
        struct bounds bounds = bounds_of(region, card, false);
        uint64_t rest = rest_of(region, card, bounds);
        if (bounds.all == UINT64_MAX || (rest != 0 && rest == before)) /* so much was there and could not be had: the account is damaged */
            return 0;
        if (rest == 0 && vc_slots_reap(region) == 0)
            return 0;
        if (rest != 0 && reserve(region, card, rest, false, NULL))
            return rest;
        before = rest;
    }
    return 0;
}

bool vc_quota_reserve_managed(struct vc_region *region, uint32_t card, uint64_t bytes)
{
    return reserve(region, card, bytes, true, &region->usage->cards[card].memory_peak_bytes);
}

bool vc_quota_oversells(const struct vc_region *region, uint32_t card)
{
    return (vc_load_relaxed(&region->limits->cards[card].flags) & (VC_CARD_OVERSELL | VC_CARD_WHOLE)) == VC_CARD_OVERSELL;
}

void vc_quota_refused(struct vc_region *region, uint32_t card)
{
    vc_add_relaxed(&region->usage->cards[card].memory_refusals, 1);
}

static uint64_t *kind_counter(struct vc_slot_card *mine, enum vc_quota_kind kind)
{
    bool managed = kind == VC_QUOTA_MANAGED || kind == VC_QUOTA_OVERSOLD;
    return kind == VC_QUOTA_CONTEXT ? &mine->context_bytes : managed ? &mine->managed_bytes : NULL;
}

static void add_committed(struct vc_slot_card *mine, uint64_t bytes, enum vc_quota_kind kind)
{
    vc_add(&mine->committed_bytes, bytes);
    uint64_t *counter = kind_counter(mine, kind);
    if (counter)
        vc_add(counter, bytes);
    if (kind == VC_QUOTA_CONTEXT)
        vc_add_relaxed(&mine->contexts, 1);
    if (kind == VC_QUOTA_OVERSOLD)
        vc_add_relaxed(&mine->oversold_bytes, bytes);
    vc_add(&mine->generation, 1);
}

void vc_quota_commit(struct vc_region *region, uint32_t card, uint64_t bytes, enum vc_quota_kind kind)
{
    struct vc_slot *own = vc_region_slot(region);
    if (own)
        add_committed(&own->cards[card], bytes, kind);
}

void vc_quota_rollback(struct vc_region *region, uint32_t card, uint64_t bytes)
{
    struct vc_slot *own = vc_region_slot(region);
    if (!own)
        return;
    give_back(region, card, bytes);
    vc_sub(&own->cards[card].reserved_bytes, bytes);
}

void vc_quota_release(struct vc_region *region, uint32_t card, uint64_t bytes, enum vc_quota_kind kind)
{
    struct vc_slot *own = vc_region_slot(region);
    if (!own)
        return;
    struct vc_slot_card *mine = &own->cards[card];
    uint64_t *counter = kind_counter(mine, kind);
    if (counter)
        vc_sub(counter, bytes);
    if (kind == VC_QUOTA_CONTEXT)
        __atomic_sub_fetch(&mine->contexts, 1, __ATOMIC_RELAXED);
    if (kind == VC_QUOTA_OVERSOLD)
        __atomic_sub_fetch(&mine->oversold_bytes, bytes, __ATOMIC_RELAXED);
    vc_add(&mine->generation, 1);
    give_back(region, card, bytes);
    /* In this order reserved_bytes never reads less than committed_bytes for long: others would take it for idle. */
    vc_sub(&mine->committed_bytes, bytes);
    vc_sub(&mine->reserved_bytes, bytes);
}

static uint64_t sum_generations(const struct vc_region *region, uint32_t card)
{
    uint64_t sum = 0;
    for (uint32_t index = 0, count = vc_region_slots(region); index < count; index++)
        sum += vc_load(&region->usage->slots[index].cards[card].generation);
    return sum;
}

/* What all hold at one moment, if that can be told and is beyond `all`; else `all`. Memory that one gives back while it is added up, and another
 * one takes, would count twice. */
static uint64_t granted_beyond(const struct vc_region *region, uint32_t card, uint64_t all)
{
    for (int attempt = 0; attempt < VC__ATTEMPTS; attempt++) {
        uint64_t generations = sum_generations(region, card), sum = sum_committed(region, card);
        if (sum <= all)
            return all;
        if (sum == sum_committed(region, card) && generations == sum_generations(region, card))
            return sum;
    }
    return all;
}

void vc_quota_charge(struct vc_region *region, uint32_t card, uint64_t bytes, enum vc_quota_kind kind)
{
    struct vc_slot *own = vc_region_slot(region);
    if (!own)
        return;
    vc_add(&own->cards[card].reserved_bytes, bytes);
    add_committed(&own->cards[card], bytes, kind);
    const char *why;
    bool limited = vc_quota_limit(region, card) != UINT64_MAX;
    uint64_t held = vc_add(&region->held_bytes[card], bytes);
    if (region->state == VC_REGION_ENFORCED && limited && held > vc_load_relaxed(&region->witness.bytes[card]))
        vc_witness_raise(region, card, &why);
    if (!limited)
        return;
    uint64_t all = bounds_of(region, card, false).all, sum = sum_reserved(region, card);
    /* Beyond the limit counts what was granted: others' reservations may be refused yet. */
    vc_raise_to(&region->usage->cards[card].memory_peak_bytes, sum <= all ? sum : granted_beyond(region, card, all));
}
