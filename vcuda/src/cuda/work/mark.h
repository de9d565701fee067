/* Marks: events beside the tenant's work, and the intervals between them that are under way.
 *
 * Application threads record marks inside their own calls. The helper, whom no capture concerns, keeps spare events; a thread that
 * finds none makes one itself.
 */
#ifndef VC_MARK_H
#define VC_MARK_H

#include "cuda/work/tracker.h"

/* Whether a mark could be recorded without making an event or waiting for the helper, as it seems. */
bool vc_mark_is_spare(struct vc_tracker *tracker);
/* Record a mark in `stream` (never NULL: an explicit handle) of the current context. Where no event is spare, and the driver
 * makes none, it waits for the helper for some ms. NULL if it can't be done. The caller owns a reference. */
struct vc_mark *vc_mark_record(struct vc_tracker *tracker, CUstream stream);
/* The first operation behind it is handed to the driver now, and was. The work can't begin before that; what the driver
 * took for it is the application's time too, VC_LAUNCH_GAP_NS at most: it may have been interrupted behind the start. */
void vc_mark_launching(struct vc_mark *mark);
void vc_mark_launched(struct vc_mark *mark);
void vc_mark_release(struct vc_mark *mark);
/* One more spare mark; false if the driver refuses. Pre: the tracker's context is current. */
bool vc_mark_make(struct vc_tracker *tracker);

/* Have the helper look out for `to` and settle the interval from `from` (NULL: none was measured) when it is reached. */
void vc_mark_submit(struct vc_mark *from, struct vc_mark *to, CUstream stream, const struct vc_lane_step *step);

/* No mark could be recorded behind it: its stream is asked, and until that says that it is done all of the time is charged. */
void vc_mark_missing(struct vc_tracker *tracker, const struct vc_mark *from, CUstream stream, const struct vc_lane_step *step);

/* The helper's: take the entry that `*link` points to out of the queue. */
void vc_mark_unlink(struct vc_tracker *tracker, struct vc_under_way **link);

/* Let the helper go through the queue once more, from its beginning. */
void vc_marks_look(struct vc_tracker *tracker);
/* The context is gone with all its events: what the helper did not see end had the card until now. */
void vc_marks_gone(struct vc_tracker *tracker);

/* vc_helper_stand_in, which the helper sets before there is any tracker. */
extern bool (*vc_stand_in)(uint64_t *next_ns) __attribute__((visibility("hidden")));

#endif
