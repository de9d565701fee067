/* Whether the helper was stopped while it slept, by a signal or whatever else: what its process has on the card then, nobody looks at. */
#ifndef VC_STOPS_H
#define VC_STOPS_H

#include <stdbool.h>
#include <stdint.h>

/* The helper's: it was started. */
void vc_stops_started(void);
/* The helper's: it goes to sleep now. */
void vc_stops_sleeps(void);

/* What a late helper tells. A busy machine explains it, and so does a virtual one that its host did not run, as far as hosts do that; a stop neither. */
struct vc_stop {
    bool stopped; /* it was, for longer than a millisecond */
    bool held;    /* it was late, or was before, for longer than anything explains: when to look others may have chosen */
};

/* The helper's: it is awake now, so long after it should have been. */
struct vc_stop vc_stops_woke(uint64_t now_ns, uint64_t late_ns);

#endif
