/* The model's clockwork; see gate_model.h. */
#include "gate_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/atomic.h"
#include "base/clock.h"

enum { MODEL_BINS = 100000, MODEL_BURSTS = 4096 }; /* bins of 100 us: 10 s */
static const uint64_t STEP = 1000, NONE = UINT64_MAX;

const struct model_timing MODEL_TIMING = {
    .slice_ns = 2000000, .switch_ns = 75000, .see_ns = 60000, .wake_ns = 30000, .launch_ns = 4000};
/* `python -m benchmarks.card_facts` on an H100 80GB HBM3, driver 580: launch gap, slice, switch, wake-up of a sleeping thread.
 * MODEL_H100_HOST: with a host whose calls take varying times. */
const struct model_timing MODEL_H100 = {
    .slice_ns = 2130000, .switch_ns = 137000, .see_ns = 100000, .wake_ns = 63000, .late_ns = 60000, .launch_ns = 4000, .reach_ns = 2000, .mark_ns = 2000};
const struct model_timing MODEL_H100_HOST = {
    .slice_ns = 2130000, .switch_ns = 137000, .see_ns = 100000, .wake_ns = 63000, .late_ns = 60000, .launch_ns = 4000, .reach_ns = 2000, .mark_ns = 2000,
    .record_ns = 1500, .jitter = 0.4, .stall_every = 500, .stall_ns = 100000};

extern uint64_t vc_test_ticks;

/* A kernel, or a mark. */
struct entry {
    uint64_t left_ns;
    uint64_t reaches_ns; /* the card knows of it from then on */
    bool begun;
    int mark; /* -1: a kernel */
};

struct mark {
    struct vc_mark_times times;
    bool noticed; /* the helper has seen that an interval began */
    struct vc_gate_others others;
};

struct expected {
    bool used;
    int from, to;
    uint64_t expected_ns, look_ns;
    struct vc_lane_step step;
};

/* What each step looks at of each comes first and lies close together: half a megabyte of arrays is elsewhere. */
struct process {
    unsigned tenant;
    unsigned context; /* the process whose thread this is; its own number for the first */
    unsigned head, count; /* of the queue */
    uint64_t reaches_ns;  /* of what is at the queue's head; NONE: it is empty */
    unsigned expected_head, expected_count;
    uint64_t held_until_ns; /* by a mark, on the card */
    uint64_t ready_ns, sync_from_ns;
    bool blocked, syncing;
    enum vc_gate_reason why;
    unsigned since_sync;
    unsigned turn; /* of the first stream of a thread that launches on several in turn: whose it is, counted from here */
    unsigned streams;
    struct vc_gate *gate;
    struct model_load load;
    struct vc_slot_card *slot;
    unsigned kind;
    uint64_t seldom_at_ns;
    int open;
    uint64_t burst_from_ns;
    unsigned next_mark;
    uint64_t worked_ns;
    struct vc_gate own_gate;
    struct vc_lane lane;
    struct vc_estimate estimates[MODEL_KINDS];
    struct expected *expected; /* MODEL_MARKS */
    struct mark *marks;        /* MODEL_MARKS */
    struct entry *queue;       /* MODEL_QUEUE */
};

struct tenant {
    struct vc_usage *region;
    struct vc_card_usage *usage; /* its only card's */
    uint32_t *bins;
    uint64_t bursts[MODEL_BURSTS];
    unsigned burst_count;
    uint32_t last_grant;
};

struct model {
    uint64_t now;
    unsigned seed;
    bool arbiter;
    struct vc_limits limits; /* one card entry per tenant: they share the heartbeat only */
    struct tenant tenants[MODEL_TENANTS];
    unsigned tenant_count;
    struct process processes[MODEL_PROCESSES];
    unsigned process_count;
    struct vc_tenant plan_tenants[MODEL_TENANTS];
    struct vc_card_plan plan;
    uint64_t decide_at;
    struct model_timing timing;
    int on_card; /* process whose context is on the card */
    unsigned stream; /* the process, or thread, of which it worked on last */
    bool run_to_completion;
    uint64_t slice_end, switched_at;
};

static double uniform(struct model *model)
{
    model->seed = model->seed * 1664525u + 1013904223u;
    return (double)(model->seed >> 8) / (double)(1u << 24);
}

struct model *model_new(unsigned seed, bool arbiter)
{
    struct model *model = calloc(1, sizeof *model);
    model->seed = seed;
    model->arbiter = arbiter;
    model->now = 1000000000;
    model->on_card = -1;
    model->timing = MODEL_TIMING;
    vc_plan_init(&model->plan);
    model->plan.tenants = model->plan_tenants;
    return model;
}

void model_set_timing(struct model *model, const struct model_timing *timing)
{
    model->timing = *timing;
}

void model_free(struct model *model)
{
    for (unsigned i = 0; i < model->tenant_count; i++)
        free(model->tenants[i].bins), free(model->tenants[i].region);
    for (unsigned i = 0; i < model->process_count; i++)
        free(model->processes[i].expected), free(model->processes[i].marks), free(model->processes[i].queue);
    free(model);
}

unsigned model_tenant(struct model *model, uint32_t cores, uint32_t core_limit, bool shared)
{
    unsigned index = model->tenant_count++;
    struct vc_card_limit *limit = &model->limits.cards[index];
    limit->cores = cores;
    limit->core_limit = core_limit;
    limit->priority = VC_PRIORITY_NORMAL;
    limit->flags = shared ? VC_CARD_SHARED : 0;
    model->tenants[index].bins = calloc(MODEL_BINS, sizeof(uint32_t));
    model->tenants[index].region = calloc(1, sizeof(struct vc_usage));
    model->tenants[index].usage = &model->tenants[index].region->cards[0];
    vc_tenant_init(&model->plan_tenants[index], cores, core_limit);
    model->plan.count = model->tenant_count;
    return index;
}

static struct process *new_process(struct model *model, unsigned tenant, struct model_load load)
{
    struct process *process = &model->processes[model->process_count++];
    process->tenant = tenant;
    process->load = load;
    process->ready_ns = model->now + load.from_ns;
    process->open = -1;
    process->reaches_ns = NONE;
    process->expected = calloc(MODEL_MARKS, sizeof *process->expected);
    process->marks = calloc(MODEL_MARKS, sizeof *process->marks);
    process->queue = calloc(MODEL_QUEUE, sizeof *process->queue);
    return process;
}

void model_process(struct model *model, unsigned tenant, struct model_load load)
{
    struct process *process = new_process(model, tenant, load);
    process->context = model->process_count - 1;
    process->streams = 1;
    process->gate = &process->own_gate;
    struct vc_usage *region = model->tenants[tenant].region;
    uint32_t slot = region->slot_high_water++;
    process->slot = &region->slots[slot].cards[0];
    vc_gate_init(process->gate, &model->limits, &model->limits.cards[tenant], &region->cards[0], process->slot);
    process->gate->paid = &region->paid[0];
    process->gate->turns = (struct vc_turns){&region->cards[0], region->slots, &region->slot_high_water, 0, slot, 0};
    vc_lane_init(&process->lane, process->gate);
}

void model_thread(struct model *model, struct model_load load)
{
    struct process *before = &model->processes[model->process_count - 1], *thread = new_process(model, before->tenant, load);
    thread->context = before->context;
    thread->gate = before->gate;
    thread->slot = before->slot;
    vc_lane_init(&thread->lane, thread->gate);
    model->processes[before->context].streams++;
}

/* --- the card --- */

static bool has_work(const struct model *model, const struct process *process)
{
    return process->reaches_ns <= model->now;
}

/* The stream of the context that the card works on now: they take turns of a step each, and lie one behind the other. -1: none has work. */
static int next_stream(const struct model *model, unsigned context, unsigned after)
{
    unsigned end = context + model->processes[context].streams, next = after >= context && after < end - 1 ? after + 1 : context;
    for (unsigned i = context; i < end; i++, next = next + 1 < end ? next + 1 : context)
        if (has_work(model, &model->processes[next]))
            return (int)next;
    return -1;
}

static void choose(struct model *model)
{
    for (unsigned i = 1; i <= model->process_count; i++) {
        unsigned next = (unsigned)(model->on_card + (int)i + (int)model->process_count) % model->process_count;
        if (model->processes[next].context != next || next_stream(model, next, next) < 0)
            continue;
        if ((int)next != model->on_card)
            model->switched_at = model->now + model->timing.switch_ns;
        model->on_card = (int)next;
        model->slice_end = model->now + model->timing.slice_ns;
        return;
    }
}

static void take_out(struct process *process)
{
    process->head = (process->head + 1) % MODEL_QUEUE;
    process->reaches_ns = --process->count != 0 ? process->queue[process->head].reaches_ns : NONE;
}

/* A helper places the card's clock so that the mark which was reached fastest was so when its record was asked for. */
static uint64_t clock_origin(const struct model_timing *timing)
{
    return timing->reach_ns + (uint64_t)((double)timing->record_ns * (1 - timing->jitter / 2));
}

/* Marks at the head of the queue are reached one after the other, each of which takes the card a while. */
static void reach_marks(struct model *model, struct process *process, uint64_t now_ns)
{
    while (has_work(model, process) && process->queue[process->head].mark >= 0 && now_ns >= process->held_until_ns) {
        struct mark *mark = &process->marks[process->queue[process->head].mark];
        mark->times.reached_ns = now_ns - clock_origin(&model->timing);
        process->held_until_ns = now_ns + model->timing.mark_ns;
        take_out(process);
    }
}

static void card_step(struct model *model)
{
    struct process *process = model->on_card >= 0 ? &model->processes[model->on_card] : NULL;
    bool may_switch = model->now >= model->slice_end &&
                      !(model->run_to_completion && process && process->count && process->queue[process->head].begun);
    if (!process || next_stream(model, (unsigned)model->on_card, 0) < 0 || may_switch)
        choose(model);
    if (model->on_card < 0 || model->now < model->switched_at)
        return;
    process = &model->processes[model->on_card];
    for (unsigned i = 0; i < process->streams; i++)
        reach_marks(model, &process[i], model->now);
    int stream = next_stream(model, (unsigned)model->on_card, model->stream);
    if (stream < 0 || model->now < model->processes[stream].held_until_ns)
        return;
    model->stream = (unsigned)stream;
    process = &model->processes[stream];
    struct entry *kernel = &process->queue[process->head];
    uint64_t bin = (model->now - 1000000000) / 100000;
    if (bin < MODEL_BINS)
        model->tenants[process->tenant].bins[bin] += (uint32_t)STEP;
    process->worked_ns += STEP;
    kernel->begun = true;
    kernel->left_ns -= STEP < kernel->left_ns ? STEP : kernel->left_ns;
    if (kernel->left_ns == 0) {
        take_out(process);
        reach_marks(model, process, model->now + STEP);
    }
}

/* --- the tenants --- */

static void push(struct process *process, uint64_t left_ns, uint64_t reaches_ns, int mark)
{
    if (process->count == 0)
        process->reaches_ns = reaches_ns;
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
    push(process, 0, recording + submits + (before ? stall : 0) + model->timing.reach_ns, index);
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
    push(process, (uint64_t)(ns * noise), *host_ns + submits + model->timing.reach_ns, -1);
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

static void process_step(struct model *model, struct process *process)
{
    if (process->syncing) {
        process->syncing = false;
        process->since_sync = 0;
        if (process->expected_count != 0) /* the helper is woken */
            process->expected[process->expected_head].look_ns = model->now + model->timing.see_ns;
        vc_lane_waited(&process->lane, process->sync_from_ns, model->now, true);
        if (next_stream(model, process->context, 0) < 0)
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
static void progress(const struct model *model, struct process *process, struct vc_interval *interval, const struct mark *from)
{
    struct vc_gate_others now = vc_gate_others(process->gate);
    if (interval->from_ns == 0)
        vc_interval_begin(interval, &from->times, from->times.reached_ns, model->now, model->timing.see_ns);
    interval->others_gpu_ns = vc_gate_others_ns(process->gate, model->now, from ? &from->others : &interval->others_then, &now);
    if (!vc_interval_is_late(interval, model->now))
        return;
    vc_gate_progress(process->gate, model->now, interval);
}

/* The helper: marks in order, each some time after it was reached. */
static void helper_step(struct model *model, struct process *process, bool looks_on)
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
        struct vc_settlement settlement = vc_gate_seen(process->gate, model->now, &interval);
        vc_gate_learnt(process->gate, settlement.charged_ns, vc_lane_learn(next->step.learners, next->step.distinct, &interval, &settlement));
        process->expected_head = (process->expected_head + 1) % MODEL_MARKS;
        process->expected_count--;
        notify(model, process->gate);
    }
    if (process->expected_count != 0 && looks_on && process->gate->finish_ns < model->now)
        vc_gate_overdue(process->gate, model->now, process->gate->finish_ns, true);
}

/* --- the arbiter --- */

/* What a tenant's processes tell of their charges by what they lock. */
static uint64_t told(struct model *model, unsigned tenant)
{
    uint64_t ns = 0;
    for (unsigned p = 0; p < model->process_count; p++) {
        struct process *process = &model->processes[p];
        if (process->tenant == tenant && process->gate == &process->own_gate)
            ns += vc_gate_tell(process->gate, model->now) / 1000000 * 1000000;
    }
    return ns;
}

static void arbiter_step(struct model *model)
{
    if (!model->arbiter || model->now < model->decide_at)
        return;
    model->limits.arbiter_heartbeat_ns = model->now;
    for (unsigned i = 0; i < model->tenant_count; i++) {
        const struct vc_card_usage *usage = model->tenants[i].usage;
        const struct vc_card_limit *limit = &model->limits.cards[i];
        vc_tenant_resize(&model->plan_tenants[i], limit->cores, limit->core_limit);
        vc_tenant_prioritise(&model->plan_tenants[i], limit->priority);
        model->plan_tenants[i].seen = (struct vc_observation){
            .gpu_ns = usage->gpu_ns,
            .told_ns = told(model, i),
            .credit_ns = usage->credit_ns,
            .credit_updated_ns = usage->credit_updated_ns,
            .refill_ns = usage->refill_ns,
            .waiting_until_ns = usage->waiting_until_ns,
            .predicted_finish_ns = usage->predicted_finish_ns,
            .began_ns = usage->began_ns,
        };
    }
    model->decide_at = vc_plan_decide(&model->plan, model->now) + model->timing.late_ns;
    for (unsigned i = 0; i < model->tenant_count; i++) {
        struct vc_card_limit *limit = &model->limits.cards[i];
        const struct vc_tenant *plan = &model->plan_tenants[i];
        limit->granted_ppm = plan->granted_ppm;
        limit->closed_until_ns = plan->closed_until_ns;
        limit->told_ns = plan->seen.told_ns;
        limit->saved_ns = plan->saved_ns;
        limit->others_gpu_ns = plan->others_gpu_ns;
        limit->others_active_ns = plan->others_active_ns;
        limit->lease_start_ns = plan->lease_start_ns;
        limit->lease_clock_ns = plan->lease_clock_ns;
        limit->lease_end_ns = plan->lease_end_ns;
        limit->lease_sequence = plan->lease_sequence;
        for (unsigned p = 0; plan->wake && p < model->process_count; p++) {
            struct process *process = &model->processes[p];
            if (process->tenant == i && process->blocked && process->why != VC_GATE_OUTSTANDING &&
                process->ready_ns > model->now + model->timing.wake_ns)
                process->ready_ns = model->now + model->timing.wake_ns;
        }
    }
}

void model_run(struct model *model, uint64_t until_ns)
{
    for (; model->now < 1000000000 + until_ns; model->now += STEP) {
        card_step(model);
        bool looks_on = model->now % 100000 == 0;
        for (struct process *process = model->processes; process < model->processes + model->process_count; process++) {
            if (process->expected_count != 0)
                helper_step(model, process, looks_on);
            if (process->syncing ? process->count == 0 : model->now >= process->ready_ns)
                process_step(model, process);
        }
        arbiter_step(model);
    }
}

/* --- what came out --- */

uint64_t model_work_ns(const struct model *model, unsigned tenant, uint64_t from_ns, uint64_t to_ns)
{
    uint64_t sum = 0;
    for (uint64_t bin = from_ns / 100000; bin < to_ns / 100000 && bin < MODEL_BINS; bin++)
        sum += model->tenants[tenant].bins[bin];
    return sum;
}

uint64_t model_process_ns(const struct model *model, unsigned process)
{
    return model->processes[process].worked_ns;
}

double model_error(const struct model *model, unsigned tenant, double target, uint64_t window_ns, uint64_t from_ns,
                   uint64_t to_ns)
{
    double sum = 0;
    unsigned windows = 0;
    for (uint64_t at = from_ns; at + window_ns <= to_ns; at += window_ns, windows++) {
        double points = 100.0 * (double)model_work_ns(model, tenant, at, at + window_ns) / (double)window_ns;
        sum += points > target ? points - target : target - points;
    }
    return windows ? sum / windows : 1e9;
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

uint64_t model_burst_percentile(const struct model *model, unsigned tenant, double part)
{
    static uint64_t sorted[MODEL_BURSTS];
    unsigned count = model->tenants[tenant].burst_count;
    if (count == 0)
        return 0;
    memcpy(sorted, model->tenants[tenant].bursts, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, ascending);
    unsigned index = (unsigned)(part * count);
    return sorted[index < count ? index : count - 1];
}

struct vc_card_usage *model_usage(struct model *model, unsigned tenant)
{
    return model->tenants[tenant].usage;
}

struct vc_card_limit *model_limit(struct model *model, unsigned tenant)
{
    return &model->limits.cards[tenant];
}

void model_run_to_completion(struct model *model)
{
    model->run_to_completion = true;
}

void model_arbiter(struct model *model, bool alive)
{
    model->arbiter = alive;
    model->decide_at = model->now;
}
