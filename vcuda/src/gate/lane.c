/* Permits and marks of one lane; the slow half of the launch path. */
#include "gate/lane.h"

#include <string.h>

#include "base/atomic.h"
#include "base/clock.h"

/* Waiting for the card takes what the threads of a busy machine take to be woken, too. */
static const uint64_t DOUBTFUL_NS = 100000, CERTAIN_NS = 2000000;

void vc_lane_init(struct vc_lane *lane, struct vc_gate *gate)
{
    memset(lane, 0, sizeof *lane);
    lane->gate = gate;
}

void vc_lane_end(struct vc_lane *lane, uint64_t now_ns)
{
    vc_lane_fold(lane);
    uint64_t charged = lane->operations != 0 ? lane->estimate_ns : 0, until = lane->finish_ns;
    if (until > now_ns)
        vc_gate_pays(lane->gate, until - vc_earlier(charged, until - now_ns), until);
}

/* Streams that run beside each other are measured all the time: what an interval says is then the process's, not the stream's, and what
 * another stream did within it unmeasured would be paid twice. */
static bool runs_beside(struct vc_lane *lane, uint64_t now_ns, const struct vc_gate_answer *answer)
{
    const void *before = __atomic_exchange_n(&lane->gate->latest_lane, lane, __ATOMIC_RELAXED);
    if (before != lane && answer->joins_until_ns != 0)
        vc_store_relaxed(&lane->gate->beside_until_ns, answer->joins_until_ns);
    return now_ns < vc_load_relaxed(&lane->gate->beside_until_ns);
}

static void publish_launches(struct vc_lane *lane)
{
    if (lane->launches == 0)
        return;
    vc_add_relaxed(&lane->gate->usage->launches, lane->launches);
    vc_add_relaxed(&lane->gate->slot->launches, lane->launches);
    vc_add_relaxed(&lane->gate->launches, lane->launches);
    lane->launches = 0;
}

/* What the fast path left to be added up: all that was used of a permit belongs to the interval under way. */
static void add_passed(struct vc_lane *lane)
{
    lane->estimate_ns += lane->used_ns;
    lane->operations += (uint32_t)lane->passed;
    lane->launches += lane->passed;
    lane->passed = 0;
}

void vc_lane_fold(struct vc_lane *lane)
{
    add_passed(lane);
    publish_launches(lane);
    lane->finish_ns += lane->used_ns;
    vc_gate_fold(lane->gate, lane->allowance_ns, lane->used_ns);
    lane->allowance_ns = 0;
    lane->used_ns = 0;
}

static void forget_interval(struct vc_lane *lane)
{
    lane->estimate_ns = 0;
    lane->operations = 0;
    lane->distinct = 0;
    lane->last = NULL;
}

static bool due(const struct vc_estimate *estimate, uint64_t cost_ns, uint64_t unmeasured_ns)
{
    return cost_ns == 0 || cost_ns >= VC_MARK_NS || vc_estimate_risk(estimate) != 0 ||
           vc_load_relaxed(&estimate->unmeasured_ns) + cost_ns >= unmeasured_ns;
}

/* A stream that is idle for so short between operations is as good as busy: the gate need not be asked. */
static const uint64_t SHORT_GAP_NS = 20000;
/* A process whose permit was used up so long ago, by what was predicted, may ask for the next one: the arbiter does not think it idle yet. */
static const uint64_t IDLE_GAP_NS = 100000;
static const uint64_t NEVER = UINT64_MAX / 2;

static void issue_permit(struct vc_lane *lane, const struct vc_gate_answer *answer, uint64_t now_ns, uint64_t now_ticks)
{
    uint64_t busy_for = lane->finish_ns - now_ns;
    uint64_t busy_ticks = vc_ticks_of_ns(busy_for, now_ns, now_ticks);
    lane->allowance_ns = answer->allowance_ns;
    lane->used_ns = 0;
    lane->ticks_per_ns = vc_ticks_of_ns(UINT64_C(1) << VC_LANE_FIXED_POINT, now_ns, now_ticks);
    lane->busy_until_ticks = busy_ticks ? now_ticks + busy_ticks + vc_ticks_of_ns(SHORT_GAP_NS, now_ns, now_ticks) : 0;
    /* Whatever the estimates say: what was launched a mark's time ago gets one with the next launch. */
    uint64_t good_for = answer->permit_until_ns > now_ns ? answer->permit_until_ns - now_ns : 0;
    good_for = good_for < VC_MARK_NS ? good_for : VC_MARK_NS;
    uint64_t predicted = busy_for + answer->allowance_ns + IDLE_GAP_NS;
    good_for = good_for < predicted ? good_for : predicted;
    lane->limit_ticks = now_ticks + vc_ticks_of_ns(good_for, now_ns, now_ticks);
}

void vc_lane_ask(struct vc_lane *lane, const struct vc_estimate *estimate, uint64_t now_ns, uint64_t now_ticks,
                 struct vc_gate_answer *answer, struct vc_lane_step *step)
{
    memset(step, 0, sizeof *step);
    vc_lane_fold(lane);
    uint64_t cost = vc_estimate_cost(estimate), risk = vc_estimate_risk(estimate);
    uint64_t ready = lane->behind ? vc_later(lane->finish_ns, now_ns) + lane->elsewhere_ns : 0;
    vc_gate_enter_behind(lane->gate, now_ns, cost, risk, ready, answer);
    if (answer->reason != VC_GATE_GO)
        return;
    /* All was seen to end, long before it was thought to. */
    bool early = answer->from_idle && lane->finish_ns > now_ns + VC_MARK_NS;
    bool idle = lane->finish_ns <= now_ns || early;
    step->alone = lane->operations == 0;
    bool left = idle && !early && lane->operations != 0 && lane->unmarked_since_ns != 0;
    step->late = !idle && lane->unmarked_since_ns != 0 && now_ns > lane->unmarked_since_ns + VC_MARK_NS;
    if (idle || lane->unmarked_since_ns == 0) {
        lane->unmarked_since_ns = now_ns;
        lane->others_then = vc_gate_others(lane->gate);
    }
    if (idle) { /* an interval must not contain the time in which there was nothing to do */
        lane->open = false;
        lane->finish_ns = now_ns;
        forget_interval(lane);
    }
    if (risk != 0 && lane->operations == 0)
        lane->open = false; /* nobody can tell whether the card is still busy: it gets a begin of its own */
    const void *burst = vc_load_relaxed(&lane->gate->burst_lane);
    if (answer->from_idle || (burst && burst != lane))
        vc_store_relaxed(&lane->gate->burst_lane, answer->from_idle ? lane : NULL);
    lane->finish_ns += cost;
    step->cost_ns = cost;
    step->risk_ns = risk;
    step->closing = answer->closing;
    bool beside = runs_beside(lane, now_ns, answer);
    step->concurrent = idle && beside && cost >= VC_CONCURRENT_NS;
    /* A stream that idles in between asks once in a millisecond, whatever it launched meanwhile. */
    bool all = lane->mark_all || vc_load_relaxed(&lane->gate->unwatched);
    step->due = all || due(estimate, cost, idle ? VC_MARK_NS / 2 : VC_MARK_NS);
    step->mark_before = !lane->open && (step->due || beside || lane->behind || vc_gate_beside(lane->gate, now_ns));
    if (step->mark_before && lane->behind) {
        lane->finish_ns += lane->elsewhere_ns;
        lane->elsewhere_ns = 0; /* once: what is launched next has a mark before it, too, and waits for this alone */
    }
    step->left = left && step->mark_before && !(answer->sequence & VC_LEASE_TOGETHER); /* beside others all is done later */
    lane->sequence = lane->open ? lane->sequence : answer->sequence;
    if (lane->mark_all) {
        vc_gate_fold(lane->gate, answer->allowance_ns, 0);
        answer->allowance_ns = 0;
    }
    issue_permit(lane, answer, now_ns, now_ticks);
}

struct vc_lane_step vc_lane_left(struct vc_lane *lane, const struct vc_lane_step *step, uint64_t now_ns)
{
    uint64_t launched = vc_gate_marked(lane->gate, lane->allowance_ns + step->cost_ns);
    return (struct vc_lane_step){.interval = {.from_ns = now_ns, .others_then = vc_gate_others(lane->gate), .launched_ns = launched, .loose = true, .measurable = true}};
}

void vc_lane_opened(struct vc_lane *lane, bool recorded)
{
    lane->open = recorded;
    lane->seen_then_ns = vc_load_relaxed(&lane->gate->seen_ns);
    forget_interval(lane);
}

/* What was launched since the last mark is an interval: its end is marked now. */
static void take_interval(struct vc_lane *lane, struct vc_lane_step *step, bool unknown)
{
    step->interval = (struct vc_interval){
        .estimate_ns = lane->estimate_ns,
        .launched_ns = vc_gate_marked(lane->gate, lane->allowance_ns),
        .sequence = lane->sequence,
        .risk_ns = step->risk_ns,
        .operations = lane->operations,
        .unknown = unknown,
        .measurable = true,
        .loose = !lane->open,
        .from_ns = lane->open ? 0 : lane->unmarked_since_ns,
        .others_then = lane->others_then,
        .seen_then_ns = lane->seen_then_ns,
    };
    step->distinct = lane->distinct;
    memcpy(step->learners, lane->learners, lane->distinct * sizeof lane->learners[0]);
    for (unsigned i = 0; lane->open && i < lane->distinct; i++)
        vc_store_relaxed(&lane->learners[i].estimate->unmeasured_ns, 0);
    lane->unmarked_since_ns = 0;
    forget_interval(lane);
}

/* End the interval under way, if there is one, before something else is done. */
static bool cut(struct vc_lane *lane, struct vc_lane_step *step, bool measured)
{
    memset(step, 0, sizeof *step);
    vc_lane_fold(lane);
    step->mark_after = measured && lane->operations != 0;
    if (step->mark_after) {
        take_interval(lane, step, false);
        step->interval.paused = true;
    }
    lane->open = lane->open && !step->mark_after;
    return step->mark_after;
}

bool vc_lane_pause(struct vc_lane *lane, struct vc_lane_step *step)
{
    return cut(lane, step, lane->open);
}

bool vc_lane_elsewhere(struct vc_lane *lane, bool idle, struct vc_lane_step *step)
{
    bool ends = cut(lane, step, !idle && (lane->open || lane->unmarked_since_ns != 0));
    forget_interval(lane);
    lane->unmarked_since_ns = 0;
    lane->open = false;
    lane->behind = true;
    return ends;
}

void vc_lane_launched(struct vc_lane *lane, struct vc_estimate *estimate, const struct vc_gate_answer *answer,
                      struct vc_lane_step *step)
{
    uint64_t cost = step->cost_ns;
    bool own_mark = step->due || step->closing || step->concurrent || step->late || step->risk_ns != 0;
    vc_lane__note(lane, estimate, cost);
    lane->estimate_ns += cost;
    lane->operations++;
    lane->launches++;
    publish_launches(lane);
    /* A busy lane without an interval opens one behind this operation: the mark begins the next and proves the end of this. */
    step->mark_after = lane->open ? own_mark || lane->estimate_ns >= answer->mark_ns
                                  : lane->mark_all || (!step->mark_before && (own_mark || !answer->from_idle));
    if (!step->mark_after) {
        /* Where nothing is measured it does not matter that the stream is idle in between, because its host launches slowly. */
        if (!lane->open && lane->busy_until_ticks != 0)
            lane->busy_until_ticks = NEVER;
        return;
    }
    take_interval(lane, step, cost == 0);
    lane->open = true;
    lane->seen_then_ns = vc_load_relaxed(&lane->gate->seen_ns);
    lane->sequence = answer->sequence;
}

void vc_lane_idle(struct vc_lane *lane, uint64_t now_ns)
{
    lane->finish_ns = vc_earlier(lane->finish_ns, now_ns);
}

bool vc_lane_all_marked(const struct vc_lane *lane)
{
    return lane->open && lane->operations == 0 && lane->passed == 0;
}

void vc_lane_launched_unasked(struct vc_lane *lane, struct vc_estimate *estimate, uint64_t from_ns, uint64_t now_ns, struct vc_gate_answer *answer,
                              struct vc_lane_step *step)
{
    vc_lane_fold(lane);
    uint64_t cost = vc_estimate_cost(estimate), risk = vc_estimate_risk(estimate);
    struct vc_gate_others others = vc_gate_others(lane->gate);
    vc_gate_launched_unasked(lane->gate, now_ns, cost, risk, answer);
    if (lane->finish_ns <= from_ns) {
        lane->unmarked_since_ns = 0;
        forget_interval(lane);
    }
    if (lane->unmarked_since_ns == 0) {
        lane->unmarked_since_ns = from_ns;
        lane->others_then = others;
    }
    lane->open = false;
    lane->finish_ns = vc_later(lane->finish_ns, from_ns) + cost;
    *step = (struct vc_lane_step){.cost_ns = cost, .risk_ns = risk, .due = true};
    vc_lane_launched(lane, estimate, answer, step);
    lane->open = false; /* no mark before the next operation is its begin: that waits for the gate first */
}

void vc_lane_waited(struct vc_lane *lane, uint64_t from_ns, uint64_t to_ns, bool for_its_own)
{
    uint64_t expected = lane->estimate_ns + lane->used_ns, waited = to_ns - from_ns;
    bool behind = lane->behind;
    lane->behind = false;
    if (vc_lane_all_marked(lane))
        vc_lane_idle(lane, to_ns);
    if (lane->unmarked_since_ns == 0 || waited < 2 * expected + DOUBTFUL_NS)
        return;
    for (unsigned i = 0; i < lane->distinct; i++)
        vc_estimate_doubt(lane->learners[i].estimate);
    if (waited > expected + CERTAIN_NS && for_its_own && !behind)
        vc_gate_waited(lane->gate, from_ns + expected, to_ns - CERTAIN_NS / 2);
}

enum vc_gate_heir vc_lane_leave(struct vc_lane *lane, uint64_t now_ns)
{
    struct vc_gate *gate = lane->gate;
    if (vc_load_relaxed(&gate->burst_lane) != lane)
        return VC_HEIR_NONE;
    if (vc_load_relaxed(&gate->visits) == VC_VISITS)
        vc_lane_fold(lane);
    return vc_gate_leave(gate, now_ns);
}

void vc_lane_refused(struct vc_lane *lane, const struct vc_lane_step *step)
{
    vc_gate_undo(lane->gate, step->cost_ns, step->risk_ns);
    lane->finish_ns -= step->cost_ns < lane->finish_ns ? step->cost_ns : lane->finish_ns;
}

unsigned vc_lane_learn(const struct vc_learner *learners, unsigned count, const struct vc_interval *interval,
                   const struct vc_settlement *settlement)
{
    if (!interval->measurable || count == 0)
        return 0;
    if (interval->loose && settlement->evidence == VC_EVIDENCE_UPPER_BOUND)
        return 0;
    /* Either the card was idle in between, or something took longer than it ever did: a measurement of its own will tell. */
    if (vc_interval_has_gaps(interval) && interval->uncovered_ns > 2 * interval->estimate_ns + DOUBTFUL_NS)
        for (unsigned i = 0; i < count; i++)
            vc_estimate_doubt(learners[i].estimate);
    if (interval->unknown && interval->estimate_ns == 0) {
        /* What it had in common with other streams' work was paid by that: how much of it was its own nobody knows, at most all. */
        uint64_t length = interval->to_ns - interval->from_ns;
        bool common = interval->joined && interval->uncovered_ns < length;
        if (vc_estimate_cost(learners[count - 1].estimate) == 0)
            vc_estimate_set(learners[count - 1].estimate, common ? length : settlement->measured_ns);
        return 0;
    }
    unsigned most = 0;
    for (unsigned i = 0; i < count; i++) {
        unsigned surprise = vc_estimate_learn(learners[i].estimate, learners[i].cost_ns, settlement->measured_ns, interval->estimate_ns, settlement->evidence);
        most = surprise > most ? surprise : most;
    }
    return most;
}
