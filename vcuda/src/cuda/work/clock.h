/* The clock of a context: when, in CLOCK_MONOTONIC, its marks were reached. The helper's alone. */
#ifndef VC_WORK_CLOCK_H
#define VC_WORK_CLOCK_H

#include "cuda/work/tracker.h"

/* Whether the card has come to that event, or somebody has made it none. */
bool vc_clock_reached(CUevent event);

/* Have a base that was reached, renewed in time. False: not yet. Pre: the tracker's context is current. */
bool vc_clock_is_there(struct vc_tracker *tracker);

/* When that was reached; 0: not known. */
uint64_t vc_clock_when(struct vc_tracker *tracker, const struct vc_mark *mark, uint64_t now_ns);
/* By how much earlier than it was that may be. */
uint64_t vc_clock_uncertain_ns(const struct vc_tracker *tracker);
/* Whether that is more than what is known better now: what was placed by it before lies elsewhere. */
bool vc_clock_moved(uint64_t before_ns, uint64_t after_ns);

/* How long before `to` the card reached `from`, whatever was learnt meanwhile of where its clock stands; 0: not known. */
uint64_t vc_clock_between_ns(const struct vc_mark *from, const struct vc_mark *to);

#endif
