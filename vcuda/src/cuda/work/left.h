/* Streams on which something was launched whose end no mark may tell: they are asked. */
#ifndef VC_LEFT_H
#define VC_LEFT_H

#include "cuda/work/tracker.h"

/* Pre: the tracker is locked. The stream's place, or one that is free. */
struct vc_left_stream *vc_left_place(struct vc_tracker *tracker, CUstream stream);

/* Something was launched there, maybe without a mark: the helper asks the stream, so that it does not last for nothing; from when `begins` (if any) is
 * reached and that much work should be done. `stamp`: the lane's. False: so many are asked already. */
bool vc_tracker_left(struct vc_tracker *tracker, CUstream stream, uint64_t *stamp, struct vc_mark *begins, uint64_t work_ns);
/* All that the lane launched there has a mark behind it, or is done. */
void vc_tracker_followed(struct vc_tracker *tracker, CUstream stream, uint64_t stamp);
/* That place as it is now; its mark is the caller's, too, to be released. */
struct vc_left_stream vc_left_look(struct vc_tracker *tracker, unsigned place);
/* What was launched there last is done, or somebody looks after it: the place is free. */
void vc_left_done(struct vc_tracker *tracker, struct vc_left_stream *place, uint64_t stamp);
/* Begin a visit to the stream of that place as it was: false if it is not what it was, or may not be visited. */
bool vc_left_visit(struct vc_tracker *tracker, const struct vc_left_stream *place, uint64_t stamp);
/* The stream can't be asked any more: what is under way there is marked now, and paid for from when it began or should have been done. Pre: the tracker's
 * context is current. */
void vc_tracker_mark_left(struct vc_tracker *tracker, CUstream stream, struct vc_mark *begins);
/* … of that one, if anything is under way there, or (NULL) of all, because the context may end. */
void vc_tracker_mark_left_on(struct vc_tracker *tracker, CUstream stream);
/* … for one that is about to be destroyed, or (NULL) for all, because a capture is about to begin. */
void vc_trackers_mark_left(CUstream stream);

/* The stream was destroyed: what was launched there since it was marked is charged for as long as anything that nobody can ask about. */
void vc_left_stream_gone(struct vc_tracker *tracker, CUstream stream);
void vc_left_context_gone(struct vc_tracker *tracker);

#endif
