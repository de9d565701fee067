/* Trackers and marks: recording them beside the application's work, and the queue that the helper works off. */
#include "cuda/work/event.h"

#include <stdlib.h>

#include "cuda/work/tracker.h"
#include "base/clock.h"

enum { MOST_UNDER_WAY = 512 };

pthread_mutex_t vc__trackers_mutex = PTHREAD_MUTEX_INITIALIZER;
pthread_cond_t vc__trackers_idle = PTHREAD_COND_INITIALIZER;
struct vc_tracker *vc__trackers;
struct vc_tracker *vc__tracker_in_use;
uint64_t vc__trackers_changes;

static bool driver_can_measure(void)
{
    return vc_real.cuEventCreate && vc_real.cuEventRecord && vc_real.cuEventQuery && vc_real.cuEventElapsedTime &&
           vc_real.cuStreamCreate && vc_real.cuCtxSetCurrent && vc_real.cuThreadExchangeStreamCaptureMode;
}

struct vc_tracker *vc_tracker_get(CUcontext context, struct vc_gate *gate)
{
    if (!driver_can_measure() || !vc__helper_start())
        return NULL;
    pthread_mutex_lock(&vc__trackers_mutex);
    struct vc_tracker *tracker = vc__trackers;
    while (tracker && tracker->context != context)
        tracker = tracker->next;
    if (!tracker) {
        tracker = calloc(1, sizeof *tracker);
        if (tracker) {
            pthread_mutex_init(&tracker->mutex, NULL);
            tracker->context = context;
            tracker->gate = gate;
            tracker->last = &tracker->first;
            tracker->references = 1; /* the list's */
            tracker->next = vc__trackers;
            vc__trackers = tracker;
            vc__trackers_changes++;
        }
    }
    if (tracker)
        vc_add(&tracker->references, 1);
    pthread_mutex_unlock(&vc__trackers_mutex);
    return tracker;
}

void vc_tracker_release(struct vc_tracker *tracker)
{
    if (!tracker || vc_sub(&tracker->references, 1) != 0)
        return;
    /* Its events went with the context, or will: it is only ever taken from the list when the context goes. */
    pthread_mutex_destroy(&tracker->mutex);
    free(tracker);
}

/* --- marks --- */

static struct vc_mark *take_spare(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_mark *mark = tracker->under_way_count < MOST_UNDER_WAY ? tracker->spare : NULL;
    if (mark)
        tracker->spare = mark->next;
    pthread_mutex_unlock(&tracker->mutex);
    return mark;
}

static void put_spare(struct vc_mark *mark)
{
    struct vc_tracker *tracker = mark->tracker;
    pthread_mutex_lock(&tracker->mutex);
    bool gone = tracker->gone;
    if (!gone) {
        mark->next = tracker->spare;
        tracker->spare = mark;
    }
    pthread_mutex_unlock(&tracker->mutex);
    if (gone)
        free(mark);
    vc_tracker_release(tracker);
}

static struct vc_mark *make_mark(void)
{
    struct vc_mark *mark = calloc(1, sizeof *mark);
    if (mark && vc_real.cuEventCreate(&mark->event, 0) != CUDA_SUCCESS) {
        free(mark);
        return NULL;
    }
    return mark;
}

struct vc_mark *vc_mark_record(struct vc_tracker *tracker, CUstream stream, bool may_create, bool from_idle)
{
    if (!tracker)
        return NULL;
    struct vc_mark *mark = take_spare(tracker);
    if (!mark && may_create)
        mark = make_mark();
    if (!mark)
        return NULL;
    vc_add(&tracker->references, 1);
    mark->tracker = tracker;
    mark->references = 1;
    mark->reached_ns = 0;
    mark->gap_ns = 0;
    mark->noticed = false;
    mark->others = vc_gate_others(tracker->gate);
    if (vc_real.cuEventRecord(mark->event, stream) != CUDA_SUCCESS) {
        vc_mark_release(mark);
        return NULL;
    }
    mark->idle_since_ns = from_idle ? vc_now_ns() : 0;
    return mark;
}

void vc_mark_launched(struct vc_mark *mark)
{
    if (!mark || mark->idle_since_ns == 0)
        return;
    uint64_t gap = vc_now_ns() - mark->idle_since_ns;
    mark->gap_ns = gap < VC_LAUNCH_GAP_NS ? gap : VC_LAUNCH_GAP_NS;
    mark->idle_since_ns = 0;
}

void vc_mark_release(struct vc_mark *mark)
{
    if (mark && vc_sub(&mark->references, 1) == 0)
        put_spare(mark);
}

void vc_mark_submit(struct vc_mark *from, struct vc_mark *to, CUstream stream, const struct vc_lane_step *step)
{
    struct vc_tracker *tracker = to->tracker;
    struct vc_under_way *entry = calloc(1, sizeof *entry);
    if (!entry) { /* nobody will see it end: as if it had been seen, uncharged */
        struct vc_interval lost = step->interval;
        lost.measurable = false;
        vc_gate_seen(tracker->gate, vc_now_ns(), &lost);
        return;
    }
    vc_add(&to->references, 1);
    if (from)
        vc_add(&from->references, 1);
    entry->from = from;
    entry->to = to;
    entry->stream = stream;
    entry->interval = step->interval;
    entry->interval.measurable = step->interval.measurable && from;
    entry->distinct = step->distinct;
    for (unsigned i = 0; i < step->distinct; i++)
        entry->learners[i] = step->learners[i];
    uint64_t now = vc_now_ns();
    uint64_t expected = vc_load_relaxed(&tracker->gate->finish_ns);
    entry->expected_ns = expected > now ? expected : now;
    pthread_mutex_lock(&tracker->mutex);
    *tracker->last = entry;
    tracker->last = &entry->next;
    tracker->under_way_count++;
    pthread_mutex_unlock(&tracker->mutex);
    vc__helper_expect(entry->expected_ns);
}

/* --- the end of a context, and of everything in a forked child --- */

static void drop_under_way(struct vc_tracker *tracker)
{
    struct vc_under_way *entry = tracker->first;
    while (entry) {
        struct vc_under_way *next = entry->next;
        struct vc_interval lost = entry->interval;
        lost.measurable = false;
        vc_gate_seen(tracker->gate, vc_now_ns(), &lost);
        vc_mark_release(entry->from);
        vc_mark_release(entry->to);
        free(entry);
        entry = next;
    }
    tracker->first = NULL;
    tracker->last = &tracker->first;
    tracker->under_way_count = 0;
}

struct vc_tracker *vc_event_context_suspend(CUcontext context)
{
    pthread_mutex_lock(&vc__trackers_mutex);
    struct vc_tracker **link = &vc__trackers;
    while (*link && (*link)->context != context)
        link = &(*link)->next;
    struct vc_tracker *tracker = *link;
    if (tracker) {
        *link = tracker->next;
        vc__trackers_changes++;
        /* The helper only makes calls that return at once. */
        while (vc__tracker_in_use == tracker)
            pthread_cond_wait(&vc__trackers_idle, &vc__trackers_mutex);
    }
    pthread_mutex_unlock(&vc__trackers_mutex);
    return tracker;
}

void vc_event_context_resume(struct vc_tracker *tracker, bool gone)
{
    if (!tracker)
        return;
    if (!gone) {
        pthread_mutex_lock(&vc__trackers_mutex);
        tracker->next = vc__trackers;
        vc__trackers = tracker;
        vc__trackers_changes++;
        pthread_mutex_unlock(&vc__trackers_mutex);
        vc__helper_expect(0);
        return;
    }
    pthread_mutex_lock(&tracker->mutex);
    tracker->gone = true;
    struct vc_mark *spare = tracker->spare;
    tracker->spare = NULL;
    pthread_mutex_unlock(&tracker->mutex);
    drop_under_way(tracker);
    while (spare) {
        struct vc_mark *next = spare->next;
        free(spare);
        spare = next;
    }
    vc_tracker_release(tracker);
}

void vc_event_forked(void)
{
    pthread_mutex_init(&vc__trackers_mutex, NULL);
    pthread_cond_init(&vc__trackers_idle, NULL);
    vc__trackers = NULL; /* the parent's; its memory here is left alone */
    vc__tracker_in_use = NULL;
    vc__helper_forked();
}
