/* Permits and marks of one lane; the slow half of the launch path. */
#include "gate/lane.h"

#include <string.h>

#include "base/atomic.h"

void vc_lane_init(struct vc_lane *lane, struct vc_gate *gate)
{
    memset(lane, 0, sizeof *lane);
    lane->gate = gate;
    vc_add_relaxed(&gate->lanes, 1);
}

void vc_lane_end(struct vc_lane *lane)
{
    vc_lane_fold(lane);
    vc_sub(&lane->gate->lanes, 1);
}

/* Only where streams may run beside each other: alone, an estimate that is too long would eat into the next interval, one
 * that is too short would not make up for it. */
static void assume(struct vc_lane *lane, uint64_t from_ns, uint64_t cost_ns)
{
    if (!lane->open && cost_ns != 0 && vc_load_relaxed(&lane->gate->lanes) > 1)
        vc_gate_assume(lane->gate, from_ns, cost_ns);
}

static void publish_launches(struct vc_lane *lane)
{
    if (lane->launches == 0)
        return;
    vc_add_relaxed(&lane->gate->usage->launches, lane->launches);
    vc_add_relaxed(&lane->gate->slot->launches, lane->launches);
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
    assume(lane, lane->finish_ns, lane->used_ns);
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

static bool due(const struct vc_estimate *estimate, uint64_t cost_ns)
{
    return cost_ns == 0 || cost_ns >= VC_MARK_NS || vc_load_relaxed(&estimate->unmeasured_ns) + cost_ns >= VC_MARK_NS;
}

static void issue_permit(struct vc_lane *lane, const struct vc_gate_answer *answer, uint64_t now_ns, uint64_t now_ticks)
{
    uint64_t busy_for = lane->finish_ns - now_ns;
    uint64_t busy_ticks = vc_ticks_of_ns(busy_for, now_ns, now_ticks);
    lane->allowance_ns = answer->allowance_ns;
    lane->used_ns = 0;
    lane->ticks_per_ns = vc_ticks_of_ns(UINT64_C(1) << VC_LANE_FIXED_POINT, now_ns, now_ticks);
    lane->busy_until_ticks = busy_ticks ? now_ticks + busy_ticks : 0;
    uint64_t good_for = answer->permit_until_ns > now_ns ? answer->permit_until_ns - now_ns : 0;
    lane->limit_ticks = good_for > 1000 * UINT64_C(1000000) ? UINT64_MAX
                                                            : now_ticks + vc_ticks_of_ns(good_for, now_ns, now_ticks);
}

void vc_lane_ask(struct vc_lane *lane, const struct vc_estimate *estimate, uint64_t now_ns, uint64_t now_ticks,
                 struct vc_gate_answer *answer, struct vc_lane_step *step)
{
    memset(step, 0, sizeof *step);
    vc_lane_fold(lane);
    uint64_t cost = vc_estimate_cost(estimate);
    vc_gate_enter(lane->gate, now_ns, cost, answer);
    if (answer->reason != VC_GATE_GO)
        return;
    bool idle = lane->finish_ns <= now_ns;
    if (idle) { /* an interval must not contain the time in which there was nothing to do */
        lane->open = false;
        lane->finish_ns = now_ns;
        forget_interval(lane);
    }
    lane->finish_ns += cost;
    step->cost_ns = cost;
    step->from_idle = answer->from_idle;
    step->closing = answer->closing;
    step->concurrent = idle && answer->joins && cost >= VC_CONCURRENT_NS;
    step->mark_before = !lane->open && (due(estimate, cost) || step->concurrent);
    lane->sequence = lane->open ? lane->sequence : answer->sequence;
    issue_permit(lane, answer, now_ns, now_ticks);
}

void vc_lane_opened(struct vc_lane *lane, bool recorded)
{
    lane->open = recorded;
    forget_interval(lane);
}

void vc_lane_launched(struct vc_lane *lane, struct vc_estimate *estimate, const struct vc_gate_answer *answer,
                      struct vc_lane_step *step)
{
    uint64_t cost = step->cost_ns;
    bool own_mark = due(estimate, cost) || step->closing || step->concurrent;
    vc_lane__note(lane, estimate, cost);
    lane->estimate_ns += cost;
    lane->operations++;
    lane->launches++;
    publish_launches(lane);
    /* A busy lane without an interval opens one behind this operation: the mark begins the next and proves the end of this. */
    step->mark_after = lane->open ? own_mark || lane->estimate_ns >= VC_MARK_NS : !step->mark_before && (own_mark || !answer->from_idle);
    assume(lane, lane->finish_ns - cost, cost);
    if (!step->mark_after)
        return;
    step->interval = (struct vc_interval){
        .estimate_ns = lane->estimate_ns,
        .launched_ns = vc_gate_marked(lane->gate, lane->allowance_ns),
        .sequence = lane->sequence,
        .operations = lane->operations,
        .unknown = cost == 0,
        .measurable = lane->open,
    };
    step->distinct = lane->distinct;
    memcpy(step->learners, lane->learners, lane->distinct * sizeof lane->learners[0]);
    for (unsigned i = 0; lane->open && i < lane->distinct; i++)
        vc_store_relaxed(&lane->learners[i].estimate->unmeasured_ns, 0);
    lane->open = true;
    lane->sequence = answer->sequence;
    forget_interval(lane);
}

void vc_lane_refused(struct vc_lane *lane, const struct vc_lane_step *step)
{
    vc_gate_undo(lane->gate, step->cost_ns);
    lane->finish_ns -= step->cost_ns < lane->finish_ns ? step->cost_ns : lane->finish_ns;
}

void vc_lane_learn(const struct vc_learner *learners, unsigned count, const struct vc_interval *interval,
                   const struct vc_settlement *settlement)
{
    if (!interval->measurable || count == 0)
        return;
    if (interval->unknown && interval->estimate_ns == 0) {
        vc_estimate_set(learners[count - 1].estimate, settlement->measured_ns);
        return;
    }
    for (unsigned i = 0; i < count; i++)
        vc_estimate_learn(learners[i].estimate, learners[i].cost_ns, settlement->measured_ns, interval->estimate_ns,
                          settlement->evidence);
}
