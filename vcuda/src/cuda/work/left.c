/* Places of streams by their handles; asking and marking what is under way on them. */
#include "cuda/work/left.h"

#include "base/clock.h"
#include "cuda/driver/cards.h"
#include "cuda/work/bell.h"
#include "cuda/work/mark.h"
#include "cuda/work/visit.h"

struct vc_left_stream *vc_left_place(struct vc_tracker *tracker, CUstream stream)
{
    uint64_t first = ((uintptr_t)stream * UINT64_C(0x9e3779b97f4a7c15)) >> 57;
    struct vc_left_stream *place = NULL;
    for (unsigned i = 0; i < VC_LEFT_PLACES; i++) {
        struct vc_left_stream *left = &tracker->left[(first + i) % VC_STREAMS_LEFT];
        if (left->stream == stream && !left->gone)
            return left;
        if (!place && !left->stream)
            place = left;
    }
    return place;
}

bool vc_tracker_left(struct vc_tracker *tracker, CUstream stream, uint64_t *stamp, struct vc_mark *begins, uint64_t work_ns)
{
    if (!tracker)
        return true;
    struct vc_mark *before = NULL;
    pthread_mutex_lock(&tracker->mutex);
    struct vc_left_stream *place = vc_left_place(tracker, stream);
    if (place) {
        bool several = place->of_several || (place->stream && place->stamp != *stamp);
        before = place->begins;
        begins = several ? NULL : begins;
        if (begins)
            vc_add(&begins->references, 1);
        *stamp = ++tracker->launches;
        *place = (struct vc_left_stream){.stream = stream, .of_several = several, .stamp = *stamp, .begins = begins, .work_ns = work_ns};
        vc_gate_predicted(tracker->gate, &place->done_ns, &place->launched_ns);
    }
    pthread_mutex_unlock(&tracker->mutex);
    vc_mark_release(before);
    return place;
}

void vc_left_done(struct vc_tracker *tracker, struct vc_left_stream *place, uint64_t stamp)
{
    struct vc_mark *begins = NULL;
    pthread_mutex_lock(&tracker->mutex);
    if (place->stamp == stamp) {
        begins = place->begins;
        *place = (struct vc_left_stream){0};
    }
    pthread_mutex_unlock(&tracker->mutex);
    vc_mark_release(begins);
}

void vc_tracker_followed(struct vc_tracker *tracker, CUstream stream, uint64_t stamp)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_left_stream *place = vc_left_place(tracker, stream);
    bool own = place && place->stream && !place->of_several;
    pthread_mutex_unlock(&tracker->mutex);
    if (own)
        vc_left_done(tracker, place, stamp);
}

struct vc_left_stream vc_left_look(struct vc_tracker *tracker, unsigned place)
{
    struct vc_left_stream none = {0};
    if (!vc_load_relaxed(&tracker->left[place].stream))
        return none;
    pthread_mutex_lock(&tracker->mutex);
    struct vc_left_stream left = tracker->left[place];
    if (left.begins)
        vc_add(&left.begins->references, 1);
    pthread_mutex_unlock(&tracker->mutex);
    return left;
}

bool vc_left_visit(struct vc_tracker *tracker, const struct vc_left_stream *place, uint64_t stamp)
{
    if (!vc_visit_begin_living())
        return false;
    pthread_mutex_lock(&tracker->mutex); /* whoever destroys it has taken it out before, and waits for visits to end */
    bool lives = place->stamp == stamp && !place->gone;
    pthread_mutex_unlock(&tracker->mutex);
    if (!lives)
        vc_visit_end();
    return lives;
}

void vc_tracker_mark_left(struct vc_tracker *tracker, CUstream stream, struct vc_mark *begins)
{
    struct vc_lane_step step = {.interval = {.loose = !begins, .measurable = true, .paused = true}};
    if (!begins)
        step.interval.from_ns = vc_load_relaxed(&tracker->gate->finish_ns);
    step.interval.others_then = vc_gate_others(tracker->gate);
    step.interval.launched_ns = vc_gate_marked(tracker->gate, 0);
    struct vc_mark *end = vc_mark_record(tracker, stream);
    if (end)
        vc_mark_submit(begins, end, stream, &step);
    else
        vc_mark_missing(tracker, begins, stream, &step);
    vc_mark_release(end);
}

/* Those of one context that have work under way; what is idle is forgotten. */
static void mark_left_of(struct vc_tracker *tracker, CUstream stream)
{
    bool inside = false, entered = false;
    for (unsigned i = 0; i < VC_STREAMS_LEFT; i++) {
        struct vc_left_stream left = vc_left_look(tracker, i);
        bool asked = left.stream && !left.gone && (stream ? left.stream == stream : !vc_stream_of_context(left.stream));
        if (asked && !inside) {
            entered = vc_context_enter(tracker->context);
            inside = true;
        }
        if (asked && vc_left_visit(tracker, &tracker->left[i], left.stamp)) {
            bool may = left.stream != CU_STREAM_LEGACY || !vc_visit_captures();
            if (may && !vc_stream_captures(left.stream) && vc_real.cuStreamQuery(left.stream) == CUDA_ERROR_NOT_READY)
                vc_tracker_mark_left(tracker, left.stream, left.begins);
            if (may)
                vc_left_done(tracker, &tracker->left[i], left.stamp);
            vc_visit_end();
        }
        vc_mark_release(left.begins);
    }
    if (inside)
        vc_context_leave(entered);
}

static struct vc_left_stream *find_left(struct vc_tracker *tracker, CUstream stream, uint64_t *stamp)
{
    struct vc_left_stream *place = NULL;
    pthread_mutex_lock(&tracker->mutex);
    for (unsigned i = 0; i < VC_STREAMS_LEFT && !place; i++)
        if (tracker->left[i].stream == stream && !tracker->left[i].gone)
            place = &tracker->left[i];
    *stamp = place ? place->stamp : 0;
    pthread_mutex_unlock(&tracker->mutex);
    return place;
}

static bool left_is_busy(struct vc_tracker *tracker, const struct vc_left_stream *place, CUstream stream, uint64_t stamp)
{
    if (!vc_left_visit(tracker, place, stamp))
        return false;
    bool entered = vc_context_enter(tracker->context);
    bool busy = !vc_visit_captures() && vc_real.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
    vc_context_leave(entered);
    vc_visit_end();
    return busy;
}

/* While anything captures nobody may ask the legacy stream, and a mark on it would put others' work in order (a callback there may wait for just that work):
 * so the capture begins a little later, when it is done. What is not done long after it should have been is known to be long. */
static void follow_legacy(struct vc_tracker *tracker, CUstream legacy)
{
    uint64_t stamp, now = vc_now_ns(), until = vc_earlier(vc_load_relaxed(&tracker->gate->finish_ns), now + VC_BUCKET_NS) + VC_REST_NS;
    struct vc_left_stream *place = find_left(tracker, legacy, &stamp);
    for (; place && left_is_busy(tracker, place, legacy, stamp); now = vc_now_ns()) {
        if (now >= until) {
            pthread_mutex_lock(&tracker->mutex);
            place->overdue = place->stamp == stamp;
            pthread_mutex_unlock(&tracker->mutex);
            return;
        }
        vc_sleep_ns(VC_LOOK_NS);
    }
}

void vc_trackers_mark_left(CUstream stream)
{
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the thread may be capturing another stream */
    if (!vc_real.cuStreamQuery || !vc_driver_can_measure())
        return;
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    vc_trackers_each(mark_left_of, stream);
    if (!stream)
        vc_trackers_each(follow_legacy, CU_STREAM_LEGACY);
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
}

void vc_tracker_mark_left_on(struct vc_tracker *tracker, CUstream stream)
{
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the thread may be capturing another stream */
    if (!vc_real.cuStreamQuery)
        return;
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    mark_left_of(tracker, stream);
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
}

void vc_left_stream_gone(struct vc_tracker *tracker, CUstream stream)
{
    pthread_mutex_lock(&tracker->mutex);
    for (unsigned i = 0; i < VC_STREAMS_LEFT; i++)
        if (tracker->left[i].stream == stream)
            tracker->left[i].gone = true;
    pthread_mutex_unlock(&tracker->mutex);
}

void vc_left_context_gone(struct vc_tracker *tracker)
{
    for (unsigned i = 0; i < VC_STREAMS_LEFT; i++)
        vc_left_done(tracker, &tracker->left[i], tracker->left[i].stamp);
}
