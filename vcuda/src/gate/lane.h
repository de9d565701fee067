/* One thread's way through the gate on one stream: what it may launch without asking, and where events belong.
 *
 * A lane belongs to its thread; no lock. An interval is measured from one mark (event) to the next on the same lane. Two
 * threads on one stream have a lane each: their intervals overlap and the union of busy time pays them once.
 */
#ifndef VC_GATE_LANE_H
#define VC_GATE_LANE_H

#include <stdbool.h>
#include <stdint.h>

#include "gate/estimate.h"
#include "gate/gate.h"
#include "gate/ticks.h"
#include "base/atomic.h"

enum { VC_LANE_OPERATIONS = 8, VC_LANE_FIXED_POINT = 20 };

/* An operation of an interval, and what it was taken to cost. */
struct vc_learner {
    struct vc_estimate *estimate;
    uint64_t cost_ns;
};

struct vc_lane {
    /* The permit: work paid for in advance, good while the lane's stream is predicted busy and until the limit. It is all that a
     * launch within it touches: 56 bytes, one cache line where they are aligned, so that the first launches after a pause find it at once. */
    uint64_t allowance_ns, used_ns;
    uint64_t busy_until_ticks, limit_ticks;
    uint64_t ticks_per_ns; /* fixed point; 0: the rate is not known yet, so no permits */
    struct vc_estimate *last; /* of the operation before, if it is one of the learners */
    uint64_t passed;          /* operations within this permit, not yet noted below */

    struct vc_gate *gate;
    uint64_t finish_ns;    /* predicted end of what this lane launched */
    uint64_t unmarked_since_ns; /* when the oldest operation without a mark behind it was launched, at most a permit later; 0: none */
    struct vc_gate_others others_then; /* what others had had of the card by then */
    uint64_t elsewhere_ns; /* `behind`: what comes first is predicted to take so long; 0: nobody knows */
    uint64_t launches;     /* not yet added to the region */
    bool mark_all;         /* nobody could ask its stream: no permit, and a mark behind each operation */
    bool behind;           /* something that is not the card's work may be under way on its stream before all of what the interval holds: when that begins nobody knows */

    /* The interval under way, if a mark opened it. */
    bool open;
    uint64_t seen_then_ns; /* vc_gate.seen_ns then */
    uint64_t estimate_ns;
    uint32_t operations;
    uint64_t sequence;
    unsigned distinct;
    struct vc_learner learners[VC_LANE_OPERATIONS];
};

/* What to do around one operation. */
struct vc_lane_step {
    uint64_t cost_ns; /* as it was charged; 0: unknown */
    uint64_t risk_ns; /* what it may turn out to cost, where that varies */
    bool mark_before; /* record an event before it: an interval begins */
    bool mark_after;  /* record an event behind it: `interval` ends there, and the next one begins */
    bool closing;     /* the gate shuts behind it */
    bool late;        /* operations before it wait for a mark for too long */
    bool due;         /* it is to be measured */
    bool left;        /* mark_before: operations without a mark lie before it, which should have been done by now */
    bool alone;       /* … nothing of the lane lies before it that has no mark behind it */
    bool concurrent;  /* it starts beside work of another stream: only its own interval tells what it adds */
    struct vc_interval interval; /* without its times */
    unsigned distinct;
    struct vc_learner learners[VC_LANE_OPERATIONS];
};

static inline void vc_lane__note(struct vc_lane *lane, struct vc_estimate *estimate, uint64_t cost_ns)
{
    /* A lost update of two threads only delays the next measurement. */
    __atomic_store_n(&estimate->unmeasured_ns, __atomic_load_n(&estimate->unmeasured_ns, __ATOMIC_RELAXED) + cost_ns,
                     __ATOMIC_RELAXED);
    if (VC_LIKELY(lane->last == estimate) || lane->distinct == VC_LANE_OPERATIONS)
        return;
    lane->learners[lane->distinct++] = (struct vc_learner){estimate, cost_ns};
    lane->last = estimate;
}

/* The launch fast path: whether the operation may go with neither a question nor an event. No lock, no clock. */
static inline bool vc_lane_pass(struct vc_lane *lane, struct vc_estimate *estimate)
{
    uint64_t cost = vc_estimate_pass(estimate);
    uint64_t used = lane->used_ns + cost;
    if (VC_UNLIKELY((cost == 0) | (used > lane->allowance_ns)))
        return false;
    uint64_t ticks = vc_ticks();
    if (VC_UNLIKELY((ticks >= lane->busy_until_ticks) | (ticks >= lane->limit_ticks)))
        return false;
    lane->used_ns = used;
    lane->busy_until_ticks += (cost * lane->ticks_per_ns) >> VC_LANE_FIXED_POINT;
    lane->passed++;
    vc_lane__note(lane, estimate, cost);
    return true;
}

void vc_lane_init(struct vc_lane *lane, struct vc_gate *gate);
/* Gives back its permit. What it launched without a mark behind it was charged by estimate, and no interval will tell what it took: until it should be done that time is paid for, whichever
 * stream's interval lies there. */
void vc_lane_end(struct vc_lane *lane, uint64_t now_ns);

/* Give back what is left of the permit. */
void vc_lane_fold(struct vc_lane *lane);

/* Ask the gate. On GO `step` says what to do before; otherwise wait as `answer` says and ask again. */
void vc_lane_ask(struct vc_lane *lane, const struct vc_estimate *estimate, uint64_t now_ns, uint64_t now_ticks,
                 struct vc_gate_answer *answer, struct vc_lane_step *step);

/* They are not done: what they take from `now_ns` on, as an interval that ends where the operation's begins. */
struct vc_lane_step vc_lane_left(struct vc_lane *lane, const struct vc_lane_step *step, uint64_t now_ns);

/* The mark before the operation was recorded (or could not be: then no interval begins). */
void vc_lane_opened(struct vc_lane *lane, bool recorded);

/* The operation of `vc_lane_ask` was launched: says whether to mark its end, and takes the interval out of the lane. */
void vc_lane_launched(struct vc_lane *lane, struct vc_estimate *estimate, const struct vc_gate_answer *answer,
                      struct vc_lane_step *step);

/* … where it ran before anybody asked, alone since `from_ns` as far as anybody knows: its end is to be marked now, and what it took is charged. */
void vc_lane_launched_unasked(struct vc_lane *lane, struct vc_estimate *estimate, uint64_t from_ns, uint64_t now_ns, struct vc_gate_answer *answer,
                              struct vc_lane_step *step);

/* The thread is about to sleep: give back what is left of the permit. True: what the interval under way holds so far is taken out of
 * the lane as `step`'s, and its end has to be marked now. */
bool vc_lane_pause(struct vc_lane *lane, struct vc_lane_step *step);

/* What comes next on its stream is not the card's work: a copy from or to the host, a callback, a wait for something else. Gives back what is left of
 * the permit; the next operation gets a mark before it. `idle`: the stream has done all. True: the end of what was launched so far has to be marked
 * now, as with vc_lane_pause. */
bool vc_lane_elsewhere(struct vc_lane *lane, bool idle, struct vc_lane_step *step);

/* Whether something was launched of which no mark was asked for. */
static inline bool vc_lane_has_unmarked(const struct vc_lane *lane)
{
    return (lane->open || lane->unmarked_since_ns != 0) && (lane->operations != 0 || lane->passed != 0);
}

/* The thread waited for the stream, and comes back from that: vc_gate_leave, where nothing else was launched meanwhile. */
enum vc_gate_heir vc_lane_leave(struct vc_lane *lane, uint64_t now_ns);

/* The stream was seen to have done all of this lane: whatever the estimates said, what comes next begins on an idle stream. */
void vc_lane_idle(struct vc_lane *lane, uint64_t now_ns);

/* Whether nothing was launched since the mark that opened the interval: what that tells, it tells of all. */
bool vc_lane_all_marked(const struct vc_lane *lane);

/* The application waited for the card from `from_ns` to `to_ns`: what that says of operations without a mark. `for_its_own`: for nothing but the lane's
 * stream, and nobody has put there what is not the card's work. */
void vc_lane_waited(struct vc_lane *lane, uint64_t from_ns, uint64_t to_ns, bool for_its_own);

/* The driver refused it. */
void vc_lane_refused(struct vc_lane *lane, const struct vc_lane_step *step);

/* The helper's part: let the estimates of the interval's operations follow what became of it. Returns how much it surprises the most surprised of them (vc_gate_learnt). */
unsigned vc_lane_learn(const struct vc_learner *learners, unsigned count, const struct vc_interval *interval,
                   const struct vc_settlement *settlement);

#endif
