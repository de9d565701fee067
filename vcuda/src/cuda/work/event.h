/* Marks: events beside the tenant's work, and the helper thread that sees when they are reached.
 *
 * Application threads record marks inside their own launch calls; only the helper queries them, with its capture mode
 * RELAXED. One tracker per CUDA context holds its marks, its clock (a base event on a stream of our own) and what is
 * on its way. Its mutex is never held across a call of the driver.
 */
#ifndef VC_EVENT_H
#define VC_EVENT_H

#include "gate/lane.h"
#include "cuda/driver/hooks.h"

struct vc_tracker;
struct vc_mark;

/* The tracker of a context, made at its first use; starts the helper. NULL without the driver's event functions or
 * without memory: then there are no marks, and estimates are all there is. The caller holds a reference. */
struct vc_tracker *vc_tracker_get(CUcontext context, struct vc_gate *gate);
void vc_tracker_release(struct vc_tracker *tracker);

/* Record a mark in `stream` (never NULL: an explicit handle) of the current context. `may_create`: no capture is under
 * way anywhere, so a new event may be made if none is left. NULL if it can't be done. The caller owns a reference. */
struct vc_mark *vc_mark_record(struct vc_tracker *tracker, CUstream stream, bool may_create, bool from_idle);
/* The operation behind it was handed to the driver. On an idle card the work begins about then, not at the mark: the time in
 * between was the application's thread in the driver, and is not charged (VC_LAUNCH_GAP_NS at most: it may have been interrupted). */
void vc_mark_launched(struct vc_mark *mark);
void vc_mark_release(struct vc_mark *mark);

/* Have the helper look out for `to` and settle the interval from `from` (NULL: none was measured) when it is reached. */
void vc_mark_submit(struct vc_mark *from, struct vc_mark *to, CUstream stream, const struct vc_lane_step *step);

/* The application has just waited for the card: look now. */
void vc_event_kick(void);

/* The context may be about to be destroyed: after this returns the helper does not touch it. NULL: nothing is tracked. */
struct vc_tracker *vc_event_context_suspend(CUcontext context);
/* It is gone, with all its events, or it lives on. */
void vc_event_context_resume(struct vc_tracker *tracker, bool gone);

/* In a forked child: nothing of the parent's exists any more. */
void vc_event_forked(void);

#endif
