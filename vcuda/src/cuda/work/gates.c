/* One gate for each card, bound to the region's words, or to private ones where the region has none for us. */
#include "cuda/work/gates.h"

#include <string.h>

#include "base/clock.h"
#include "region/slot.h"

static struct vc_gate gates[VC_MAX_CARDS];
static uint32_t ready[VC_MAX_CARDS];
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct vc_slot_card nobodys_slot; /* for a process that found no free slot */

static void bind_gate(struct vc_gate *gate, struct vc_region *region, struct vc_slot *slot, int card)
{
    vc_gate_init(gate, region->limits, &region->limits->cards[card], &region->usage->cards[card],
                 slot ? &slot->cards[card] : &nobodys_slot);
    gate->alone = region->state == VC_REGION_UNCOUNTED;
    if (slot && region->state == VC_REGION_ENFORCED)
        gate->turns = (struct vc_turns){&region->usage->cards[card], region->usage->slots, &region->usage->slot_high_water,
                                        (uint32_t)card, (uint32_t)(slot - region->usage->slots), 0};
}

struct vc_gate *vc_gates_find(int card)
{
    return vc_load_acquire(&ready[card]) ? &gates[card] : NULL;
}

struct vc_gate *vc_gates_get(struct vc_region *region, int card)
{
    if (VC_LIKELY(vc_load_acquire(&ready[card])))
        return &gates[card];
    struct vc_slot *slot = vc_region_slot(region);
    pthread_mutex_lock(&mutex);
    if (!ready[card]) {
        bind_gate(&gates[card], region, slot, card);
        vc_store_release(&ready[card], 1);
    }
    pthread_mutex_unlock(&mutex);
    return &gates[card];
}

void vc_gates_settle_abandoned(const struct vc_gate *gate)
{
    ptrdiff_t card = gate - gates;
    uint64_t due = vc_slots_abandoned(vc_region_get(), (uint32_t)card, vc_now_ns());
    if (VC_UNLIKELY(due != 0))
        vc_gate_owe(&gates[card], due);
}

uint64_t vc_gates_rest(void)
{
    uint64_t next = UINT64_MAX, now = vc_now_ns();
    for (int card = 0; card < VC_MAX_CARDS; card++) {
        struct vc_gate *gate = vc_gates_find(card);
        uint64_t again = gate ? vc_gate_rest(gate, now) : UINT64_MAX;
        next = again < next ? again : next;
    }
    return next;
}

void vc_gates_forked(void)
{
    memset(ready, 0, sizeof ready);
    pthread_mutex_init(&mutex, NULL);
}
