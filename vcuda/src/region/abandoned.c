/* Bits, a compare-and-swap, and others' part taken out. */
#include "region/abandoned.h"

#include "base/atomic.h"
#include "region/share.h"

void vc_abandoned_open(struct vc_card_usage *usage, uint32_t slot)
{
    __atomic_or_fetch(&usage->open_slots[slot / 64], UINT64_C(1) << slot % 64, __ATOMIC_RELEASE);
}

void vc_abandoned_close(struct vc_card_usage *usage, uint32_t slot)
{
    __atomic_and_fetch(&usage->open_slots[slot / 64], ~(UINT64_C(1) << slot % 64), __ATOMIC_RELEASE);
}

/* When a process that is gone ended, at the latest: the arbiter saw it alive until then. Of one that it never saw it says nothing: then
 * that is when it last saw any of the container. */
static uint64_t ended(const struct vc_limits *limits, const struct vc_usage *usage, uint32_t card, uint32_t slot, uint64_t paid_until_ns,
                      uint64_t now_ns)
{
    uint64_t end = paid_until_ns + VC_ABANDONED_UNKNOWN_NS;
    if (vc_share_arbitrated(limits, now_ns)) {
        uint64_t seen = vc_load_relaxed(&limits->ended_ns[slot]);
        bool its_own = seen > vc_load_relaxed(&usage->slots[slot].claimed_ns);
        end = its_own ? seen : vc_load_relaxed(&limits->cards[card].alive_ns);
    }
    return end < now_ns ? end : now_ns;
}

static bool others_are_open(const struct vc_card_usage *usage, uint32_t slot)
{
    uint64_t own = UINT64_C(1) << slot % 64, half = slot / 64;
    return vc_load_relaxed(&usage->open_slots[half]) & ~own || vc_load_relaxed(&usage->open_slots[!half]);
}

/* What other tenants had of the card meanwhile, as far as the arbiter knows; never nearly all. Their clock goes on, behind an end that is found `late_ns` later,
 * as long as other processes of the container have work there. */
static uint64_t without_others(const struct vc_card_limit *limit, const struct vc_slot_card *slot, uint64_t passed_ns, uint64_t late_ns)
{
    uint64_t others = vc_load_relaxed(&limit->others_gpu_ns) - vc_load_relaxed(&slot->others_then_ns);
    if ((int64_t)others > 0)
        others = (uint64_t)((double)others * (double)passed_ns / (double)(passed_ns + late_ns));
    uint64_t most = passed_ns - passed_ns / 5;
    return passed_ns - ((int64_t)others < 0 ? 0 : others < most ? others : most);
}

enum { STRETCHES = sizeof((struct vc_paid *)0)->stretches / sizeof(struct vc_stretch) };

/* What of that lies in none of the stretches from `first` on. */
static uint64_t outside(const struct vc_paid *paid, unsigned first, uint64_t from_ns, uint64_t until_ns)
{
    uint64_t sum = 0;
    for (unsigned i = first; i < STRETCHES && from_ns < until_ns; i++) {
        uint64_t from = vc_load_relaxed(&paid->stretches[i].from_ns), until = vc_load_acquire(&paid->stretches[i].until_ns);
        if (from >= until || from >= until_ns || until <= from_ns)
            continue;
        if (from > from_ns)
            sum += outside(paid, i + 1, from_ns, from);
        from_ns = until;
    }
    return sum + (until_ns > from_ns ? until_ns - from_ns : 0);
}

/* One that it touches becomes longer, else the oldest is forgotten. */
static void remember(struct vc_paid *paid, uint64_t from_ns, uint64_t until_ns)
{
    struct vc_stretch *place = &paid->stretches[0];
    for (unsigned i = 0; i < STRETCHES; i++) {
        struct vc_stretch *one = &paid->stretches[i];
        uint64_t from = vc_load_relaxed(&one->from_ns), until = vc_load_acquire(&one->until_ns);
        if (from < until && from <= until_ns && from_ns <= until) {
            vc_store_relaxed(&one->from_ns, from < from_ns ? from : from_ns);
            vc_store_release(&one->until_ns, until > until_ns ? until : until_ns);
            return;
        }
        place = until < vc_load_relaxed(&place->until_ns) ? one : place;
    }
    if (vc_load_relaxed(&place->until_ns) > until_ns) /* older than what is remembered */
        return;
    vc_store_relaxed(&place->from_ns, from_ns);
    vc_store_release(&place->until_ns, until_ns);
}

uint64_t vc_abandoned_cover(struct vc_paid *paid, uint64_t from_ns, uint64_t until_ns)
{
    if (until_ns <= from_ns)
        return 0;
    uint64_t passed = outside(paid, 0, from_ns, until_ns);
    remember(paid, from_ns, until_ns);
    return passed;
}

uint64_t vc_abandoned_known_until(const struct vc_usage *usage, uint32_t card, uint32_t slot, uint64_t known_ns, uint64_t now_ns)
{
    uint64_t finish = vc_load_acquire(&usage->slots[slot].cards[card].predicted_finish_ns), since = finish > known_ns ? finish : known_ns;
    return now_ns < since + VC_ABANDONED_UNPROBED_NS ? known_ns : now_ns;
}

void vc_abandoned_excuse(const struct vc_limits *limits, struct vc_usage *usage, uint32_t card, uint32_t slot, uint64_t free_ns)
{
    struct vc_slot_card *own = &usage->slots[slot].cards[card];
    uint64_t finish = vc_load_acquire(&own->predicted_finish_ns);
    if (finish >= free_ns || vc_load_relaxed(&own->others_then_ns) == VC_ALL_DONE ||
        !__atomic_compare_exchange_n(&own->predicted_finish_ns, &finish, free_ns, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        return; /* or its process goes on */
    vc_store_relaxed(&usage->slots[slot].unpaid_ns[card], 0);
    vc_store_relaxed(&own->others_then_ns, vc_load_relaxed(&limits->cards[card].others_gpu_ns));
}

uint64_t vc_abandoned_take(const struct vc_limits *limits, struct vc_usage *usage, uint32_t card, uint32_t slot, uint64_t now_ns,
                           bool gone)
{
    struct vc_card_usage *shared = &usage->cards[card];
    struct vc_slot_card *own = &usage->slots[slot].cards[card];
    if (!vc_abandoned_is_open(shared, slot))
        return 0;
    uint64_t finish = vc_load_acquire(&own->predicted_finish_ns), unpaid = vc_load_relaxed(&usage->slots[slot].unpaid_ns[card]);
    uint64_t paid_until = finish - (unpaid < finish ? unpaid : finish);
    uint64_t until = gone ? ended(limits, usage, card, slot, paid_until, now_ns) : now_ns;
    uint64_t due = 0;
    if (until > paid_until && vc_load_relaxed(&own->others_then_ns) != VC_ALL_DONE) {
        uint64_t owed = vc_load_relaxed(&own->owed_ns), most = owed < VC_ABANDONED_MOST_NS ? VC_ABANDONED_MOST_NS - owed : 0;
        due = without_others(&limits->cards[card], own, until - paid_until, others_are_open(shared, slot) ? now_ns - until : 0);
        if (!__atomic_compare_exchange_n(&own->predicted_finish_ns, &finish, until, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return 0; /* another one was faster, or its process goes on */
        due = (uint64_t)((double)due / (double)(until - paid_until) * (double)vc_abandoned_cover(&usage->paid[card], paid_until, until));
        vc_store_relaxed(&usage->slots[slot].unpaid_ns[card], 0);
        due = due < most ? due : most;
        vc_store_relaxed(&own->others_then_ns, vc_load_relaxed(&limits->cards[card].others_gpu_ns));
    }
    if (gone)
        vc_abandoned_close(shared, slot);
    else
        vc_add(&own->owed_ns, due);
    return due;
}
