/* What is not the card's work before an operation: copies over the bus, callbacks, waits, also of other threads and on the legacy stream; see behind.h. */
#include "cuda/work/behind.h"

#include "base/clock.h"
#include "cuda/work/capture.h"
#include "cuda/work/hosted.h"
#include "cuda/work/left.h"
#include "cuda/work/mark.h"
#include "cuda/work/marked.h"

/* As far as one may ask. */
static bool is_done(CUstream stream)
{
    bool done = false;
    if (vc_real.cuStreamQuery && vc_visit_begin()) {
        done = !vc_visit_captures() && vc_real.cuStreamQuery(stream) == CUDA_SUCCESS;
        vc_visit_end();
    }
    return done;
}

/* … and it for the legacy one: a blocking one. */
static bool legacy_waits_for(CUstream stream)
{
    enum { NON_BLOCKING = 1 };
    unsigned int flags = NON_BLOCKING;
    bool known = stream != CU_STREAM_LEGACY && vc_real.cuStreamGetFlags && vc_real.cuStreamGetFlags(stream, &flags) == CUDA_SUCCESS;
    return known && !(flags & NON_BLOCKING);
}

void vc_behind_note(struct vc_stream_lane *lane)
{
    struct vc_mark *open = lane->open;
    if (!open)
        return;
    bool held = vc_tracker_legacy_held(lane->tracker) && legacy_waits_for(lane->stream);
    open->behind = lane->lane.behind || held;
    if (!lane->lane.behind || (lane->past && held))
        return;
    struct vc_mark **mark = lane->past ? &open->past : &lane->past;
    *mark = lane->past ? lane->past : open;
    vc_add(&(*mark)->references, 1);
}

/* As far as one may ask. */
static bool is_past(const struct vc_stream_lane *lane)
{
    bool past = false;
    if (lane->past && vc_visit_begin()) {
        past = !vc_visit_captures() && vc_real.cuEventQuery(lane->past->event) == CUDA_SUCCESS;
        vc_visit_end();
    }
    return past;
}

void vc_behind_look(struct vc_stream_lane *lane)
{
    bool held = lane->stream == CU_STREAM_LEGACY && lane->lane.mark_all; /* it may be idle, and wait for others before what comes next begins */
    bool seen = lane->open && vc_load_acquire(&lane->open->seen);
    bool done = seen || is_past(lane) || (!held && is_done(lane->stream) && !(lane->behind_legacy && !is_done(CU_STREAM_LEGACY)));
    if (!done && !lane->open && !lane->elsewhere && lane->tracker)
        vc_tracker_mark_left_on(lane->tracker, lane->stream);
    if (lane->lane.finish_ns <= vc_now_ns())
        vc_marked_end(lane);
    lane->behind_legacy = !done && lane->behind_legacy;
    lane->lane.behind = !done;
}

/* What comes next on its stream is not the card's work. `put`: another thread has put it there, and had marked what was left before. */
static void end_before_elsewhere(struct vc_stream_lane *lane, bool put)
{
    struct vc_lane_step step;
    struct vc_mark *end = NULL;
    bool idle = put || (lane->lane.finish_ns + lane->lane.used_ns <= vc_now_ns() && is_done(lane->stream));
    bool marks = !idle && vc_lane_has_unmarked(&lane->lane);
    if (marks)
        end = vc_mark_record(lane->tracker, lane->stream);
    if (marks && !end) /* it is part of the interval */
        return;
    struct vc_mark *begins = end ? end : vc_lane_all_marked(&lane->lane) && !lane->open->after ? lane->open : NULL;
    if (begins && !lane->before) {
        vc_add(&begins->references, 1);
        lane->before = begins;
    }
    if (!lane->elsewhere)
        lane->elsewhere = vc_estimate_find(vc_estimate_key(VC_WORK_ELSEWHERE, (uintptr_t)lane->stream, 0));
    uint64_t takes = vc_estimate_cost(lane->elsewhere);
    lane->lane.elsewhere_ns = takes <= VC_ELSEWHERE_NS ? takes : 0;
    if (vc_lane_elsewhere(&lane->lane, idle, &step))
        vc_mark_submit(step.interval.loose ? NULL : lane->open, end, lane->stream, &step);
    if (!put)
        vc_tracker_followed(lane->tracker, lane->stream, lane->left_stamp);
    vc_mark_release(end);
    vc_mark_release(lane->open);
    vc_mark_release(lane->past);
    lane->open = lane->past = NULL;
}

bool vc_behind_is_hosted(struct vc_stream_lane *lane)
{
    enum vc_hosting since;
    if (!lane->tracker || !vc_tracker_is_hosted(lane->tracker, lane->stream, lane, &lane->hosted, &since))
        return false;
    if (since != VC_NOT_HOSTED)
        end_before_elsewhere(lane, since == VC_PUT_THERE);
    return true;
}

void vc_behind_look_legacy(struct vc_stream_lane *lane)
{
    uint64_t hosts = lane->tracker ? vc_load_relaxed(&lane->tracker->legacy_hosts) : 0;
    if (VC_LIKELY(hosts == lane->legacy_hosts))
        return;
    lane->legacy_hosts = hosts;
    if (!legacy_waits_for(lane->stream))
        return;
    end_before_elsewhere(lane, false);
    lane->behind_legacy = lane->lane.behind;
}

static void end_before_legacy(struct vc_stream_lane *lane)
{
    if (!vc_capture_is(lane->stream))
        vc_behind_look_legacy(lane);
}

static void tell(struct vc_tracker *tracker, CUstream stream, const struct vc_stream_lane *lane)
{
    if (stream != CU_STREAM_PER_THREAD) /* what is there is always marked */
        vc_tracker_hosts(tracker, stream, lane, lane ? lane->left_stamp : 0);
    if (stream == CU_STREAM_LEGACY) {
        vc_tracker_legacy_holds(tracker);
        vc_lanes_each(tracker->context, end_before_legacy); /* what was launched there before waits for nothing */
    } else if (legacy_waits_for(stream)) {
        vc_tracker_holds_legacy(tracker);
    }
}

/* What other threads launched on the stream, or on the legacy one that waits for it, they can't tell from what this one puts there, unless they are told. */
static void tell_launchers(CUstream stream, const struct vc_stream_lane *lane)
{
    if (lane) {
        if (lane->tracker)
            tell(lane->tracker, stream, lane);
        return;
    }
    CUcontext context = NULL;
    int card = vc_stream_of_context(stream) ? vc_card_of_current(&context) : vc_card_of_stream(stream, &context);
    struct vc_tracker *tracker = card >= 0 ? vc_tracker_find(context) : NULL;
    if (tracker)
        tell(tracker, stream, NULL);
    vc_tracker_release(tracker);
}

void vc_behind_put(CUstream stream)
{
    struct vc_stream_lane *lane = vc_lane_of_stream_known(stream);
    tell_launchers(stream, lane);
    if (!lane || !lane->tracker)
        return;
    bool entered = vc_context_enter(lane->context);
    end_before_elsewhere(lane, false);
    vc_context_leave(entered);
}
