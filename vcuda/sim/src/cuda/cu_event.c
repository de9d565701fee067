/* Events: recorded into streams, queried, waited for, compared. */
#include <stdlib.h>

#include "cu_capture.h"
#include "cu_memory.h"

static CUresult event_of(CUevent event)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    if (!event || event->magic != CU_MAGIC_EVENT)
        return CUDA_ERROR_INVALID_HANDLE;
    return cu_usable(event->ctx);
}

CU_EXPORT CUresult cuEventCreate(CUevent *event, unsigned int flags)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !event || flags > 7)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (flags & CU_EVENT_INTERPROCESS)
        return flags & CU_EVENT_DISABLE_TIMING ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    CUevent made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_card_lock(cu_process.state, ctx->card);
    made->index = sim_event_create(cu_process.state, cu_card(ctx));
    sim_card_unlock(cu_process.state, ctx->card);
    if (made->index < 0) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->ctx = ctx;
    made->flags = flags;
    made->magic = CU_MAGIC_EVENT;
    pthread_mutex_lock(&cu_lock);
    made->next = ctx->events;
    if (ctx->events)
        ctx->events->previous = made;
    ctx->events = made;
    pthread_mutex_unlock(&cu_lock);
    *event = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuEventDestroy_v2(CUevent event)
{
    const CUresult bad = event_of(event);
    if (bad)
        return bad;
    CUcontext ctx = event->ctx;
    pthread_mutex_lock(&cu_lock);
    if (event->previous)
        event->previous->next = event->next;
    else
        ctx->events = event->next;
    if (event->next)
        event->next->previous = event->previous;
    pthread_mutex_unlock(&cu_lock);
    sim_card_lock(cu_process.state, ctx->card);
    sim_event_destroy(cu_card(ctx), event->index);
    sim_card_unlock(cu_process.state, ctx->card);
    event->magic = 0;
    free(event->captured);
    free(event);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuEventDestroy(CUevent event)
{
    return cuEventDestroy_v2(event);
}

void cu_events_end(CUcontext ctx)
{
    sim_card_lock(cu_process.state, ctx->card);
    for (CUevent event = ctx->events; event; event = event->next) {
        event->magic = 0;
        sim_event_destroy(cu_card(ctx), event->index);
    }
    sim_card_unlock(cu_process.state, ctx->card);
    ctx->events = NULL;
}

/* Records are numbered under the card's lock, where the number and its place in the stream are one step. */
static CUresult record(CUevent event, CUstream stream, sim_ticket *after)
{
    sim_state *state = cu_process.state;
    CUcontext ctx = stream->ctx;
    sim_card *card = cu_card(ctx);
    if (event->ctx != ctx)
        return CUDA_ERROR_INVALID_HANDLE;
    cu_take_time(card->config.call_ns / 2);
    for (;;) {
        sim_card_lock(state, ctx->card);
        sim_event *shared = &card->events[event->index];
        const sim_op op = {.kind = SIM_OP_RECORD, .event = (uint32_t)event->index, .value = shared->generation + 1};
        if (card->faults.lost) {
            sim_card_unlock(state, ctx->card);
            return cu_lost(ctx);
        }
        if (sim_push(card, stream->index, &op) == 0) {
            shared->generation++;
            event->generation = shared->generation;
            event->ticket = sim_ticket_now(card, stream->index);
            event->capture_id = 0;
            if (after)
                *after = event->ticket;
            sim_card_unlock(state, ctx->card);
            return CUDA_SUCCESS;
        }
        sim_card_unlock(state, ctx->card);
        if (sim_wait_room(state, ctx->card, stream->index))
            return cu_lost(ctx);
    }
}

CUresult cu_event_record(CUevent event, CUstream stream, sim_ticket *after)
{
    const CUresult bad = event_of(event);
    return bad ? bad : record(event, stream, after);
}

CUresult cu_event_wait(CUevent event, CUstream stream, sim_ticket *after)
{
    const CUresult bad = event_of(event);
    if (bad)
        return bad;
    const sim_op op = {.kind = SIM_OP_WAIT,
                       .card = (uint16_t)event->ctx->card,
                       .event = (uint32_t)event->index,
                       .value = event->generation};
    if (event->generation) {
        pthread_mutex_lock(&cu_lock);
        cu_order_follows(stream, event->ctx->card, &event->ticket);
        pthread_mutex_unlock(&cu_lock);
    }
    /* Waiting for an event that was never recorded is no wait. */
    return cu_push(stream, &op, event->generation != 0, after);
}

CU_EXPORT CUresult cuEventRecordWithFlags(CUevent event, CUstream handle, unsigned int flags)
{
    CUstream stream;
    CUresult bad = event_of(event);
    if (!bad)
        bad = cu_stream_of(handle, &stream);
    if (bad || flags > 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (!stream->capture)
        return record(event, stream, NULL);
    if (flags)
        return cu_capture_add(stream, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .event = event}, NULL);
    return cu_capture_record(stream, event);
}

CU_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream)
{
    return cuEventRecordWithFlags(event, stream, 0);
}

CU_EXPORT CUresult cuStreamWaitEvent(CUstream handle, CUevent event, unsigned int flags)
{
    CUstream stream;
    CUresult bad = event_of(event);
    if (!bad)
        bad = cu_stream_of(handle, &stream);
    if (bad || flags > 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (event->capture_id || (stream->capture && !flags))
        return cu_capture_wait(stream, event);
    if (stream->capture)
        return cu_capture_add(stream, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_WAIT_EVENT, .event = event}, NULL);
    return cu_event_wait(event, stream, NULL);
}

static int event_done(CUevent event)
{
    const sim_event *shared = &cu_card(event->ctx)->events[event->index];
    if (!event->generation || atomic_load_explicit(&shared->done, memory_order_acquire) >= event->generation)
        return 1;
    sim_card_lock(cu_process.state, event->ctx->card);
    const int done = atomic_load_explicit(&shared->done, memory_order_acquire) >= event->generation;
    sim_card_unlock(cu_process.state, event->ctx->card);
    return done;
}

CU_EXPORT CUresult cuEventQuery(CUevent event)
{
    CUresult bad = event_of(event);
    if (!bad && event->capture_id)
        bad = CUDA_ERROR_CAPTURED_EVENT;
    if (!bad)
        bad = cu_capture_forbids();
    if (bad)
        return bad;
    if (cu_card(event->ctx)->faults.lost)
        return cu_lost(event->ctx);
    return event_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CU_EXPORT CUresult cuEventSynchronize(CUevent event)
{
    CUresult bad = event_of(event);
    if (!bad && event->capture_id)
        bad = CUDA_ERROR_CAPTURED_EVENT;
    if (!bad)
        bad = cu_capture_forbids();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    cu_order_settle(); /* what streams have reached is freed, whatever this event is */
    cu_physical_sweep();
    pthread_mutex_unlock(&cu_lock);
    if (!event->generation)
        return CUDA_SUCCESS;
    const sim_ticket ticket = event->ticket;
    const CUresult result = cu_wait(event->ctx, &ticket);
    cu_pools_settle(event->ctx->device);
    return result;
}

CU_EXPORT CUresult cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    CUresult bad = event_of(start);
    if (!bad)
        bad = event_of(end);
    if (bad || !milliseconds)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if ((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !start->generation || !end->generation ||
        start->ctx->card != end->ctx->card)
        return CUDA_ERROR_INVALID_HANDLE;
    if (start->capture_id || end->capture_id)
        return CUDA_ERROR_CAPTURED_EVENT;
    if (!event_done(start) || !event_done(end))
        return CUDA_ERROR_NOT_READY;
    const sim_card *card = cu_card(start->ctx);
    const uint64_t from = card->events[start->index].time_ns, to = card->events[end->index].time_ns;
    *milliseconds = (float)((double)(int64_t)(to - from) / 1e6);
    return CUDA_SUCCESS;
}
