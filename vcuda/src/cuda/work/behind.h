/* What a thread launches behind something that is not the card's work: nobody knows when it begins until that is done (vc_work_elsewhere). */
#ifndef VC_BEHIND_H
#define VC_BEHIND_H

#include "cuda/work/lanes.h"

/* Such a thing is about to be put on that stream (explicit). */
void vc_behind_put(CUstream stream);

/* Whether the mark just recorded lies behind such a thing, and which mark tells that this is done. */
void vc_behind_note(struct vc_stream_lane *lane);

/* Whether it is still so that nobody can tell when what was launched begins; if it is, the end of what should have been done by now is marked: the card
 * may be idle until the next operation. What other lanes left there lasts no longer than until a new one begins. */
void vc_behind_look(struct vc_stream_lane *lane);

/* Whether another thread puts such things there, or where this stream waits for them: then all is marked that this one launches, since nobody knows what lies between. */
bool vc_behind_is_hosted(struct vc_stream_lane *lane);

/* Something of the kind was put on the legacy stream since: what this one launches waits for it, if its stream is a blocking one. Its mark is behind it, too. */
void vc_behind_look_legacy(struct vc_stream_lane *lane);

#endif
