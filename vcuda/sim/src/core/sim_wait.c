/* Submission and waiting: operations enter a stream's ring; a waiter sleeps until the predicted completion. */
#include <sched.h>
#include <sys/prctl.h>
#include <time.h>

#include "sim_engine.h"

/* A sleeper wakes late by about this much; the rest is spun. */
enum { SPIN_NS = 40000, POLL_NS = 100000, LONGEST_NS = 20000000 };

int sim_push(sim_card *card, int32_t index, const sim_op *op)
{
    sim_stream *stream = &card->streams[index];
    const uint64_t at = atomic_load_explicit(&stream->submitted, memory_order_relaxed);
    if (at - atomic_load_explicit(&stream->done, memory_order_relaxed) >= SIM_RING)
        return -1;
    sim_op *target = &stream->ring[at % SIM_RING];
    *target = *op;
    const sim_card_config *config = &card->config;
    if (config->kernel_jitter_ppm && op->kind == SIM_OP_WORK)
        target->ns += sim_draw(card, op->ns * config->kernel_jitter_ppm / 1000000);
    target->reach_ns = config->reach_ns ? card->time_ns + config->reach_ns : 0;
    target->order = ++card->contexts[stream->context].order;
    stream->submitted_ns += target->ns;
    atomic_store_explicit(&stream->submitted, at + 1, memory_order_release);
    return 0;
}

sim_ticket sim_ticket_now(const sim_card *card, int32_t index)
{
    const sim_stream *stream = &card->streams[index];
    return (sim_ticket){index, stream->serial, atomic_load_explicit(&stream->submitted, memory_order_relaxed),
                        stream->submitted_ns};
}

int sim_ticket_done(const sim_card *card, const sim_ticket *ticket)
{
    const sim_stream *stream = &card->streams[ticket->stream];
    return stream->serial != ticket->serial || atomic_load_explicit(&stream->done, memory_order_acquire) >= ticket->count;
}

static uint64_t context_left_ns(const sim_card *card, int32_t context)
{
    uint64_t left = 0;
    for (int32_t s = card->contexts[context].first_stream; s != SIM_NONE; s = card->streams[s].next)
        left += card->streams[s].submitted_ns - card->streams[s].done_ns;
    return left;
}

/* How long the ticket takes at least from card->time_ns on; 0 when that can't be said (it hangs on something else). */
static uint64_t least_left(const sim_card *card, const sim_ticket *ticket)
{
    const sim_stream *stream = &card->streams[ticket->stream];
    const sim_op *head = &stream->ring[stream->done % SIM_RING];
    uint64_t left = ticket->sum_ns > stream->done_ns ? ticket->sum_ns - stream->done_ns : 0;
    if (stream->started)
        left -= head->ns - stream->left_ns <= left ? head->ns - stream->left_ns : left;
    if (stream->started && stream->ready_ns > card->time_ns)
        left += stream->ready_ns - card->time_ns;
    if (head->kind == SIM_OP_WAIT || head->kind == SIM_OP_AFTER || head->kind == SIM_OP_HOST || head->kind == SIM_OP_COPY_IN ||
        head->kind == SIM_OP_COPY_OUT)
        return left;
    if (card->switching != SIM_NONE)
        left += card->switch_end_ns > card->time_ns ? card->switch_end_ns - card->time_ns : 0;
    else if (card->current != stream->context && card->current != SIM_NONE) {
        /* The one on the card keeps it until its slice ends or its work does. */
        const uint64_t work = context_left_ns(card, card->current);
        const uint64_t slice = card->slice_end_ns > card->time_ns ? card->slice_end_ns - card->time_ns : 0;
        left += (work < slice ? work : slice) + (work ? card->config.switch_ns : 0);
    }
    return left;
}

/* A host function lasts for nobody knows how long: what the card has to do behind it says nothing of that, and who spun meanwhile would take a processor from it. */
static int behind_host(const sim_card *card, const sim_ticket *ticket)
{
    const sim_stream *stream = &card->streams[ticket->stream];
    return stream->ring[stream->done % SIM_RING].kind == SIM_OP_HOST;
}

static void sleep_until(uint64_t target, uint64_t now)
{
    if (target > now + SPIN_NS) {
        const uint64_t wake = target - SPIN_NS;
        const struct timespec until = {(time_t)(wake / 1000000000), (long)(wake % 1000000000)};
        const int slack = prctl(PR_GET_TIMERSLACK);
        prctl(PR_SET_TIMERSLACK, 1ul);
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        prctl(PR_SET_TIMERSLACK, slack > 0 ? (unsigned long)slack : 50000ul);
    }
    while (sim_now() < target)
        sim_pause();
}

int sim_wait(sim_state *state, int index, const sim_ticket *ticket)
{
    sim_card *card = sim_card_at(state, index);
    unsigned fruitless = 0;
    for (;;) {
        const uint64_t now = sim_card_lock(state, index);
        if (atomic_load_explicit(&card->faults.lost, memory_order_relaxed)) {
            sim_card_unlock(state, index);
            return -1;
        }
        if (sim_ticket_done(card, ticket)) {
            sim_card_unlock(state, index);
            return 0;
        }
        uint64_t left = least_left(card, ticket);
        const int hosted = behind_host(card, ticket);
        sim_card_unlock(state, index);
        if (left == 0 || hosted)
            left = fruitless++ < 4 ? SPIN_NS / 4 : fruitless < 16 ? POLL_NS : 10 * POLL_NS;
        sleep_until(now + (left < LONGEST_NS ? left : LONGEST_NS), now);
    }
}

int sim_wait_room(sim_state *state, int index, int32_t stream)
{
    sim_card *card = sim_card_at(state, index);
    sim_card_lock(state, index);
    sim_ticket ticket = sim_ticket_now(card, stream);
    /* A quarter of the ring at once, so that a full queue costs few sleeps. */
    const uint64_t target = ticket.count - SIM_RING + SIM_RING / 4;
    ticket.sum_ns = card->streams[stream].done_ns;
    for (uint64_t i = card->streams[stream].done; i < target; i++)
        ticket.sum_ns += card->streams[stream].ring[i % SIM_RING].ns;
    ticket.count = target;
    sim_card_unlock(state, index);
    return sim_wait(state, index, &ticket);
}

uint64_t sim_host_ready(const sim_card *card, int32_t index)
{
    const sim_stream *stream = &card->streams[index];
    return stream->host_reached ? stream->ring[stream->done % SIM_RING].value : 0;
}

void sim_host_done(sim_card *card, int32_t index)
{
    sim_stream *stream = &card->streams[index];
    stream->started = 0;
    stream->host_reached = 0;
    atomic_fetch_add_explicit(&stream->done, 1, memory_order_release);
}
