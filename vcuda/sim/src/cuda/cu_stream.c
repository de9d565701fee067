/* Streams: made, resolved from handles, pushed to, waited for. */
#include <stdlib.h>

#include "cu_capture.h"
#include "cu_memory.h"

enum { THREAD_STREAMS = 16 };
/* This thread's own default streams, one per context; a context's id tells a revived primary one. */
static _Thread_local struct {
    CUcontext ctx;
    unsigned long long id;
    CUstream stream;
} thread_streams[THREAD_STREAMS];

/* All but the first take memory, in chunks, as there come to be more of them than before; it ends with the context. Card locked. */
static int pay(CUcontext ctx)
{
    const sim_card *card = cu_card(ctx);
    int count = -1;
    for (int32_t s = card->contexts[ctx->index].first_stream; s != SIM_NONE; s = card->streams[s].next)
        count += !card->streams[s].legacy && !card->streams[s].closing;
    const uint64_t each = card->config.stream_bytes;
    const uint64_t before = (each * (uint64_t)ctx->streams_most + CU_CHUNK - 1) / CU_CHUNK, now = (each * (uint64_t)count + CU_CHUNK - 1) / CU_CHUNK;
    if (count <= ctx->streams_most || !each)
        return 0;
    if (sim_context_resize(cu_process.state, cu_card(ctx), ctx->index, (int64_t)((now - before) * CU_CHUNK)))
        return -1;
    ctx->streams_most = count;
    return 0;
}

CUresult cu_stream_new(CUcontext ctx, unsigned flags, int priority, int legacy, CUstream *stream)
{
    CUstream made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    sim_card_lock(cu_process.state, ctx->card);
    int32_t index = sim_stream_create(cu_card(ctx), ctx->index, !legacy && !(flags & CU_STREAM_NON_BLOCKING), legacy,
                                      priority);
    if (index >= 0 && pay(ctx)) {
        sim_stream_destroy(cu_card(ctx), index);
        index = SIM_NONE;
    }
    sim_card_unlock(cu_process.state, ctx->card);
    if (index < 0) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    made->ctx = ctx;
    made->index = index;
    made->flags = flags;
    made->priority = priority;
    made->id = atomic_fetch_add(&cu_process.next_id, 1) + 1;
    made->magic = CU_MAGIC_STREAM;
    pthread_mutex_lock(&cu_lock);
    made->next = ctx->streams;
    ctx->streams = made;
    pthread_mutex_unlock(&cu_lock);
    *stream = made;
    return CUDA_SUCCESS;
}

/* The structs of the last streams that ended stay readable, so that a stale handle is refused. cu_lock held. */
static void bury(CUstream stream)
{
    enum { REMEMBERED = 1024 };
    static CUstream graves[REMEMBERED];
    static unsigned next;
    stream->magic = 0;
    free(graves[next]);
    graves[next] = stream;
    next = (next + 1) % REMEMBERED;
}

/* CUDA calls the stream "local to the thread": it ends with it, once its work is done. */
static pthread_key_t thread_key;

static void end(CUstream stream);

static void thread_ended(void *streams)
{
    (void)streams;
    for (int i = 0; i < THREAD_STREAMS; i++)
        if (thread_streams[i].ctx && thread_streams[i].ctx->alive && thread_streams[i].ctx->id == thread_streams[i].id)
            end(thread_streams[i].stream);
}

static void make_thread_key(void)
{
    pthread_key_create(&thread_key, thread_ended);
}

static CUresult thread_stream(CUcontext ctx, CUstream *stream)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    int place = 0;
    pthread_once(&once, make_thread_key);
    pthread_setspecific(thread_key, thread_streams);
    for (int i = 0; i < THREAD_STREAMS; i++) {
        if (thread_streams[i].ctx == ctx && thread_streams[i].id == ctx->id) {
            *stream = thread_streams[i].stream;
            return CUDA_SUCCESS;
        }
        if (!thread_streams[i].ctx || !thread_streams[i].ctx->alive || thread_streams[i].ctx->id != thread_streams[i].id)
            place = i;
    }
    const CUresult bad = cu_stream_new(ctx, 0, 0, 0, stream);
    if (!bad) {
        thread_streams[place].ctx = ctx;
        thread_streams[place].id = ctx->id;
        thread_streams[place].stream = *stream;
    }
    return bad;
}

CUresult cu_stream_of(CUstream handle, CUstream *stream)
{
    if ((uintptr_t)handle > 2) {
        const CUresult bad = cu_initialised();
        if (bad)
            return bad;
        if (handle->magic != CU_MAGIC_STREAM)
            return CUDA_ERROR_INVALID_HANDLE;
        *stream = handle;
        return cu_usable(handle->ctx);
    }
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad)
        return bad;
    if (handle == CU_STREAM_PER_THREAD)
        return thread_stream(ctx, stream);
    *stream = ctx->legacy;
    return CUDA_SUCCESS;
}

void cu_streams_end(CUcontext ctx)
{
    for (CUstream stream = ctx->streams; stream; stream = stream->next)
        cu_capture_abandon(stream);
    pthread_mutex_lock(&cu_lock);
    for (CUstream stream = ctx->streams, next; stream; stream = next) {
        next = stream->next;
        cu_host_end(stream);
        bury(stream);
    }
    ctx->streams = NULL;
    pthread_mutex_unlock(&cu_lock);
}

void cu_take_time(uint64_t ns)
{
    if (ns)
        for (const uint64_t until = sim_now() + ns; sim_now() < until;)
            sim_pause();
}

CUresult cu_push(CUstream stream, const sim_op *ops, int count, sim_ticket *ticket)
{
    CUcontext ctx = stream->ctx;
    sim_state *state = cu_process.state;
    sim_card *card = cu_card(ctx);
    if (count && ops[0].kind == SIM_OP_WORK)
        cu_take_time(card->config.call_ns);
    sim_card_lock(state, ctx->card);
    for (int i = 0; i < count; i++) {
        while (!atomic_load_explicit(&card->faults.lost, memory_order_relaxed) && sim_push(card, stream->index, &ops[i])) {
            sim_card_unlock(state, ctx->card);
            if (sim_wait_room(state, ctx->card, stream->index))
                return cu_lost(ctx);
            sim_card_lock(state, ctx->card);
        }
    }
    if (ticket)
        *ticket = sim_ticket_now(card, stream->index);
    const int lost = atomic_load_explicit(&card->faults.lost, memory_order_relaxed);
    sim_card_unlock(state, ctx->card);
    return lost ? cu_lost(ctx) : CUDA_SUCCESS;
}

CUresult cu_wait(CUcontext ctx, const sim_ticket *ticket)
{
    if (sim_wait(cu_process.state, ctx->card, ticket))
        return cu_lost(ctx);
    return atomic_load_explicit(&ctx->error, memory_order_relaxed);
}

static sim_ticket last_of(CUstream stream)
{
    sim_card_lock(cu_process.state, stream->ctx->card);
    const sim_ticket ticket = sim_ticket_now(cu_card(stream->ctx), stream->index);
    sim_card_unlock(cu_process.state, stream->ctx->card);
    return ticket;
}

CUresult cu_context_wait(CUcontext ctx)
{
    enum { CHUNK = 64 };
    sim_ticket tickets[CHUNK];
    CUresult result = ctx->error;
    sim_card *card = cu_card(ctx);
    /* Streams that close while they still have work belong to the context too: walk the card's own list. */
    for (int32_t s = 0; !result && s < card->streams_used;) {
        int count = 0;
        sim_card_lock(cu_process.state, ctx->card);
        for (; s < card->streams_used && count < CHUNK; s++) {
            if (card->streams[s].context != ctx->index)
                continue;
            tickets[count] = sim_ticket_now(card, s);
            count += !sim_ticket_done(card, &tickets[count]);
        }
        sim_card_unlock(cu_process.state, ctx->card);
        for (int i = 0; !result && i < count; i++)
            result = cu_wait(ctx, &tickets[i]);
    }
    cu_pools_settle(ctx->device);
    return result;
}

/* ---- the API ---- */

CU_EXPORT CUresult cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !stream || flags > CU_STREAM_NON_BLOCKING)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    return cu_stream_new(ctx, flags, priority > 0 ? 0 : priority < -5 ? -5 : priority, 0, stream);
}

CU_EXPORT CUresult cuStreamCreate(CUstream *stream, unsigned int flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

static void end(CUstream stream)
{
    CUcontext ctx = stream->ctx;
    cu_capture_abandon(stream);
    pthread_mutex_lock(&cu_lock);
    CUstream *link = &ctx->streams;
    while (*link && *link != stream)
        link = &(*link)->next;
    if (*link)
        *link = stream->next;
    cu_host_end(stream);
    sim_card_lock(cu_process.state, ctx->card);
    sim_stream_destroy(cu_card(ctx), stream->index);
    sim_card_unlock(cu_process.state, ctx->card);
    bury(stream);
    pthread_mutex_unlock(&cu_lock);
}

CU_EXPORT CUresult cuStreamDestroy_v2(CUstream handle)
{
    CUstream stream;
    if ((uintptr_t)handle <= 2)
        return CUDA_ERROR_INVALID_HANDLE;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (!bad)
        end(stream);
    return bad;
}

CU_EXPORT CUresult cuStreamDestroy(CUstream stream)
{
    return cuStreamDestroy_v2(stream);
}

CU_EXPORT CUresult cuStreamSynchronize(CUstream handle)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || stream->capture)
        return bad ? bad : cu_capture_break(stream);
    const sim_ticket ticket = last_of(stream);
    const CUresult result = cu_wait(stream->ctx, &ticket);
    cu_pools_settle(stream->ctx->device);
    return result;
}

CU_EXPORT CUresult cuStreamQuery(CUstream handle)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || stream->capture)
        return bad ? bad : cu_capture_break(stream);
    sim_card_lock(cu_process.state, stream->ctx->card);
    const sim_ticket ticket = sim_ticket_now(cu_card(stream->ctx), stream->index);
    const int done = sim_ticket_done(cu_card(stream->ctx), &ticket);
    const int lost = cu_card(stream->ctx)->faults.lost;
    sim_card_unlock(cu_process.state, stream->ctx->card);
    return lost ? cu_lost(stream->ctx) : done ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

CU_EXPORT CUresult cuStreamGetPriority(CUstream handle, int *priority)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !priority)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuStreamGetFlags(CUstream handle, unsigned int *flags)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuStreamGetId(CUstream handle, unsigned long long *id)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !id)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *id = stream->id;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuStreamGetCtx(CUstream handle, CUcontext *ctx)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !ctx)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *ctx = stream->ctx;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuStreamAttachMemAsync(CUstream handle, CUdeviceptr pointer, size_t length, unsigned int flags)
{
    CUstream stream;
    (void)length, (void)flags;
    const CUresult bad = cu_stream_of(handle, &stream);
    return bad ? bad : pointer ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
