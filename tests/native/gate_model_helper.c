/* The model's helper: sees what the card reached, late, and settles it; see gate_model.h. */
#include "gate_model_parts.h"

static void notify(struct model *model, struct vc_gate *gate)
{
    bool refilled = vc_gate_refilled(gate, model->now);
    for (unsigned i = 0; i < model->process_count; i++) {
        struct process *process = &model->processes[i];
        if (process->gate == gate && process->blocked && (process->why == VC_GATE_OUTSTANDING || (refilled && process->why == VC_GATE_CREDIT)) &&
            process->ready_ns > model->now + model->timing.wake_ns)
            process->ready_ns = model->now + model->timing.wake_ns;
    }
}

/* It has begun and lasts longer than was thought. */
static void progress(struct model *model, struct process *process, struct vc_interval *interval, const struct mark *from)
{
    struct vc_gate_others now = vc_gate_others(process->gate);
    if (interval->from_ns == 0)
        vc_interval_begin(interval, &from->times, from->times.reached_ns, model->now, model->timing.see_ns);
    interval->others_gpu_ns = vc_gate_others_ns(process->gate, model->now, from ? &from->others : &interval->others_then, &now);
    if (!vc_interval_is_late(interval, model->now))
        return;
    vc_interval_open(interval, from && from->alone, &model->processes[process->context].slice);
    vc_gate_progress(process->gate, model->now, interval);
}

/* The helper: marks in order, each some time after it was reached. */
void model_helper_step(struct model *model, struct process *process, bool looks_on)
{
    while (process->expected_count != 0) {
        struct expected *next = &process->expected[process->expected_head];
        struct mark *to = &process->marks[next->to];
        struct mark *begin = next->from >= 0 ? &process->marks[next->from] : NULL;
        if (begin && !begin->noticed && begin->times.reached_ns != 0 && model->now >= begin->times.reached_ns + model->timing.see_ns) {
            begin->noticed = true;
            begin->others = vc_gate_others(process->gate);
            vc_gate_began(process->gate, begin->times.reached_ns);
        }
        if (begin && !begin->noticed)
            vc_gate_waits(process->gate, begin->times.recorded_ns);
        bool looks = !model->timing.sleeps || model->now >= next->look_ns;
        if (looks && model->timing.sleeps)
            next->look_ns = vc_interval_look_again(&next->step.interval, to->times.recorded_ns, next->expected_ns, model->now);
        if (to->times.reached_ns == 0 || model->now < to->times.reached_ns + model->timing.see_ns || !looks) {
            if ((begin ? begin->noticed : next->step.interval.loose) && to->times.reached_ns == 0 && looks_on)
                progress(model, process, &next->step.interval, begin);
            break;
        }
        struct vc_interval interval = next->step.interval;
        struct vc_gate_others now = vc_gate_others(process->gate);
        vc_interval_end(&interval, &to->times);
        if (next->from >= 0) {
            struct mark *from = &process->marks[next->from];
            uint64_t placed = interval.from_ns;
            vc_interval_begin(&interval, &from->times, from->times.reached_ns, to->times.reached_ns, model->timing.see_ns);
            interval.from_ns = placed ? placed : interval.from_ns; /* so far it was looked at */
        }
        const struct vc_gate_others *before = next->from >= 0 ? &process->marks[next->from].others : &interval.others_then;
        to->others = vc_others_at(before, interval.from_ns, &now, model->now, interval.to_ns);
        interval.others_gpu_ns = vc_gate_others_ns(process->gate, model->now, before, &to->others);
        to->noticed = true; /* where it also begins an interval */
        vc_interval_open(&interval, begin && begin->alone, &model->processes[process->context].slice);
        struct vc_settlement settlement = vc_gate_seen(process->gate, model->now, &interval);
        vc_interval_close(&interval, &model->processes[process->context].slice);
        vc_gate_learnt(process->gate, settlement.charged_ns, vc_lane_learn(next->step.learners, next->step.distinct, &interval, &settlement));
        process->expected_head = (process->expected_head + 1) % MODEL_MARKS;
        process->expected_count--;
        notify(model, process->gate);
    }
    if (process->expected_count != 0 && looks_on && process->gate->finish_ns < model->now)
        vc_gate_overdue(process->gate, model->now, process->gate->finish_ns, true);
}
