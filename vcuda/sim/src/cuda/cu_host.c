/* Host functions and stream callbacks: an operation in the stream, run by the stream's own helper thread. */
#include <signal.h>
#include <stdlib.h>
#include <time.h>

#include "cu_capture.h"

typedef struct entry {
    struct entry *next;
    uint64_t id;
    CUhostFn function;
    CUstreamCallback callback;
    CUstream stream;
    void *data;
    sim_ticket before; /* all that precedes it in the stream */
} entry;

struct cu_host_queue {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    entry *first, **last;
    int ending;
    int card;
    int32_t index;
    uint32_t serial;
};

static _Atomic uint64_t next_id = 1;

static void run_entry(cu_host_queue *queue, const entry *one)
{
    sim_state *state = cu_process.state;
    sim_card *card = sim_card_at(state, queue->card);
    int lost = sim_wait(state, queue->card, &one->before);
    for (;;) {
        sim_card_lock(state, queue->card);
        const int gone = card->streams[queue->index].serial != queue->serial;
        const int ready = !gone && sim_host_ready(card, queue->index) == one->id;
        lost |= card->faults.lost;
        sim_card_unlock(state, queue->card);
        if (gone)
            return; /* its context was destroyed: real host functions are dropped then too */
        if (ready || lost)
            break;
        nanosleep(&(struct timespec){0, 50000}, NULL); /* a barrier of the legacy stream holds it */
    }
    if (one->callback)
        one->callback(one->stream, lost ? CUDA_ERROR_UNKNOWN : CUDA_SUCCESS, one->data);
    else if (!lost)
        one->function(one->data);
    sim_card_lock(state, queue->card);
    if (card->streams[queue->index].serial == queue->serial && sim_host_ready(card, queue->index) == one->id)
        sim_host_done(card, queue->index);
    sim_card_unlock(state, queue->card);
}

static void *serve(void *argument)
{
    cu_host_queue *queue = argument;
    for (;;) {
        pthread_mutex_lock(&queue->mutex);
        while (!queue->first && !queue->ending)
            pthread_cond_wait(&queue->changed, &queue->mutex);
        entry *one = queue->first;
        if (one && !(queue->first = one->next))
            queue->last = &queue->first;
        pthread_mutex_unlock(&queue->mutex);
        if (!one)
            break;
        run_entry(queue, one);
        free(one);
    }
    pthread_mutex_destroy(&queue->mutex);
    pthread_cond_destroy(&queue->changed);
    free(queue);
    return NULL;
}

static cu_host_queue *new_queue(CUstream stream)
{
    sigset_t all, before;
    pthread_t thread;
    cu_host_queue *queue = calloc(1, sizeof *queue);
    if (!queue)
        return NULL;
    pthread_mutex_init(&queue->mutex, NULL);
    pthread_cond_init(&queue->changed, NULL);
    queue->last = &queue->first;
    queue->card = stream->ctx->card;
    queue->index = stream->index;
    queue->serial = cu_card(stream->ctx)->streams[stream->index].serial;
    sigfillset(&all); /* the application's signals are not for our thread */
    pthread_sigmask(SIG_BLOCK, &all, &before);
    const int failed = pthread_create(&thread, NULL, serve, queue);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        free(queue);
        return NULL;
    }
    pthread_detach(thread);
    return queue;
}

CUresult cu_host_push(CUstream stream, CUhostFn function, CUstreamCallback callback, void *data)
{
    static pthread_mutex_t order = PTHREAD_MUTEX_INITIALIZER; /* the queue's order is the stream's */
    entry *one = calloc(1, sizeof *one);
    if (!one)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *one = (entry){.id = atomic_fetch_add(&next_id, 1), .function = function, .callback = callback, .stream = stream,
                   .data = data};
    pthread_mutex_lock(&order);
    if (!stream->host_queue)
        stream->host_queue = new_queue(stream);
    cu_host_queue *queue = stream->host_queue;
    const sim_op op = {.kind = SIM_OP_HOST, .value = one->id};
    const CUresult bad = queue ? cu_push(stream, &op, 1, &one->before) : CUDA_ERROR_OUT_OF_MEMORY;
    if (bad) {
        free(one);
    } else {
        one->before.count--; /* up to, not with it */
        pthread_mutex_lock(&queue->mutex);
        *queue->last = one;
        queue->last = &one->next;
        pthread_cond_signal(&queue->changed);
        pthread_mutex_unlock(&queue->mutex);
    }
    pthread_mutex_unlock(&order);
    return bad;
}

void cu_host_end(CUstream stream)
{
    cu_host_queue *queue = stream->host_queue;
    if (!queue)
        return;
    pthread_mutex_lock(&queue->mutex);
    queue->ending = 1;
    pthread_cond_signal(&queue->changed);
    pthread_mutex_unlock(&queue->mutex);
    stream->host_queue = NULL;
}

CU_EXPORT CUresult cuLaunchHostFunc(CUstream handle, CUhostFn function, void *data)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !function)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    cu_work work = {.kind = CU_GRAPH_NODE_TYPE_HOST};
    work.host = (CUDA_HOST_NODE_PARAMS){function, data};
    return cu_submit(stream, &work);
}

CU_EXPORT CUresult cuStreamAddCallback(CUstream handle, CUstreamCallback callback, void *data, unsigned int flags)
{
    CUstream stream;
    const CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !callback || flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (stream->capture)
        return cu_capture_break(stream);
    return cu_host_push(stream, NULL, callback, data);
}
