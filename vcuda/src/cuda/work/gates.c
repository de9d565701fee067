/* One gate for each card, bound to the region's words, or to private ones where the region has none for us. */
#include "cuda/work/gates.h"

#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "cuda/work/bell.h"
#include "region/charged.h"
#include "region/slot.h"

static struct vc_gate gates[VC_MAX_PROCESS_CARDS];
static uint32_t ready[VC_MAX_PROCESS_CARDS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
/* A process of which little is known yet: all that it launches first is marked, or it could end before samples are sure. */
static const uint64_t YOUNG_NS = 250000000, SUSPECTED_NS = 2000000000;
/* The arbiter saw one that the file says nothing of so lately that the card is asked. */
static const uint64_t UNSAID_NS = 30000000;
/* Who may not tell that it has work tries again. */
static const long LOCKED_OUT_NS = 1000000;
static struct vc_slot_card nobodys_slot; /* for a process that found no free slot */

static void bind_gate(struct vc_gate *gate, const struct vc_card *card, struct vc_slot *slot)
{
    const struct vc_region *region = card->region;
    vc_gate_init(gate, region->limits, card->limit, card->usage, slot ? &slot->cards[card->index] : &nobodys_slot);
    gate->alone = region->state == VC_REGION_UNCOUNTED;
    if (!slot || region->state != VC_REGION_ENFORCED)
        return;
    gate->paid = &region->usage->paid[card->index];
    gate->turns = (struct vc_turns){card->usage, region->usage->slots, &region->usage->slot_high_water, card->index,
                                    (uint32_t)(slot - region->usage->slots), 0};
}

struct vc_gate *vc_gates_find(int card)
{
    return vc_load_acquire(&ready[card]) ? &gates[card] : NULL;
}

/* Others of its container were found lately to do what nobody charged. */
static bool is_suspected(const struct vc_gate *gate, uint64_t now_ns)
{
    const struct vc_card_usage *usage = gate->usage;
    const struct vc_card_limit *limit = gate->limit;
    return vc_samples_suspect(vc_load_relaxed(&usage->all_until_ns), vc_load_relaxed(&usage->all_for_ns), now_ns) ||
           vc_samples_suspect(vc_load_relaxed(&limit->all_until_ns), vc_load_relaxed(&limit->all_for_ns), now_ns);
}

struct vc_gate *vc_gates_get(int card)
{
    if (VC_LIKELY(vc_load_acquire(&ready[card])))
        return &gates[card];
    struct vc_slot *slot = vc_region_slot(vc_card((uint32_t)card)->region);
    pthread_mutex_lock(&mutex);
    if (!ready[card]) {
        bind_gate(&gates[card], vc_card((uint32_t)card), slot);
        uint64_t now = vc_now_ns();
        bool suspected = gates[card].turns.slots && is_suspected(&gates[card], now);
        vc_gate_mark_all(&gates[card], now, now + (suspected ? SUSPECTED_NS : YOUNG_NS));
        vc_store_release(&ready[card], 1);
    }
    pthread_mutex_unlock(&mutex);
    return &gates[card];
}

const struct vc_card *vc_gates_card(const struct vc_gate *gate)
{
    return vc_card((uint32_t)(gate - gates));
}

void vc_gates_settle_abandoned(struct vc_gate *gate)
{
    const struct vc_card *card = vc_gates_card(gate);
    bool stopped;
    uint64_t now = vc_now_ns(), dead, due = vc_slots_abandoned(card->region, card->index, now, vc_load_relaxed(&gate->probe.known_ns), &dead, &stopped);
    uint64_t unsaid = vc_load_relaxed(&gate->limit->unsaid_ns);
    if (VC_UNLIKELY(stopped || (unsaid != 0 && now < unsaid + UNSAID_NS))) {
        vc_store_relaxed(&gate->probe.stands_ns, now);
        if (vc_load_relaxed(&gate->probe.due_ns) == 0)
            vc_bell_expect(now);
    }
    if (VC_UNLIKELY(due != 0))
        vc_gate_owe(gate, due, dead);
}

void vc_gates_card_was_free(struct vc_gate *gate, uint64_t free_ns)
{
    const struct vc_card *card = vc_gates_card(gate);
    if (vc_slots_excuse(card->region, card->index, free_ns)) /* what begins later, behind what a sibling does, is seen only by who goes on to look */
        vc_store_relaxed(&gate->probe.stands_ns, vc_now_ns());
}

void vc_gates_card_was_asked(struct vc_gate *gate, bool busy)
{
    const struct vc_card *card = vc_gates_card(gate);
    if (gate->turns.slots)
        vc_charged_tell_asked(card->region, card->index, gate->probe.known_ns, busy);
}

static void note_told(struct vc_gate *gate, bool told)
{
    vc_store_relaxed(&gate->untold, !told);
    if (VC_UNLIKELY(!told))
        vc_log_once(VC_NOTICE_LOCKED_OUT, "another process has locked what this one tells of its GPU time: until it lets go of that, this one gets 1/%d of "
                                          "the limit at most", VC_MAX_SLOTS);
}

/* What it would launch nobody could charge, were it killed or stopped soon. */
void vc_gates_opened(struct vc_gate *gate, uint64_t now_ns)
{
    const struct vc_card *card = vc_gates_card(gate);
    for (; gate->turns.slots && VC_UNLIKELY(!vc_charged_open(card->region, card->index, now_ns)); now_ns = vc_now_ns()) {
        note_told(gate, false);
        nanosleep(&(struct timespec){.tv_nsec = LOCKED_OUT_NS}, NULL);
    }
}

/* Where no other process of the container can change it: what it was charged, and whether it has work on the card. Returns when to look again. */
static uint64_t tell(struct vc_gate *gate, uint64_t now_ns)
{
    const struct vc_card *card = vc_gates_card(gate);
    if (!gate->turns.slots)
        return UINT64_MAX;
    uint64_t opens = vc_charged_opens(card->region, card->index);
    bool told = vc_charged_tell(card->region, card->index, vc_gate_tell(gate, now_ns)), open = vc_gate_is_open(gate);
    if (open)
        told = vc_charged_open(card->region, card->index, now_ns) && told;
    else
        vc_charged_close(card->region, card->index, opens);
    note_told(gate, told);
    return open ? now_ns + VC_CHARGED_LOOKED_NS : UINT64_MAX;
}

void vc_gates_close(struct vc_gate *gate)
{
    uint64_t now = vc_now_ns();
    vc_gate_close(gate, now);
    tell(gate, now);
}

uint64_t vc_gates_rest(void)
{
    uint64_t next = UINT64_MAX, now = vc_now_ns();
    for (int card = 0; card < VC_MAX_PROCESS_CARDS; card++) {
        struct vc_gate *gate = vc_gates_find(card);
        if (!gate)
            continue;
        bool opened = false;
        uint64_t again = vc_gate_rest(gate, now, &opened), told = tell(gate, now);
        if (VC_UNLIKELY(opened))
            vc_gate_call_arbiter(gate);
        next = vc_earlier(next, vc_earlier(again, told));
    }
    return next;
}

void vc_gates_stood_still(void)
{
    for (int card = 0; card < VC_MAX_PROCESS_CARDS; card++) {
        struct vc_gate *gate = vc_gates_find(card);
        if (gate)
            vc_gate_stood_still(gate, vc_now_ns());
    }
}

/* --- samples --- */

/* So long after the last launch nobody looks any more. */
static const uint64_t SAMPLED_NS = 20000000;
/* A helper that had to wait for a processor runs when another thread begins to wait, as at a callback's end: just then their work begins on the card. It looks at
 * random within so much. */
static const uint64_t LATE_NS = 20000, APART_NS = 50000;

static struct {
    uint64_t at_ns;  /* when to look; 0: not until something is launched */
    uint64_t active_ns, launches;
    uint64_t wait_ns; /* so long on average */
    bool due, busy;
} sampling[VC_MAX_PROCESS_CARDS]; /* the helper's own */
static bool held_late; /* somebody else may have chosen when this look is */
static uint64_t dice;

static uint64_t at_random(uint64_t most_ns)
{
    dice ^= dice << 13;
    dice ^= dice >> 7;
    dice ^= dice << 17;
    return dice % most_ns;
}

static void tell_found(struct vc_gate *gate)
{
    const struct vc_card *card = vc_gates_card(gate);
    uint64_t more, less;
    if (!gate->turns.slots)
        return;
    vc_gate_found(gate, &more, &less);
    note_told(gate, vc_charged_tell_found(card->region, card->index, more, less));
}

void vc_gates_sample_begins(bool held)
{
    uint64_t now = vc_now_ns();
    bool late = false;
    held_late = held;
    if (dice == 0)
        dice = now | 1;
    for (int card = 0; card < VC_MAX_PROCESS_CARDS; card++) {
        sampling[card].due = sampling[card].at_ns != 0 && sampling[card].at_ns <= now;
        sampling[card].busy = false;
        late |= sampling[card].due && sampling[card].at_ns + LATE_NS < now;
    }
    for (uint64_t until = late ? now + at_random(APART_NS) : 0; vc_now_ns() < until;)
        vc_cpu_relax();
}

bool *vc_gates_sample(const struct vc_gate *gate)
{
    bool needed = sampling[gate - gates].due && !sampling[gate - gates].busy;
    return needed ? &sampling[gate - gates].busy : NULL;
}

uint64_t vc_gates_sample_ends(void)
{
    uint64_t next = UINT64_MAX, now = vc_now_ns();
    for (int card = 0; card < VC_MAX_PROCESS_CARDS; card++) {
        struct vc_gate *gate = vc_gates_find(card);
        uint64_t at = sampling[card].at_ns, launches = gate ? vc_load_relaxed(&gate->launches) : 0;
        if (!gate)
            continue;
        if (sampling[card].due) {
            sampling[card].wait_ns = vc_gate_sampled(gate, now, sampling[card].busy, held_late);
            tell_found(gate);
        }
        if (launches != sampling[card].launches || (sampling[card].due && sampling[card].busy))
            sampling[card].active_ns = now;
        sampling[card].launches = launches;
        bool active = now < sampling[card].active_ns + SAMPLED_NS;
        if (at == 0 && active)
            at = now + at_random(VC_SAMPLE_NS);
        else if (sampling[card].due)
            at = active ? now + sampling[card].wait_ns / 2 + at_random(sampling[card].wait_ns) : 0;
        if (at == 0 && sampling[card].at_ns != 0)
            vc_gate_not_sampled(gate);
        sampling[card].at_ns = at;
        vc_store_relaxed(&gate->unsampled, at == 0);
        next = at != 0 && at < next ? at : next;
    }
    return next;
}

void vc_gates_forked(void)
{
    memset(sampling, 0, sizeof sampling);
    memset(ready, 0, sizeof ready);
    pthread_mutex_init(&mutex, NULL);
}
