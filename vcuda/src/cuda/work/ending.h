/* The end of a context: what has ended is settled before, and its tracker goes with it. */
#ifndef VC_ENDING_H
#define VC_ENDING_H

#include "cuda/work/tracker.h"

/* The context may be about to be destroyed: what has ended is settled first; after this returns the helper does not touch it. NULL:
 * nothing is tracked. */
struct vc_tracker *vc_tracker_suspend(CUcontext context);
/* It is gone, with all its events, or it lives on. */
void vc_tracker_resume(struct vc_tracker *tracker, bool gone);

#endif
