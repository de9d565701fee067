/* The gates of this process: one for each of its cards, made at its first use. */
#ifndef VC_GATES_H
#define VC_GATES_H

#include "gate/gate.h"
#include "region/regions.h"

/* The gate before a card of the process. */
struct vc_gate *vc_gates_get(int card);

/* … if there is one already, else NULL. */
struct vc_gate *vc_gates_find(int card);

/* The opposite: which card a gate is before. */
const struct vc_card *vc_gates_card(const struct vc_gate *gate);

/* Charge what other processes of the container left on the card when they stopped or ended. */
void vc_gates_settle_abandoned(struct vc_gate *gate);

/* The gate had the process begin where it had nothing on the card: told where no other process can change it, before anything is launched. */
void vc_gates_opened(struct vc_gate *gate, uint64_t now_ns);

/* The helper's: the card was asked for what stopped processes left there, as of `probe.known_ns`. */
void vc_gates_card_was_asked(struct vc_gate *gate, bool busy);
/* The helper's: the card was found free at `free_ns`, so what stopped processes left there is over, and what passed since they were last charged is not. */
void vc_gates_card_was_free(struct vc_gate *gate, uint64_t free_ns);

/* The helper's: nothing but a stop explains why it did not look when it should have. */
void vc_gates_stood_still(void);

/* The helper's: tell what was charged, and have gates rest whose work is over; returns when to look again. */
uint64_t vc_gates_rest(void);

/* The application waited for all that the process had on the card: told at once, as the process may end. */
void vc_gates_close(struct vc_gate *gate);

/* The helper's, around a look at everything, whose moment somebody else may have chosen (`held`): where it is told whether the card has work behind a gate, or NULL if that is not asked now or known already;
 * returns when to ask again. */
void vc_gates_sample_begins(bool held);
bool *vc_gates_sample(const struct vc_gate *gate);
uint64_t vc_gates_sample_ends(void);

/* Whether any card of the process needs one. */
static inline bool vc_gates_needed(void)
{
    const struct vc_regions *regions = vc_regions_get();
    for (uint32_t card = 0; card < regions->card_count; card++)
        if (vc_gate_needed(regions->cards[card].limit))
            return true;
    return false;
}

/* In a forked child: the parent's are not its own. */
void vc_gates_forked(void);

#endif
