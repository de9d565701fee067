/* The list of trackers: who holds one, and going through all of them. */
#include "cuda/work/tracker.h"

#include <stdlib.h>

#include "base/clock.h"
#include "cuda/work/bell.h"

static pthread_mutex_t trackers_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t trackers_idle = PTHREAD_COND_INITIALIZER;
static struct vc_tracker *trackers;
static struct vc_tracker *in_use; /* the helper works on it right now */
static uint64_t trackers_changes;

bool vc_driver_can_measure(void)
{
    return vc_real.cuEventCreate && vc_real.cuEventRecord && vc_real.cuEventQuery && vc_real.cuEventElapsedTime &&
           vc_real.cuStreamCreate && vc_real.cuCtxSetCurrent && vc_real.cuThreadExchangeStreamCaptureMode;
}

static struct vc_tracker *find_tracker(CUcontext context)
{
    struct vc_tracker *tracker = trackers;
    while (tracker && tracker->context != context)
        tracker = tracker->next;
    return tracker;
}

static struct vc_tracker *make_tracker(struct vc_tracker *tracker, CUcontext context, struct vc_gate *gate)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&tracker->mutex, NULL);
    pthread_cond_init(&tracker->changed, &clock);
    pthread_condattr_destroy(&clock);
    tracker->context = context;
    tracker->gate = gate;
    tracker->last = &tracker->first;
    tracker->references = 1; /* the list's */
    tracker->next = trackers;
    trackers = tracker;
    trackers_changes++;
    return tracker;
}

struct vc_tracker *vc_tracker_get(CUcontext context, struct vc_gate *gate, struct vc_tracker **spare)
{
    if (!vc_driver_can_measure())
        return NULL;
    pthread_mutex_lock(&trackers_mutex);
    struct vc_tracker *tracker = find_tracker(context);
    bool made = !tracker;
    if (made) {
        tracker = make_tracker(*spare, context, gate);
        *spare = NULL;
    }
    vc_add(&tracker->references, 1);
    pthread_mutex_unlock(&trackers_mutex);
    if (made)
        vc_bell_expect(0); /* for spare marks */
    return tracker;
}

struct vc_tracker *vc_tracker_find(CUcontext context)
{
    pthread_mutex_lock(&trackers_mutex);
    struct vc_tracker *tracker = find_tracker(context);
    if (tracker)
        vc_add(&tracker->references, 1);
    pthread_mutex_unlock(&trackers_mutex);
    return tracker;
}

void vc_tracker_release(struct vc_tracker *tracker)
{
    if (!tracker || vc_sub(&tracker->references, 1) != 0)
        return;
    /* Its events went with the context, or will: it is only ever taken from the list when the context goes. */
    pthread_mutex_destroy(&tracker->mutex);
    pthread_cond_destroy(&tracker->changed);
    free(tracker);
}

uint64_t vc_trackers_round(uint64_t (*look)(struct vc_tracker *))
{
    uint64_t next = UINT64_MAX;
    pthread_mutex_lock(&trackers_mutex);
    uint64_t list = trackers_changes;
    for (struct vc_tracker *tracker = trackers; tracker; tracker = tracker->next) {
        if (tracker->suspended != 0)
            continue;
        in_use = tracker;
        pthread_mutex_unlock(&trackers_mutex);
        uint64_t wanted = look(tracker);
        next = wanted < next ? wanted : next;
        pthread_mutex_lock(&tracker->mutex);
        tracker->looks++;
        pthread_cond_broadcast(&tracker->changed);
        pthread_mutex_unlock(&tracker->mutex);
        pthread_mutex_lock(&trackers_mutex);
        in_use = NULL;
        pthread_cond_broadcast(&trackers_idle);
        if (list != trackers_changes) { /* this one may be out of the list by now */
            next = 0;
            break;
        }
    }
    pthread_mutex_unlock(&trackers_mutex);
    return next;
}

/* Once for each tracker there is; other threads' trackers may come and go meanwhile. */
void vc_trackers_each(void (*call)(struct vc_tracker *, CUstream), CUstream stream)
{
    static uint64_t rounds;
    pthread_mutex_lock(&trackers_mutex);
    uint64_t round = ++rounds;
    for (struct vc_tracker *tracker = trackers; tracker;) {
        if (tracker->round >= round || tracker->suspended != 0) {
            tracker = tracker->next;
            continue;
        }
        tracker->round = round;
        vc_add(&tracker->references, 1);
        pthread_mutex_unlock(&trackers_mutex);
        call(tracker, stream);
        vc_tracker_release(tracker);
        pthread_mutex_lock(&trackers_mutex);
        tracker = trackers;
    }
    pthread_mutex_unlock(&trackers_mutex);
}

void vc_tracker_keep_away(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&trackers_mutex);
    tracker->suspended++;
    while (in_use == tracker) /* the helper only makes calls that return at once */
        pthread_cond_wait(&trackers_idle, &trackers_mutex);
    pthread_mutex_unlock(&trackers_mutex);
}

void vc_tracker_lives_on(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&trackers_mutex);
    tracker->suspended--;
    pthread_mutex_unlock(&trackers_mutex);
}

bool vc_tracker_take_out(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&trackers_mutex);
    for (struct vc_tracker **link = &trackers; *link; link = &(*link)->next)
        if (*link == tracker) {
            *link = tracker->next;
            trackers_changes++;
            pthread_mutex_unlock(&trackers_mutex);
            return true;
        }
    pthread_mutex_unlock(&trackers_mutex);
    return false;
}

void vc_trackers_forked(void)
{
    pthread_mutex_init(&trackers_mutex, NULL);
    pthread_cond_init(&trackers_idle, NULL);
    trackers = NULL; /* the parent's; its memory here is left alone */
    in_use = NULL;
}
