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

void vc_tracker_hosts(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t left_stamp)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    struct vc_left_stream *left = vc_left_place(tracker, stream);
    bool left_there = left && left->stream, others = !lane || (left_there && (left->of_several || left->stamp != left_stamp));
    if (others && !hosted)
        hosted = make_hosted(tracker, stream);
    if (hosted && (others || hosted->launcher != lane)) {
        hosted->number = tracker->hosts + 1;
        vc_store_relaxed(&tracker->hosted_until_ns, vc_now_ns() + HOSTED_NS);
        hosted->until_ns = tracker->hosted_until_ns;
        vc_store_relaxed(&tracker->hosts, hosted->number);
    }
    pthread_mutex_unlock(&tracker->mutex);
    if (others && left_there)
        vc_tracker_mark_left_on(tracker, stream);
}

bool vc_tracker_is_hosted(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t *known, bool *since)
{
    uint64_t now = vc_now_ns(), before = *known;
    *since = false;
    if (VC_LIKELY(vc_load_relaxed(&tracker->hosts) == before && now > vc_load_relaxed(&tracker->hosted_until_ns)))
        return false;
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    *since = (hosted ? hosted->number : tracker->hosts_forgotten) > before;
    *known = tracker->hosts;
    bool lately = hosted && now <= hosted->until_ns;
    if (hosted)
        hosted->launcher = lane;
    pthread_mutex_unlock(&tracker->mutex);
    return *since || lately;
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
