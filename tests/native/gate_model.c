/* The model: what it is made of, and its clock; see gate_model.h. */
#include <stdlib.h>

#include "gate_model_parts.h"

const struct model_timing MODEL_TIMING = {
    .slice_ns = 2000000, .switch_ns = 75000, .see_ns = 60000, .wake_ns = 30000, .launch_ns = 4000};
/* `python -m benchmarks.card_facts` on an H100 80GB HBM3, driver 580: launch gap, slice, switch, wake-up of a sleeping thread.
 * MODEL_H100_HOST: with a host whose calls take varying times. */
const struct model_timing MODEL_H100 = {
    .slice_ns = 2130000, .switch_ns = 137000, .see_ns = 100000, .wake_ns = 63000, .late_ns = 60000, .launch_ns = 4000, .reach_ns = 2000, .mark_ns = 2000};
const struct model_timing MODEL_H100_HOST = {
    .slice_ns = 2130000, .switch_ns = 137000, .see_ns = 100000, .wake_ns = 63000, .late_ns = 60000, .launch_ns = 4000, .reach_ns = 2000, .mark_ns = 2000,
    .record_ns = 1500, .jitter = 0.4, .stall_every = 500, .stall_ns = 100000};

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
    model->reaches_ns[process - model->processes] = NONE;
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

static uint64_t sooner(uint64_t one, uint64_t other)
{
    return one < other ? one : other;
}

/* When a process or its helper acts next if the card takes nothing out of a queue until then. */
static uint64_t acts_at(const struct model *model, const struct process *process)
{
    uint64_t soon = model->now + STEP, at = NONE;
    const struct process *first = &model->processes[process->context];
    bool may = !(process->load.in_turn && process != first + first->turn) && model->now < 1000000000 + process->load.until_ns;
    if (process->syncing)
        at = process->count == 0 ? soon : NONE;
    else if (process->ready_ns > model->now)
        at = process->ready_ns;
    else if (may && (process->count < 1024 || (process->load.sync_every && process->since_sync >= process->load.sync_every)))
        at = soon;
    if (process->expected_count == 0)
        return at;
    const struct expected *next = &process->expected[process->expected_head];
    if (model->timing.sleeps)
        at = sooner(at, next->look_ns > model->now ? next->look_ns : soon);
    const struct mark *begin = next->from >= 0 ? &process->marks[next->from] : NULL, *to = &process->marks[next->to];
    if (begin && !begin->noticed && begin->times.reached_ns != 0)
        at = sooner(at, begin->times.reached_ns + model->timing.see_ns);
    if (to->times.reached_ns != 0)
        at = sooner(at, to->times.reached_ns + model->timing.see_ns);
    return at;
}

/* Until then the card works by itself, unless it takes something out of a queue: nobody else would do anything. */
static uint64_t quiet_until(const struct model *model)
{
    uint64_t at = model->now / LOOKS_ON * LOOKS_ON + LOOKS_ON;
    if (model->arbiter)
        at = sooner(at, model->decide_at);
    for (const struct process *process = model->processes; process < model->processes + model->process_count && at > model->now + STEP; process++)
        at = sooner(at, acts_at(model, process));
    return at;
}

void model_run(struct model *model, uint64_t until_ns)
{
    uint64_t quiet = 0;
    bool once_more = true;
    for (; model->now < 1000000000 + until_ns; model->now += STEP) {
        model->taken_out = false;
        model_card_step(model);
        bool quietly = model->now < quiet && !model->taken_out;
        if (quietly && !once_more) {
            model->now = model_card_goes_on(model, sooner(quiet, 1000000000 + until_ns));
            continue;
        }
        once_more = !quietly; /* helpers say anew that theirs has not begun, over what another said in the last step */
        bool looks_on = model->now % LOOKS_ON == 0;
        for (struct process *process = model->processes; process < model->processes + model->process_count; process++) {
            if (process->expected_count != 0)
                model_helper_step(model, process, looks_on);
            if (process->syncing ? process->count == 0 : model->now >= process->ready_ns)
                model_process_step(model, process);
        }
        model_arbiter_step(model);
        quiet = quiet_until(model);
    }
}
