/* Turns: of the active processes of one container, one at a time uses the container's lease.
 *
 * A turn is one word in the usage file, taken by compare-and-swap: who, and until when. It is never handed over: it ends by the
 * clock, or when its owner has nothing on the card, so a process killed in its turn delays its siblings by one turn at most.
 * Next is whoever of those that wait was served least; nothing is banked while idle.
 */
#ifndef VC_GATE_TURN_H
#define VC_GATE_TURN_H

#include <stdbool.h>
#include <stdint.h>

#include "region/abi.h"

enum {
    VC_TURN_NS = 8000000,       /* the longest turn, where no lease ends it earlier */
    VC_TURN_IDLE_NS = 200000,   /* an owner with nothing on the card for so long has given up its turn */
    VC_TURN_LEAD_NS = 40000,   /* … and so long before its work is done it may end: a sibling needs time to come */
    VC_TURN_AWAY_NS = 50000000, /* a process that did not ask for so long was idle: it comes back level with its siblings */
    VC_TURN_GRACE_NS = 500000,  /* so long the next in the row may take to come; then anybody takes the turn */
};

/* The container's processes on one card. `slots` NULL: this process counts by itself and takes no turns. */
struct vc_turns {
    struct vc_card_usage *usage;
    struct vc_slot *slots;
    const uint32_t *slots_used;
    uint32_t card;
    uint32_t own; /* index of this process's slot */
    uint64_t asked_ns; /* when it last asked for the turn */
};

struct vc_turn {
    bool mine;
    bool siblings_wait;  /* mine: it ends at `end_ns`; else it would be renewed */
    bool call_next;      /* not mine: the card is free, and the one whose turn it is should look */
    uint64_t end_ns;     /* mine: its end; not mine: when to look again */
    uint64_t clock_ns;   /* mine: when the work of the owner before it is predicted to end */
};

/* Take the turn, keep it, or learn when to ask again, in a lease that began at `lease_start_ns`. A new turn lasts until
 * `lease_end_ns` (UINT64_MAX: it has no end), at most VC_TURN_NS. */
struct vc_turn vc_turn_take(struct vc_turns *turns, uint64_t now_ns, uint64_t lease_start_ns, uint64_t lease_end_ns);

/* Our next operation does not fit into the turn: it ends when what we launched is predicted to be done, a little early. Returns
 * whether the siblings should look. */
bool vc_turn_shorten(const struct vc_turns *turns, uint64_t now_ns, uint64_t finish_ns);

/* What we launched waits for something else than the card, but for what is done at `from_ns`: then whoever of the siblings waits may have the turn. Returns whether they should look. */
bool vc_turn_is_anybodys(const struct vc_turns *turns, uint64_t now_ns, uint64_t from_ns);

/* Nothing is to be launched soon: whoever waits may have the turn now (VC_TURN_PASSED), or no sibling has anything to do (VC_TURN_UNWANTED). */
enum vc_turn_left { VC_TURN_KEPT, VC_TURN_PASSED, VC_TURN_UNWANTED };
enum vc_turn_left vc_turn_leave(const struct vc_turns *turns, uint64_t now_ns);

/* How many siblings wait for the turn. */
uint32_t vc_turn_siblings_wait(const struct vc_turns *turns, uint64_t now_ns);
/* How many siblings say that they have work on the card. */
uint32_t vc_turn_siblings_busy(const struct vc_turns *turns, uint64_t now_ns);

#endif
