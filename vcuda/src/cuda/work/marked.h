/* The end of what a thread launched on one stream. */
#ifndef VC_MARKED_H
#define VC_MARKED_H

#include "cuda/work/lanes.h"

/* Have it seen, before the thread sleeps. */
void vc_marked_end(struct vc_stream_lane *lane);

/* No event could be had for it. */
void vc_marked_lost(struct vc_stream_lane *lane, const struct vc_lane_step *step);

/* All that the lane launched has a mark behind it. Who asked its stream later would be told of what was launched there since, as if that lasted so long. */
void vc_marked_followed(struct vc_stream_lane *lane);

#endif
