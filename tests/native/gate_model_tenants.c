/* The model's processes: what they launch, mark and wait for, through the real gate and lanes; see gate_model.h. */
#include <math.h>

#include "base/clock.h"
#include "gate_model_parts.h"

extern uint64_t vc_test_ticks;

static double uniform(struct model *model)
{
    model->seed = model->seed * 1664525u + 1013904223u;
    return (double)(model->seed >> 8) / (double)(1u << 24);
}

static void push(struct model *model, struct process *process, uint64_t left_ns, uint64_t reaches_ns, int mark)
{
    if (process->count == 0)
        model->reaches_ns[process - model->processes] = reaches_ns;
    process->queue[(process->head + process->count++) % MODEL_QUEUE] = (struct entry){left_ns, reaches_ns, false, mark};
}

/* What a call takes the host: it varies, and now and then the host is held up in it. */
static uint64_t varied(struct model *model, uint64_t ns)
{
    double part = model->timing.jitter;
    return part == 0 ? ns : (uint64_t)((double)ns * (1 - part / 2 + part * uniform(model)));
}

static uint64_t held_up(struct model *model)
{
    const struct model_timing *timing = &model->timing;
    return timing->stall_every && uniform(model) * timing->stall_every < 1 ? (uint64_t)(uniform(model) * (double)timing->stall_ns) : 0;
}

static int record(struct model *model, struct process *process, uint64_t *host_ns)
{
    int index = (int)(process->next_mark++ % MODEL_MARKS);
    uint64_t recording = *host_ns, stall = model->timing.stalls_marks ? held_up(model) : 0, submits = varied(model, model->timing.record_ns);
    bool before = stall != 0 && uniform(model) < 0.5;
    *host_ns += submits + stall;
    push(model, process, 0, recording + submits + (before ? stall : 0) + model->timing.reach_ns, index);
    process->marks[index] = (struct mark){.times = {.recording_ns = recording, .recorded_ns = *host_ns}, .others = vc_gate_others(process->gate)};
    return index;
}

static void expect_end(struct process *process, int from, int to, const struct vc_lane_step *step)
{
    unsigned slot = (process->expected_head + process->expected_count++) % MODEL_MARKS;
    uint64_t recorded = process->marks[to].times.recorded_ns, expected = vc_later(process->gate->finish_ns, recorded);
    process->expected[slot] = (struct expected){true, from, to, expected, step->interval.risk_ns != 0 ? recorded : expected, *step};
}

static void hand_over(struct model *model, struct process *process, struct mark *before, uint64_t *host_ns)
{
    double noise = 0.9 + 0.2 * uniform(model), ns = (double)process->load.kernel_ns;
    if (process->hides)
        ns = (double)process->load.hidden_ns;
    if (process->load.longest_ns)
        ns *= pow((double)process->load.longest_ns / ns, (double)(process->kind * 29 % MODEL_KINDS) / (MODEL_KINDS - 1));
    if (process->load.sly_ns && model->limits.cards[process->tenant].lease_sequence & VC_LEASE_TOGETHER)
        ns = (double)process->load.sly_ns;
    bool slower = process->load.seldom_ns ? process->kind : process->load.change_ns ? model->now / process->load.change_ns % 2 : model->now > 2000000000;
    if (process->load.seldom_ns && slower)
        process->seldom_at_ns = model->now + process->load.seldom_ns;
    if (process->load.slower_ns && slower)
        ns = (double)process->load.slower_ns;
    const struct vc_card_limit *limit = &model->limits.cards[process->tenant];
    bool tails = process->load.tail_every == 0 || limit->lease_sequence / 2 % process->load.tail_every == 0;
    if (process->load.tail_ns && tails && model->now >= limit->lease_clock_ns + (process->load.tail_every ? 5000000 : 4000000))
        ns = (double)process->load.tail_ns;
    uint64_t call = varied(model, model->timing.launch_ns), stall = held_up(model), begins = *host_ns;
    uint64_t submits = model->timing.jitter == 0 ? call : (uint64_t)((0.85 + 0.25 * uniform(model)) * (double)call);
    if (stall && uniform(model) < 0.5)
        submits += stall;
    push(model, process, (uint64_t)(ns * noise), *host_ns + submits + model->timing.reach_ns, -1);
    *host_ns += call + stall;
    if (before) {
        before->times.stuck_ns = call + stall < VC_LAUNCH_GAP_NS ? 0 : call + stall - VC_LAUNCH_GAP_NS;
        before->times.begins_ns = begins + call + stall - before->times.stuck_ns;
    }
}

static void call_siblings(struct model *model, const struct process *caller)
{
    for (unsigned i = 0; i < model->process_count; i++) {
        struct process *process = &model->processes[i];
        if (process != caller && process->tenant == caller->tenant && process->blocked &&
            process->why != VC_GATE_OUTSTANDING && process->ready_ns > model->now + model->timing.wake_ns)
            process->ready_ns = model->now + model->timing.wake_ns;
    }
}

static void blocked(struct model *model, struct process *process, const struct vc_gate_answer *answer)
{
    struct tenant *tenant = &model->tenants[process->tenant];
    uint64_t until = answer->until_ns > model->now + VC_RECHECK_NS ? model->now + VC_RECHECK_NS : answer->until_ns;
    process->blocked = true;
    process->why = answer->reason;
    process->ready_ns = (until > model->now ? until : model->now) + model->timing.wake_ns;
    if (answer->reason != VC_GATE_TURN)
        tenant->usage->refill_ns = answer->refill_ns;
    tenant->usage->waiting_until_ns = process->slot->waiting_until_ns = model->now + 2 * VC_RECHECK_NS;
    if (answer->call_next)
        call_siblings(model, process);
    if (answer->reason != VC_GATE_OUTSTANDING && answer->reason != VC_GATE_TURN && model->decide_at > model->now + model->timing.wake_ns)
        model->decide_at = model->now + model->timing.wake_ns;
}

static void stops_waiting(struct model *model, struct process *process)
{
    process->blocked = false;
    for (unsigned i = 0; i < model->process_count; i++)
        if (model->processes[i].gate == process->gate && model->processes[i].blocked)
            return;
    model->tenants[process->tenant].usage->waiting_until_ns = process->slot->waiting_until_ns = 0;
}

/* The end of what a thread put on each of its streams is marked before it sleeps. */
static void pause_streams(struct model *model, struct process *thread)
{
    struct process *first = thread->load.in_turn ? &model->processes[thread->context] : thread;
    uint64_t host = model->now;
    if (thread->load.native || !vc_gate_beside(thread->gate, model->now))
        return;
    for (struct process *stream = first; stream < first + (thread->load.in_turn ? first->streams : 1); stream++) {
        struct vc_lane_step step;
        if (stream->open >= 0 && stream->lane.open && vc_lane_pause(&stream->lane, &step)) {
            expect_end(stream, stream->open, record(model, stream, &host), &step);
            stream->open = -1;
        }
    }
}

static void launch(struct model *model, struct process *process)
{
    vc_test_ticks = model->now;
    uint64_t host = model->now;
    if (process->load.seldom_ns)
        process->kind = model->now >= process->seldom_at_ns;
    struct vc_estimate *estimate = &model->processes[process->context].estimates[process->kind];
    if (process->load.native || vc_lane_pass(&process->lane, estimate)) {
        hand_over(model, process, NULL, &host);
    } else {
        struct vc_gate_answer answer;
        struct vc_lane_step step;
        if (process->blocked)
            stops_waiting(model, process);
        if (process->open >= 0 && process->marks[process->open].noticed && vc_lane_all_marked(&process->lane))
            vc_lane_idle(&process->lane, model->now);
        vc_lane_ask(&process->lane, estimate, model->now, model->now, &answer, &step);
        if (answer.reason != VC_GATE_GO) {
            if (answer.reason != VC_GATE_OUTSTANDING)
                pause_streams(model, process);
            blocked(model, process, &answer);
            return;
        }
        if (step.mark_before) {
            bool busy = step.left && process->count != 0;
            process->open = record(model, process, &host);
            if (busy) {
                struct vc_lane_step left = vc_lane_left(&process->lane, &step, model->now);
                expect_end(process, -1, process->open, &left);
            }
            vc_lane_opened(&process->lane, true);
            process->marks[process->open].alone = step.left ? !busy : step.alone;
        }
        hand_over(model, process, vc_lane_all_marked(&process->lane) ? &process->marks[process->open] : NULL, &host);
        vc_lane_launched(&process->lane, estimate, &answer, &step);
        if (step.mark_after) {
            int end = record(model, process, &host);
            expect_end(process, !step.interval.loose ? process->open : -1, end, &step);
            process->open = end;
        }
    }
    process->since_sync++;
    process->kind = process->load.longest_ns || process->load.tail_ns ? (process->kind + 1) % MODEL_KINDS : 0;
    process->ready_ns = host + process->load.host_ns;
    if (process->hides) {
        process->ready_ns += process->load.pause_ns;
        process->since_sync = 0;
    }
    process->hides = process->load.hidden_ns != 0 && !process->hides;
    if (process->load.in_turn && process->since_sync >= process->load.burst) {
        process->ready_ns += process->load.burst ? process->load.pause_ns : 0;
        process->since_sync = 0;
        struct process *first = &model->processes[process->context];
        first->turn = (first->turn + 1) % first->streams;
        model->processes[process->context + first->turn].ready_ns = process->ready_ns;
    }
}

static void note_burst(struct model *model, struct process *process)
{
    struct tenant *tenant = &model->tenants[process->tenant];
    bool learnt = model->now > 1000000000 + 500000000; /* the first ones pay for learning the kernels' costs */
    if (learnt && tenant->burst_count < MODEL_BURSTS)
        tenant->bursts[tenant->burst_count++] = model->now - process->burst_from_ns;
}

void model_process_step(struct model *model, struct process *process)
{
    if (process->syncing) {
        process->syncing = false;
        process->since_sync = 0;
        if (process->expected_count != 0) /* the helper is woken */
            process->expected[process->expected_head].look_ns = model->now + model->timing.see_ns;
        vc_lane_waited(&process->lane, process->sync_from_ns, model->now, true);
        if (model_next_stream(model, process->context, 0) < 0)
            vc_gate_idle(process->gate, model->now);
        enum vc_gate_heir heir = vc_lane_leave(&process->lane, model->now);
        if (heir == VC_HEIR_SIBLING)
            call_siblings(model, process);
        if (heir == VC_HEIR_ARBITER && model->decide_at > model->now + model->timing.wake_ns)
            model->decide_at = model->now + model->timing.wake_ns;
        note_burst(model, process);
        process->ready_ns = model->now + 5000 + process->load.pause_ns;
    }
    const struct process *first = &model->processes[process->context];
    if (process->load.in_turn && process != first + first->turn)
        return;
    if (model->now < process->ready_ns || model->now >= 1000000000 + process->load.until_ns)
        return;
    if (process->load.sync_every && process->since_sync >= process->load.sync_every) {
        pause_streams(model, process);
        process->syncing = true;
        process->sync_from_ns = model->now;
        return;
    }
    if (process->since_sync == 0 && !process->blocked)
        process->burst_from_ns = model->now;
    if (process->count < 1024)
        launch(model, process);
}
