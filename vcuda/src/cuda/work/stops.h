/* Whether the helper was stopped while it slept, by a signal or whatever else: what its process has on the card then, nobody looks at. */
#ifndef VC_STOPS_H
#define VC_STOPS_H

#include <stdbool.h>
#include <stdint.h>

/* The helper's: it was started. */
void vc_stops_started(void);
/* The helper's: it goes to sleep now. */
void vc_stops_sleeps(void);
/* The helper's: it is awake, so long after it should have been. Whether it was stopped meanwhile: a busy machine explains a late helper, and so does a virtual one
 * that its host did not run; a stop neither. */
bool vc_stops_woke(uint64_t late_ns);

#endif
