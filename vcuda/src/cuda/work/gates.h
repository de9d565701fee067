/* The gates of this process: one for each card of the share, made at its first use. */
#ifndef VC_GATES_H
#define VC_GATES_H

#include "gate/gate.h"
#include "region/region.h"

/* The gate before a card. Pre: card < region->card_count. */
struct vc_gate *vc_gates_get(struct vc_region *region, int card);

/* … if there is one already, else NULL. */
struct vc_gate *vc_gates_find(int card);

/* Charge what other processes of the container left on the card when they stopped or ended. */
void vc_gates_settle_abandoned(const struct vc_gate *gate);

/* The helper's: have gates rest whose work is over; returns when to look again. */
uint64_t vc_gates_rest(void);

/* Whether any card of the share needs one. */
static inline bool vc_gates_needed(const struct vc_region *region)
{
    for (uint32_t card = 0; card < region->card_count; card++)
        if (vc_gate_needed(&region->limits->cards[card]))
            return true;
    return false;
}

/* In a forked child: the parent's are not its own. */
void vc_gates_forked(void);

#endif
