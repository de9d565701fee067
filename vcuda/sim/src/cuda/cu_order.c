/* What is freed in stream order: it waits in its stream's lane until the stream gets there, and may serve later work of the
 * same stream, and of streams that come after it, before. */
#include <stdlib.h>

#include "cu_pool.h"
#include "cu_sharing.h"

typedef struct pending {
    struct pending *next;
    sim_ticket ticket;
    cu_block *block;
} pending;

typedef struct lane {
    struct lane *next;
    int card;
    CUcontext ctx; /* the stream's */
    pending *first, **last;
} lane;

static lane *lanes; /* under cu_lock, as all of this */

static lane *lane_of(CUstream stream, const sim_ticket *ticket)
{
    for (lane *one = lanes; one; one = one->next)
        if (one->card == stream->ctx->card && one->first->ticket.stream == ticket->stream &&
            one->first->ticket.serial == ticket->serial)
            return one;
    lane *made = calloc(1, sizeof *made);
    if (made) {
        *made = (lane){.next = lanes, .card = stream->ctx->card, .ctx = stream->ctx, .last = &made->first};
        lanes = made;
    }
    return made;
}

void cu_block_end(cu_block *block)
{
    if (block->kind == CU_BLOCK_GRAPH) {
        cu_graph_memory_drop(block); /* its address stays the graph's, and goes after that */
        if (!block->uses && !block->references)
            cu_unplace(block);
        return;
    }
    if (block->pool)
        cu_pool_forget(block);
    if (block->kind == CU_BLOCK_IMPORTED)
        cu_physical_unmap(block);
    else
        cu_unplace(block);
}

static int done(int card, const sim_ticket *ticket)
{
    return sim_ticket_done(sim_card_at(cu_process.state, card), ticket);
}

/* Take the first out of the lane; the lane goes when it is empty. */
static pending *pop(lane **link)
{
    lane *one = *link;
    pending *first = one->first;
    one->first = first->next;
    if (!one->first) {
        *link = one->next;
        free(one);
    }
    return first;
}

static void end_pending(pending *one)
{
    one->block->freed = 0;
    cu_block_end(one->block);
    free(one);
}

CUresult cu_order_free(CUstream stream, cu_block *block)
{
    const int card = stream->ctx->card;
    sim_card_lock(cu_process.state, card);
    const sim_ticket ticket = sim_ticket_now(cu_card(stream->ctx), stream->index);
    const int now = done(card, &ticket);
    sim_card_unlock(cu_process.state, card);
    if (now) {
        cu_block_end(block);
        return CUDA_SUCCESS;
    }
    pending *made = malloc(sizeof *made);
    lane *home = made ? lane_of(stream, &ticket) : NULL;
    if (!home) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (pending){NULL, ticket, block};
    if (block->kind != CU_BLOCK_GRAPH)
        block->freed = 1;
    if (block->pool && block->pool->ragged) { /* in one model, what is used is what has no free submitted */
        block->pool->used -= block->counted;
        block->counted = 0;
    }
    *home->last = made;
    home->last = &made->next;
    return CUDA_SUCCESS;
}

void cu_order_settle(void)
{
    for (lane **link = &lanes; *link;) {
        lane *one = *link;
        const int card = one->card;
        pending *over = NULL, **last = &over;
        sim_card_lock(cu_process.state, card);
        int empty = 0;
        while (!empty && done(card, &one->first->ticket)) {
            empty = !one->first->next;
            *last = pop(link);
            last = &(*last)->next;
        }
        sim_card_unlock(cu_process.state, card);
        *last = NULL;
        if (!empty)
            link = &one->next;
        for (pending *next; over; over = next) { /* without the card's lock: what ends is discharged under it */
            next = over->next;
            end_pending(over);
        }
    }
}

void cu_order_end(CUcontext ctx)
{
    for (lane **link = &lanes; *link;) {
        lane *one = *link;
        if (one->ctx != ctx) {
            link = &one->next;
            continue;
        }
        while (*link == one)
            end_pending(pop(link));
    }
}

void cu_order_forget(const cu_block *block)
{
    for (lane **link = &lanes; *link;) {
        lane *one = *link;
        pending **at = &one->first;
        while (*at) {
            pending *found = *at;
            if (found->block != block) {
                at = &found->next;
                continue;
            }
            *at = found->next;
            free(found);
        }
        one->last = at;
        if (one->first) {
            link = &one->next;
        } else {
            *link = one->next;
            free(one);
        }
    }
}

/* ---- reuse before the free is reached ---- */

/* Whether what `stream` does next comes after the free, by its own order or by events that it waits for. */
static int ordered(const CUstream stream, const lane *one, const pending *free_at, int follow)
{
    if (one->card == stream->ctx->card && free_at->ticket.stream == stream->index && one->ctx == stream->ctx)
        return 1;
    for (int i = 0; follow && i < CU_FOLLOWS; i++) {
        const cu_follow *seen = &stream->follows[i];
        if (seen->card == one->card && seen->ticket.serial == free_at->ticket.serial &&
            seen->ticket.stream == free_at->ticket.stream && seen->ticket.count >= free_at->ticket.count)
            return 1;
    }
    return 0;
}

static int wait_for(CUstream stream, int card, const sim_ticket *ticket)
{
    const sim_op op = {.kind = SIM_OP_AFTER,
                       .card = (uint16_t)card,
                       .event = (uint32_t)ticket->stream,
                       .value = (uint64_t)ticket->serial << 32 | (ticket->count & 0xffffffffu)};
    sim_card *own = cu_card(stream->ctx);
    sim_card_lock(cu_process.state, stream->ctx->card);
    const int full = sim_push(own, stream->index, &op);
    sim_card_unlock(cu_process.state, stream->ctx->card);
    return full;
}

int cu_order_reuse(CUmemoryPool pool, size_t bytes, CUstream stream, int any, cu_extent *extent)
{
    const uint64_t wanted = cu_space_counted(pool, bytes);
    for (lane *one = lanes; one; one = one->next) {
        for (pending *at = one->first; at; at = at->next) {
            cu_extent *there = &at->block->extent;
            if (at->block->pool != pool || there->bytes < wanted ||
                (!any && !ordered(stream, one, at, pool->reuse[0])) ||
                (any && (one->card != stream->ctx->card || wait_for(stream, one->card, &at->ticket))))
                continue;
            *extent = (cu_extent){there->segment, there->offset, wanted};
            there->offset += wanted;
            there->bytes -= wanted;
            const size_t counted = at->block->counted < wanted ? at->block->counted : wanted;
            at->block->counted -= counted;
            pool->used -= counted;
            return 0;
        }
    }
    return -1;
}

void cu_order_follows(CUstream stream, int card, const sim_ticket *ticket)
{
    int at = -1;
    for (int i = 0; i < CU_FOLLOWS; i++)
        if (stream->follows[i].card == card && stream->follows[i].ticket.stream == ticket->stream)
            at = i;
    if (at < 0)
        at = stream->next_follow++ % CU_FOLLOWS;
    stream->follows[at] = (cu_follow){card, *ticket};
}
