/* Evaluates a card's timeline: which context is on the card, what runs, what completes when. */
#include "sim_engine.h"

/* ---- what the second timing model draws ---- */

uint64_t sim_draw(sim_card *card, uint64_t most)
{
    if (!most)
        return 0;
    card->random ^= card->random << 13;
    card->random ^= card->random >> 7;
    card->random ^= card->random << 17;
    return card->random % (most + 1);
}

static uint64_t slice_length(sim_card *card)
{
    return card->config.slice_ns + sim_draw(card, card->config.slice_spread_ns);
}

/* The same two processes always cost each other the same; contexts of one process share what they need. */
static uint64_t switch_cost(const sim_card *card, int32_t from, int32_t to)
{
    const sim_card_config *config = &card->config;
    const uint64_t before = (uint64_t)card->contexts[from].process, after = (uint64_t)card->contexts[to].process;
    if (!config->switch_spread_ns || before == after)
        return config->switch_ns;
    uint64_t mixed = (before * 0x9e3779b97f4a7c15ull) ^ ((after + config->timing_seed) * 0xbf58476d1ce4e5b9ull);
    mixed ^= mixed >> 29;
    return config->switch_ns + mixed % (config->switch_spread_ns + 1);
}

/* ---- */

static sim_op *head_of(sim_stream *stream)
{
    const uint64_t done = atomic_load_explicit(&stream->done, memory_order_relaxed);
    return atomic_load_explicit(&stream->submitted, memory_order_relaxed) == done ? NULL : &stream->ring[done % SIM_RING];
}

/* A legacy-stream operation waits for all earlier ones of the blocking streams, and they for it. */
static int barrier_met(sim_card *card, const sim_context *context, const sim_stream *stream, const sim_op *op)
{
    if (!stream->blocking && !stream->legacy)
        return 1;
    if (!stream->legacy) {
        if (context->legacy_stream == SIM_NONE)
            return 1;
        const sim_op *legacy = head_of(&card->streams[context->legacy_stream]);
        return !legacy || legacy->order > op->order;
    }
    for (int32_t i = context->first_stream; i != SIM_NONE; i = card->streams[i].next) {
        sim_stream *other = &card->streams[i];
        const sim_op *first = other->blocking && other != stream ? head_of(other) : NULL;
        if (first && first->order < op->order)
            return 0;
    }
    return 1;
}

static void complete_head(sim_card *card, sim_stream *stream, const sim_op *op)
{
    if (op->kind == SIM_OP_WORK && op->event)
        card->usage[card->contexts[stream->context].process].launches += op->event;
    stream->started = 0;
    stream->host_reached = 0;
    stream->done_ns += op->ns;
    atomic_fetch_add_explicit(&stream->done, 1, memory_order_release);
}

static void stamp(sim_card *card, sim_stream *stream, sim_event *event, uint64_t generation)
{
    const uint64_t late = card->time_ns + sim_draw(card, card->config.event_jitter_ns);
    uint64_t time = late / card->config.event_step_ns * card->config.event_step_ns;
    if (atomic_load_explicit(&event->done, memory_order_relaxed) >= generation)
        return;
    time = time > stream->stamped_ns ? time : stream->stamped_ns;
    stream->stamped_ns = time;
    atomic_store_explicit(&event->time_ns, time, memory_order_relaxed);
    atomic_store_explicit(&event->done, generation, memory_order_release);
}

/* What the settled heads want: filled by settle, consumed by one step. */
typedef struct {
    int32_t waiting; /* next context in turn after the current one that needs the card, or SIM_NONE */
    int current_needs;
    int copies[2];
} demand;

/* Bring the head of one stream as far as it gets without time passing. 1 if it moved past an operation. */
static int settle_stream(sim_state *state, sim_card *card, sim_context *context, sim_stream *stream, int on_card)
{
    sim_op *op = head_of(stream);
    if (!stream->started) {
        if (!barrier_met(card, context, stream, op))
            return 0;
        stream->started = 1;
        stream->left_ns = op->ns;
        stream->ready_ns = op->reach_ns;
        if (op->kind == SIM_OP_WORK && (card->config.gap_ns || card->config.gap_spread_ns))
            stream->ready_ns = (op->reach_ns > card->time_ns ? op->reach_ns : card->time_ns) + card->config.gap_ns +
                               sim_draw(card, card->config.gap_spread_ns);
    }
    switch (op->kind) {
    case SIM_OP_WAIT: {
        const sim_card *other = &state->shared->cards[op->card];
        if (atomic_load_explicit(&other->events[op->event].done, memory_order_acquire) < op->value) {
            if (other != card)
                context->foreign = op->card + 1;
            return 0;
        }
        break;
    }
    case SIM_OP_AFTER: {
        const sim_stream *other = &card->streams[op->event];
        const uint32_t left = (uint32_t)op->value - (uint32_t)atomic_load_explicit(&other->done, memory_order_relaxed);
        if (other->serial == (uint32_t)(op->value >> 32) && (int32_t)left > 0)
            return 0;
        break;
    }
    case SIM_OP_HOST:
        stream->host_reached = 1;
        return 0;
    case SIM_OP_RECORD:
        if (!on_card || stream->ready_ns > card->time_ns)
            return 0;
        stamp(card, stream, &card->events[op->event], op->value);
        break;
    default:
        if (stream->left_ns || (op->kind == SIM_OP_WORK && !on_card))
            return 0;
    }
    complete_head(card, stream, op);
    return 1;
}

static int needs_card(sim_stream *stream)
{
    const sim_op *op = head_of(stream);
    return op && stream->started && (op->kind == SIM_OP_WORK || op->kind == SIM_OP_RECORD);
}

static void settle(sim_state *state, sim_card *card, demand *wants)
{
    int moved;
    do {
        moved = 0;
        *wants = (demand){.waiting = SIM_NONE};
        int32_t lowest = SIM_NONE;
        for (int32_t c = 0; c < card->contexts_used; c++) {
            sim_context *context = &card->contexts[c];
            if (context->process == SIM_NONE)
                continue;
            const int on_card = card->current == c && card->switching == SIM_NONE;
            int needs = 0;
            context->foreign = 0;
            for (int32_t s = context->first_stream; s != SIM_NONE; s = card->streams[s].next) {
                sim_stream *stream = &card->streams[s];
                while (head_of(stream) && settle_stream(state, card, context, stream, on_card))
                    moved = 1;
                const sim_op *op = head_of(stream);
                if (op && stream->started && (op->kind == SIM_OP_COPY_IN || op->kind == SIM_OP_COPY_OUT))
                    wants->copies[op->kind - SIM_OP_COPY_IN]++;
                needs |= needs_card(stream);
            }
            if (c == card->current)
                wants->current_needs = needs;
            else if (needs && c > card->current && wants->waiting == SIM_NONE)
                wants->waiting = c;
            else if (needs && lowest == SIM_NONE)
                lowest = c;
        }
        if (wants->waiting == SIM_NONE)
            wants->waiting = lowest;
    } while (moved);
}

static int runs(const sim_card *card, const sim_stream *stream, const sim_op *op, int draining)
{
    return op && stream->started && op->kind == SIM_OP_WORK && stream->ready_ns <= card->time_ns &&
           !(draining && stream->left_ns == op->ns);
}

/* Until the next stream of the current context is through its gap: no longer than `span`. */
static uint64_t until_ready(sim_card *card, uint64_t span)
{
    if (!card->config.gap_ns && !card->config.gap_spread_ns && !card->config.reach_ns)
        return span;
    for (int32_t s = card->contexts[card->current].first_stream; s != SIM_NONE; s = card->streams[s].next) {
        const sim_stream *stream = &card->streams[s];
        if (head_of(&card->streams[s]) && stream->started && stream->ready_ns > card->time_ns &&
            stream->ready_ns - card->time_ns < span)
            span = stream->ready_ns - card->time_ns;
    }
    return span;
}

/* By how much work takes longer now; `span` is cut to how long that holds. */
static uint64_t slowdown_ppm(const sim_card *card, const demand *wants, uint64_t *span)
{
    uint64_t slow = wants->copies[0] || wants->copies[1] ? card->config.drag_ppm : 0;
    if (card->config.cold_ppm && card->time_ns < card->cold_end_ns) {
        slow += card->config.cold_ppm;
        *span = card->cold_end_ns - card->time_ns < *span ? card->cold_end_ns - card->time_ns : *span;
    }
    return slow;
}

/* The streams of the current context that run now: those of the highest priority; while draining only begun ones. */
static int runners(sim_card *card, int draining, int *priority, uint64_t *least)
{
    int count = 0;
    if (card->current == SIM_NONE || card->switching != SIM_NONE)
        return 0;
    for (int32_t s = card->contexts[card->current].first_stream; s != SIM_NONE; s = card->streams[s].next) {
        sim_stream *stream = &card->streams[s];
        const sim_op *op = head_of(stream);
        if (!runs(card, stream, op, draining))
            continue;
        if (count == 0 || stream->priority < *priority) {
            *priority = stream->priority;
            *least = stream->left_ns;
            count = 1;
        } else if (stream->priority == *priority) {
            *least = stream->left_ns < *least ? stream->left_ns : *least;
            count++;
        }
    }
    return count;
}

static void run_current(sim_card *card, int draining, int priority, int count, uint64_t span, uint64_t slow_ppm)
{
    const uint64_t done = (slow_ppm ? span * 1000000 / (1000000 + slow_ppm) : span) / (uint64_t)count;
    sim_context *context = &card->contexts[card->current];
    for (int32_t s = context->first_stream; s != SIM_NONE; s = card->streams[s].next) {
        sim_stream *stream = &card->streams[s];
        const sim_op *op = head_of(stream);
        if (runs(card, stream, op, draining) && stream->priority == priority)
            stream->left_ns -= done < stream->left_ns ? done : stream->left_ns;
    }
    sim_usage *usage = &card->usage[context->process];
    usage->busy_ns += span;
    card->busy_ns += span;
    sim_sample_add(usage->samples, card->time_ns, card->time_ns + span);
    sim_sample_add(card->samples, card->time_ns, card->time_ns + span);
}

static uint64_t copies_span(sim_card *card, const demand *wants, uint64_t span, int apply)
{
    for (int32_t s = 0; s < card->streams_used; s++) {
        sim_stream *stream = &card->streams[s];
        const sim_op *op = stream->context == SIM_NONE ? NULL : head_of(stream);
        if (!op || !stream->started || (op->kind != SIM_OP_COPY_IN && op->kind != SIM_OP_COPY_OUT))
            continue;
        const uint64_t sharers = (uint64_t)wants->copies[op->kind - SIM_OP_COPY_IN];
        if (apply)
            stream->left_ns -= span / sharers < stream->left_ns ? span / sharers : stream->left_ns;
        else if (stream->left_ns * sharers < span)
            span = stream->left_ns * sharers;
    }
    return span;
}

/* Decide who is on the card at card->time_ns. Returns whether a run-to-completion card drains towards a switch. */
static int choose(sim_card *card, const demand *wants)
{
    const uint64_t t = card->time_ns;
    if (card->switching != SIM_NONE)
        return 0;
    if (card->current == SIM_NONE) {
        card->current = wants->waiting;
        card->slice_end_ns = t + slice_length(card);
        return 0;
    }
    if (t >= card->slice_end_ns && wants->waiting == SIM_NONE) /* alone: slices go on, unseen */
        card->slice_end_ns += ((t - card->slice_end_ns) / card->config.slice_ns + 1) * card->config.slice_ns;
    if (wants->waiting == SIM_NONE || (wants->current_needs && t < card->slice_end_ns))
        return 0;
    int priority;
    uint64_t least;
    if (card->config.run_to_completion && wants->current_needs && runners(card, 1, &priority, &least))
        return 1;
    card->switching = wants->waiting;
    card->switch_end_ns = t + switch_cost(card, card->current, wants->waiting);
    card->switches++;
    return 0;
}

void sim_advance(sim_state *state, sim_card *card, uint64_t now)
{
    while (card->time_ns < now) {
        demand wants;
        if (card->switching != SIM_NONE && card->time_ns >= card->switch_end_ns) {
            card->current = card->switching;
            card->switching = SIM_NONE;
            card->slice_end_ns = card->time_ns + slice_length(card);
            card->cold_end_ns = card->time_ns + card->config.cold_ns;
        }
        const int32_t before = card->current;
        settle(state, card, &wants);
        const int draining = choose(card, &wants);
        if (card->current != before)
            continue; /* an idle card took a context: its heads settle at this very moment */
        int priority = 0;
        uint64_t least = 0, span = now - card->time_ns;
        const int count = runners(card, draining, &priority, &least);
        const uint64_t slow_ppm = count ? slowdown_ppm(card, &wants, &span) : 0;
        const uint64_t needed = least * (uint64_t)count;
        const uint64_t needed_now = slow_ppm ? needed + (needed * slow_ppm + 999999) / 1000000 : needed;
        if (count && needed_now < span)
            span = needed_now;
        if (card->current != SIM_NONE && card->switching == SIM_NONE)
            span = until_ready(card, span);
        if (wants.copies[0] || wants.copies[1])
            span = copies_span(card, &wants, span, 0);
        if (card->switching != SIM_NONE && card->switch_end_ns - card->time_ns < span)
            span = card->switch_end_ns - card->time_ns;
        if ((count || wants.current_needs) && !draining && wants.waiting != SIM_NONE && card->switching == SIM_NONE &&
            card->slice_end_ns - card->time_ns < span)
            span = card->slice_end_ns - card->time_ns;
        if (count)
            run_current(card, draining, priority, count, span, slow_ppm);
        if (wants.copies[0] || wants.copies[1])
            copies_span(card, &wants, span, 1);
        card->time_ns += span;
    }
    demand wants;
    settle(state, card, &wants);
}

void sim_sample_add(sim_sample *samples, uint64_t start_ns, uint64_t end_ns)
{
    while (start_ns < end_ns) {
        const uint64_t bucket = start_ns / SIM_SAMPLE_NS;
        const uint64_t limit = (bucket + 1) * SIM_SAMPLE_NS;
        const uint64_t stop = end_ns < limit ? end_ns : limit;
        sim_sample *sample = &samples[bucket % SIM_SAMPLES];
        if (sample->bucket != bucket)
            *sample = (sim_sample){.bucket = bucket};
        sample->busy_ns += stop - start_ns;
        start_ns = stop;
    }
}
