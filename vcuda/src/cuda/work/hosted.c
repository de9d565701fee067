/* The latest of them, and who was told. */
#include "cuda/work/hosted.h"

#include "base/clock.h"
#include "cuda/work/left.h"

/* Pre: locked. */
static struct vc_hosted_stream *find_hosted(struct vc_tracker *tracker, CUstream stream)
{
    for (unsigned i = 0; i < VC_STREAMS_HOSTED; i++)
        if (tracker->hosted[i].stream == stream)
            return &tracker->hosted[i];
    return NULL;
}

/* For so long nothing is launched there without a mark. */
static const uint64_t HOSTED_NS = 1000000000;

/* Pre: locked. */
static struct vc_hosted_stream *make_hosted(struct vc_tracker *tracker, CUstream stream)
{
    struct vc_hosted_stream *oldest = &tracker->hosted[0];
    for (unsigned i = 1; i < VC_STREAMS_HOSTED; i++)
        if (tracker->hosted[i].number < oldest->number)
            oldest = &tracker->hosted[i];
    tracker->hosts_forgotten = vc_later(tracker->hosts_forgotten, oldest->number);
    *oldest = (struct vc_hosted_stream){.stream = stream};
    return oldest;
}

/* Pre: locked. */
static void note_hosted(struct vc_tracker *tracker, struct vc_hosted_stream *hosted)
{
    hosted->number = tracker->hosts + 1;
    vc_store_relaxed(&tracker->hosted_until_ns, vc_now_ns() + HOSTED_NS);
    hosted->until_ns = tracker->hosted_until_ns;
    vc_store_relaxed(&tracker->hosts, hosted->number);
}

void vc_tracker_hosts(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t left_stamp)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    struct vc_left_stream *left = vc_left_place(tracker, stream);
    bool left_there = left && left->stream, others = !lane || (left_there && (left->of_several || left->stamp != left_stamp));
    if (others && !hosted)
        hosted = make_hosted(tracker, stream);
    if (hosted && (others || hosted->launcher != lane))
        note_hosted(tracker, hosted);
    pthread_mutex_unlock(&tracker->mutex);
    if (others && left_there)
        vc_tracker_mark_left_on(tracker, stream);
}

void vc_tracker_holds_legacy(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, CU_STREAM_LEGACY);
    const struct vc_left_stream *left = vc_left_place(tracker, CU_STREAM_LEGACY);
    if (!hosted && left && left->stream)
        hosted = make_hosted(tracker, CU_STREAM_LEGACY);
    if (hosted) {
        note_hosted(tracker, hosted);
        hosted->held_number = hosted->number;
    }
    pthread_mutex_unlock(&tracker->mutex);
}

void vc_tracker_legacy_holds(struct vc_tracker *tracker)
{
    vc_store_relaxed(&tracker->legacy_until_ns, vc_now_ns() + HOSTED_NS);
    vc_add_relaxed(&tracker->legacy_hosts, 1);
}

bool vc_tracker_legacy_held(struct vc_tracker *tracker)
{
    uint64_t until = vc_load_relaxed(&tracker->legacy_until_ns);
    return VC_UNLIKELY(until != 0) && vc_now_ns() < until;
}

bool vc_tracker_is_hosted(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t *known, enum vc_hosting *since)
{
    uint64_t now = vc_now_ns(), before = *known;
    *since = VC_NOT_HOSTED;
    if (VC_LIKELY(vc_load_relaxed(&tracker->hosts) == before && now > vc_load_relaxed(&tracker->hosted_until_ns)))
        return false;
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    if ((hosted ? hosted->number : tracker->hosts_forgotten) > before)
        *since = hosted && hosted->held_number > before ? VC_HELD : VC_PUT_THERE;
    *known = tracker->hosts;
    bool lately = hosted && now <= hosted->until_ns;
    if (hosted)
        hosted->launcher = lane;
    pthread_mutex_unlock(&tracker->mutex);
    return *since != VC_NOT_HOSTED || lately;
}

bool vc_stream_is_hosted(struct vc_tracker *tracker, CUstream stream)
{
    pthread_mutex_lock(&tracker->mutex);
    const struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    bool lately = hosted && vc_now_ns() <= hosted->until_ns;
    pthread_mutex_unlock(&tracker->mutex);
    return lately;
}

static void stream_gone(struct vc_tracker *tracker, CUstream stream)
{
    vc_left_stream_gone(tracker, stream);
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    if (hosted)
        *hosted = (struct vc_hosted_stream){0};
    pthread_mutex_unlock(&tracker->mutex);
}

void vc_trackers_stream_gone(CUstream stream)
{
    vc_trackers_each(stream_gone, stream);
}
