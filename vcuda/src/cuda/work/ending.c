/* What is done before a context may go, and when it is gone. */
#include "cuda/work/ending.h"

#include "cuda/work/bell.h"
#include "cuda/work/left.h"
#include "cuda/work/mark.h"

struct vc_tracker *vc_tracker_suspend(CUcontext context)
{
    struct vc_tracker *tracker = vc_tracker_find(context);
    if (!tracker)
        return NULL;
    vc_tracker_mark_left_on(tracker, NULL);
    vc_marks_look(tracker);
    vc_tracker_keep_away(tracker);
    return tracker;
}

void vc_tracker_resume(struct vc_tracker *tracker, bool gone)
{
    if (!tracker)
        return;
    if (gone && vc_tracker_take_out(tracker)) {
        vc_marks_gone(tracker);
        vc_left_context_gone(tracker);
        vc_tracker_release(tracker); /* the list's */
    } else {
        if (!gone) /* what is gone stays suspended */
            vc_tracker_lives_on(tracker);
        vc_bell_expect(0);
    }
    vc_tracker_release(tracker);
}
