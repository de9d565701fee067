/* The end of what a lane launched: marked, or no event could be had for it; see marked.h. */
#include "cuda/work/marked.h"

#include "base/clock.h"
#include "cuda/work/capture.h"
#include "cuda/work/left.h"
#include "cuda/work/mark.h"

void vc_marked_lost(struct vc_stream_lane *lane, const struct vc_lane_step *step)
{
    struct vc_interval lost = step->interval;
    if (lane->tracker && vc_real.cuStreamQuery) {
        vc_mark_missing(lane->tracker, lane->open, lane->stream, step);
        vc_lane_opened(&lane->lane, false);
        return;
    }
    lost.measurable = false;
    vc_gate_seen(lane->lane.gate, vc_now_ns(), &lost);
    vc_lane_opened(&lane->lane, false);
}

void vc_marked_followed(struct vc_stream_lane *lane)
{
    if (lane->left_stamp == 0 || vc_stream_of_context(lane->stream))
        return;
    vc_tracker_followed(lane->tracker, lane->stream, lane->left_stamp);
    lane->left_stamp = 0;
}

void vc_marked_end(struct vc_stream_lane *lane)
{
    struct vc_lane_step step;
    if (!lane->open || !lane->lane.open || !vc_mark_is_spare(lane->tracker) || vc_capture_is(lane->stream) ||
        !vc_lane_pause(&lane->lane, &step))
        return;
    struct vc_mark *end = vc_mark_record(lane->tracker, lane->stream);
    if (end) {
        vc_mark_submit(lane->open, end, lane->stream, &step);
        vc_marked_followed(lane);
    } else {
        vc_marked_lost(lane, &step);
    }
    vc_mark_release(end);
    vc_mark_release(lane->open);
    lane->open = NULL;
}
