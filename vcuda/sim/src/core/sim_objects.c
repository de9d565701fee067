/* Contexts, streams, events and memory of a card: made, destroyed, purged with their process, repaired. */
#include <string.h>

#include "sim_engine.h"

static sim_usage *own_usage(sim_state *state, sim_card *card)
{
    sim_usage *usage = &card->usage[state->slot];
    const uint32_t generation = state->shared->processes[state->slot].generation;
    if (usage->generation != generation) {
        sim_purge(card, state->slot); /* left over from the slot's previous owner */
        usage->generation = generation;
    }
    return usage;
}

static void note_peak(sim_usage *usage)
{
    const uint64_t now = usage->context_bytes + usage->memory_bytes;
    if (now > usage->peak_bytes)
        usage->peak_bytes = now;
}

int32_t sim_context_create(sim_state *state, sim_card *card, uint64_t bytes)
{
    sim_usage *usage = own_usage(state, card);
    int32_t index = 0;
    while (index < card->contexts_used && card->contexts[index].process != SIM_NONE)
        index++;
    if (index == SIM_MAX_CONTEXTS)
        return SIM_NONE;
    if (bytes > card->config.memory_bytes - card->used_bytes || sim_limit_refused(state, card, state->slot, bytes))
        return -2;
    card->contexts[index] = (sim_context){
        .process = state->slot, .first_stream = SIM_NONE, .legacy_stream = SIM_NONE, .bytes = bytes};
    if (index == card->contexts_used)
        card->contexts_used++;
    usage->contexts++;
    usage->context_bytes += bytes;
    card->used_bytes += bytes;
    note_peak(usage);
    return index;
}

int sim_context_resize(sim_state *state, sim_card *card, int32_t index, int64_t bytes)
{
    sim_context *context = &card->contexts[index];
    sim_usage *usage = &card->usage[context->process];
    if (bytes > 0 && ((uint64_t)bytes > card->config.memory_bytes - card->used_bytes ||
                      sim_limit_refused(state, card, context->process, (uint64_t)bytes)))
        return -1;
    context->bytes += (uint64_t)bytes;
    usage->context_bytes += (uint64_t)bytes;
    card->used_bytes += (uint64_t)bytes;
    note_peak(usage);
    return 0;
}

static void free_stream(sim_card *card, int32_t index)
{
    sim_stream *stream = &card->streams[index];
    sim_context *context = &card->contexts[stream->context];
    int32_t *link = &context->first_stream;
    while (*link != SIM_NONE && *link != index)
        link = &card->streams[*link].next;
    if (*link == index)
        *link = stream->next;
    if (context->legacy_stream == index)
        context->legacy_stream = SIM_NONE;
    stream->context = SIM_NONE;
    stream->serial++;
}

void sim_context_destroy(sim_card *card, int32_t index)
{
    sim_context *context = &card->contexts[index];
    while (context->first_stream != SIM_NONE)
        free_stream(card, context->first_stream);
    sim_usage *usage = &card->usage[context->process];
    usage->contexts--;
    usage->context_bytes -= context->bytes;
    card->used_bytes -= context->bytes;
    context->process = SIM_NONE;
    if (card->current == index)
        card->current = SIM_NONE;
    if (card->switching == index)
        card->switching = SIM_NONE;
}

static int stream_empty(const sim_stream *stream)
{
    return atomic_load_explicit(&stream->submitted, memory_order_relaxed) ==
           atomic_load_explicit(&stream->done, memory_order_relaxed);
}

static void sweep_closing(sim_card *card, int32_t context)
{
    int32_t next;
    for (int32_t s = card->contexts[context].first_stream; s != SIM_NONE; s = next) {
        next = card->streams[s].next;
        if (card->streams[s].closing && stream_empty(&card->streams[s]))
            free_stream(card, s);
    }
}

int32_t sim_stream_create(sim_card *card, int32_t context, int blocking, int legacy, int priority)
{
    sweep_closing(card, context);
    int32_t index = 0;
    while (index < card->streams_used && card->streams[index].context != SIM_NONE)
        index++;
    if (index == SIM_MAX_STREAMS)
        return SIM_NONE;
    sim_stream *stream = &card->streams[index];
    const uint32_t serial = stream->serial + 1;
    memset(stream, 0, offsetof(sim_stream, ring));
    stream->serial = serial;
    stream->priority = priority;
    stream->blocking = (uint8_t)blocking;
    stream->legacy = (uint8_t)legacy;
    stream->context = context;
    stream->next = card->contexts[context].first_stream;
    card->contexts[context].first_stream = index;
    if (legacy)
        card->contexts[context].legacy_stream = index;
    if (index == card->streams_used)
        card->streams_used++;
    return index;
}

void sim_stream_destroy(sim_card *card, int32_t stream)
{
    card->streams[stream].closing = 1;
    sweep_closing(card, card->streams[stream].context);
}

int32_t sim_event_create(sim_state *state, sim_card *card)
{
    own_usage(state, card);
    int32_t index = card->first_free_event;
    if (index != SIM_NONE)
        card->first_free_event = card->events[index].next_free;
    else if (card->events_used < SIM_MAX_EVENTS)
        index = card->events_used++;
    else
        return SIM_NONE;
    card->events[index].owner = state->slot;
    return index;
}

/* Generations go on across owners: a record or wait that is still queued can't be taken for a new one. */
void sim_event_destroy(sim_card *card, int32_t event)
{
    card->events[event].owner = SIM_NONE;
    card->events[event].next_free = card->first_free_event;
    card->first_free_event = event;
}

int sim_memory_take(sim_state *state, sim_card *card, uint64_t bytes, int managed)
{
    sim_usage *usage = own_usage(state, card);
    if (bytes > card->config.memory_bytes - card->used_bytes)
        return -1;
    if (!managed && sim_limit_refused(state, card, state->slot, bytes))
        return -1;
    usage->memory_bytes += bytes;
    usage->managed_bytes += managed ? bytes : 0;
    card->used_bytes += bytes;
    note_peak(usage);
    return 0;
}

void sim_memory_give(sim_state *state, sim_card *card, uint64_t bytes, int managed)
{
    card->usage[state->slot].memory_bytes -= bytes;
    card->usage[state->slot].managed_bytes -= managed ? bytes : 0;
    card->used_bytes -= bytes;
}

void sim_purge(sim_card *card, int32_t slot)
{
    sim_usage *usage = &card->usage[slot];
    if (!usage->generation)
        return;
    for (int32_t c = 0; c < card->contexts_used; c++)
        if (card->contexts[c].process == slot)
            sim_context_destroy(card, c);
    for (int32_t e = 0; e < card->events_used; e++) {
        if (card->events[e].owner != slot)
            continue;
        /* Whoever still waits for a record of the dead goes on. */
        sim_event *event = &card->events[e];
        atomic_store_explicit(&event->time_ns, card->time_ns, memory_order_relaxed);
        atomic_store_explicit(&event->done, event->generation, memory_order_release);
        sim_event_destroy(card, e);
    }
    sim_objects_purge(card, slot); /* what others hold too is theirs now */
    card->used_bytes -= usage->memory_bytes;
    memset(usage, 0, sizeof *usage);
    sim_limit_given_back(card, slot);
}

void sim_repair(sim_card *card)
{
    card->used_bytes = 0;
    for (int32_t c = 0; c < card->contexts_used; c++)
        card->contexts[c].first_stream = card->contexts[c].legacy_stream = SIM_NONE;
    for (int32_t s = 0; s < card->streams_used; s++) {
        sim_stream *stream = &card->streams[s];
        if (stream->context == SIM_NONE)
            continue;
        sim_context *context = &card->contexts[stream->context];
        stream->next = context->first_stream;
        context->first_stream = s;
        if (stream->legacy)
            context->legacy_stream = s;
    }
    for (int32_t p = 0; p < SIM_MAX_PROCESSES; p++) {
        sim_usage *usage = &card->usage[p];
        usage->contexts = 0;
        usage->context_bytes = 0;
        for (int32_t c = 0; usage->generation && c < card->contexts_used; c++) {
            if (card->contexts[c].process != p)
                continue;
            usage->contexts++;
            usage->context_bytes += card->contexts[c].bytes;
        }
        card->used_bytes += usage->context_bytes + usage->memory_bytes;
    }
    card->first_free_event = SIM_NONE;
    for (int32_t e = card->events_used - 1; e >= 0; e--)
        if (card->events[e].owner == SIM_NONE)
            sim_event_destroy(card, e);
}
