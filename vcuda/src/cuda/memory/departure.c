/* A queue of events, each with what leaves when it is reached. */
#include "cuda/memory/departure.h"

#include <stdlib.h>

#include "cuda/driver/capture_mode.h"

struct departure {
    struct departure *next;
    CUevent event;      /* NULL: none could be made */
    CUcontext context;  /* of the event, with which it ends */
    void (*gone)(void *what);
    void *what;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the links; never held across a call of the driver */
static struct departure *first, **last = &first;
static uint64_t waiting;

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    first = NULL;
    last = &first;
    waiting = 0;
}
VC_AT_FORK(forget);

/* An event at the end of what is in the stream, in the stream's context. */
static CUevent mark(CUstream stream, CUcontext context)
{
    CUcontext now = NULL;
    CUevent event = NULL;
    if (!vc_real.cuEventCreate || !vc_real.cuEventRecord || !vc_real.cuEventDestroy_v2)
        return NULL;
    bool foreign = vc_real.cuCtxGetCurrent(&now) != CUDA_SUCCESS || now != context;
    if (foreign && (!vc_real.cuCtxPushCurrent_v2 || !vc_real.cuCtxPopCurrent_v2 ||
                    vc_real.cuCtxPushCurrent_v2(context) != CUDA_SUCCESS))
        return NULL;
    int mode = vc_capture_relax();
    if (vc_real.cuEventCreate(&event, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS) {
        event = NULL;
    } else if (vc_real.cuEventRecord(event, stream) != CUDA_SUCCESS) {
        vc_real.cuEventDestroy_v2(event);
        event = NULL;
    }
    vc_capture_restore(mode);
    if (foreign)
        vc_real.cuCtxPopCurrent_v2(&now);
    return event;
}

void vc_depart(CUstream stream, void (*gone)(void *what), void *what)
{
    CUdevice device;
    struct departure *one = malloc(sizeof *one);
    if (!one)
        return;
    *one = (struct departure){.gone = gone, .what = what};
    if (vc_stream_device(stream, &device, &one->context))
        one->event = mark(stream, one->context);
    pthread_mutex_lock(&mutex);
    *last = one;
    last = &one->next;
    waiting++;
    pthread_mutex_unlock(&mutex);
}

static struct departure *take_first(void)
{
    pthread_mutex_lock(&mutex);
    struct departure *one = first;
    if (one) {
        first = one->next;
        last = first ? last : &first;
        waiting--;
    }
    pthread_mutex_unlock(&mutex);
    return one;
}

static void put_back(struct departure *one, bool in_front)
{
    pthread_mutex_lock(&mutex);
    one->next = in_front ? first : NULL;
    if (in_front) {
        last = first ? last : &one->next;
        first = one;
    } else {
        *last = one;
        last = &one->next;
    }
    waiting++;
    pthread_mutex_unlock(&mutex);
}

static bool is_reached(const struct departure *one)
{
    int mode = vc_capture_relax();
    bool reached = one->event && vc_real.cuEventQuery(one->event) == CUDA_SUCCESS;
    if (reached)
        vc_real.cuEventDestroy_v2(one->event);
    vc_capture_restore(mode);
    return reached;
}

static void end(struct departure *one)
{
    one->gone(one->what);
    free(one);
}

/* Up to the first that is not reached: they come in about this order. */
static void settle(void)
{
    while (VC_UNLIKELY(vc_load_relaxed(&waiting) > 0)) {
        struct departure *one = take_first();
        if (!one)
            return;
        if (!is_reached(one)) {
            put_back(one, true);
            return;
        }
        end(one);
    }
}

/* All of them, whatever their order. */
static void make_room(uint32_t card)
{
    (void)card;
    for (uint64_t left = vc_load_relaxed(&waiting); left > 0; left--) {
        struct departure *one = take_first();
        if (!one)
            return;
        if (is_reached(one))
            end(one);
        else
            put_back(one, false);
    }
}

static void context_ended(CUcontext context)
{
    for (uint64_t left = vc_load_relaxed(&waiting); left > 0; left--) {
        struct departure *one = take_first();
        if (!one)
            return;
        if (one->context == context)
            end(one);
        else
            put_back(one, false);
    }
}

static const struct vc_source departures = {.make_room = make_room, .settle = settle, .context_ended = context_ended};
VC_SOURCE(departures);
