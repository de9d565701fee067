/* The model's card: which context it works on, and on which of its streams; see gate_model.h. */
#include "gate_model_parts.h"

static bool has_work(const struct model *model, unsigned process)
{
    return model->reaches_ns[process] <= model->now;
}

int model_next_stream(const struct model *model, unsigned context, unsigned after)
{
    unsigned end = context + model->processes[context].streams, next = after >= context && after < end - 1 ? after + 1 : context;
    for (unsigned i = context; i < end; i++, next = next + 1 < end ? next + 1 : context)
        if (has_work(model, next))
            return (int)next;
    return -1;
}

static void choose(struct model *model)
{
    for (unsigned i = 1; i <= model->process_count; i++) {
        unsigned next = (unsigned)(model->on_card + (int)i + (int)model->process_count) % model->process_count;
        if (model->processes[next].context != next || model_next_stream(model, next, next) < 0)
            continue;
        if ((int)next != model->on_card)
            model->switched_at = model->now + model->timing.switch_ns;
        model->on_card = (int)next;
        model->slice_end = model->now + model->timing.slice_ns;
        return;
    }
}

static void take_out(struct model *model, struct process *process)
{
    model->taken_out = true;
    process->head = (process->head + 1) % MODEL_QUEUE;
    model->reaches_ns[process - model->processes] = --process->count != 0 ? process->queue[process->head].reaches_ns : NONE;
}

/* A helper places the card's clock so that the mark which was reached fastest was so when its record was asked for. */
static uint64_t clock_origin(const struct model_timing *timing)
{
    return timing->reach_ns + (uint64_t)((double)timing->record_ns * (1 - timing->jitter / 2));
}

/* Marks at the head of the queue are reached one after the other, each of which takes the card a while. */
static void reach_marks(struct model *model, unsigned number, uint64_t now_ns)
{
    struct process *process = &model->processes[number];
    while (has_work(model, number) && process->queue[process->head].mark >= 0 && now_ns >= process->held_until_ns) {
        struct mark *mark = &process->marks[process->queue[process->head].mark];
        mark->times.reached_ns = now_ns - clock_origin(&model->timing);
        process->held_until_ns = now_ns + model->timing.mark_ns;
        take_out(model, process);
    }
}

/* The card works on what is at the head of the queue for so long, all within a bin. */
static struct entry *work(struct model *model, struct process *process, uint64_t ns)
{
    struct entry *kernel = &process->queue[process->head];
    uint64_t bin = (model->now - 1000000000) / 100000;
    if (bin < MODEL_BINS)
        model->tenants[process->tenant].bins[bin] += (uint32_t)ns;
    process->worked_ns += ns;
    kernel->begun = true;
    kernel->left_ns -= ns < kernel->left_ns ? ns : kernel->left_ns;
    return kernel;
}

void model_card_step(struct model *model)
{
    struct process *process = model->on_card >= 0 ? &model->processes[model->on_card] : NULL;
    bool may_switch = model->now >= model->slice_end &&
                      !(model->run_to_completion && process && process->count && process->queue[process->head].begun);
    if (!process || model_next_stream(model, (unsigned)model->on_card, 0) < 0 || may_switch)
        choose(model);
    if (model->on_card < 0 || model->now < model->switched_at)
        return;
    process = &model->processes[model->on_card];
    for (unsigned i = 0; i < process->streams; i++)
        reach_marks(model, (unsigned)model->on_card + i, model->now);
    int stream = model_next_stream(model, (unsigned)model->on_card, model->stream);
    if (stream < 0 || model->now < model->processes[stream].held_until_ns)
        return;
    model->stream = (unsigned)stream;
    process = &model->processes[stream];
    struct entry *kernel = work(model, process, STEP);
    if (kernel->left_ns == 0) {
        take_out(model, process);
        reach_marks(model, (unsigned)stream, model->now + STEP);
    }
}

uint64_t model_card_goes_on(struct model *model, uint64_t until_ns)
{
    const struct process *context = model->on_card >= 0 ? &model->processes[model->on_card] : NULL;
    unsigned working = 0, first = context ? context->context : 0, count = context ? context->streams : 0;
    for (unsigned i = first; i < first + count; i++)
        working += has_work(model, i);
    if (working > 1 || (context && model->now >= model->slice_end))
        return model->now;
    for (unsigned i = 0; i < model->process_count; i++)
        if (model->reaches_ns[i] > model->now && model->reaches_ns[i] < until_ns)
            until_ns = model->reaches_ns[i];
    if (context && model->slice_end < until_ns)
        until_ns = model->slice_end;
    bool switches = context && model->now < model->switched_at;
    if (switches && model->switched_at < until_ns)
        until_ns = model->switched_at;
    uint64_t steps = until_ns > model->now ? (until_ns - model->now - 1) / STEP : 0;
    if (working != 0 && !switches) {
        struct process *process = &model->processes[model->stream];
        struct entry *kernel = &process->queue[process->head];
        if (!has_work(model, model->stream) || process->context != first || model->now < process->held_until_ns || kernel->mark >= 0 || !kernel->begun)
            return model->now;
        steps = steps < (kernel->left_ns - 1) / STEP ? steps : (kernel->left_ns - 1) / STEP;
        work(model, process, steps * STEP);
    }
    return model->now + steps * STEP;
}
