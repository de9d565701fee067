/* Asks the card whether it still has what a stopped process of the container left there (gate/probe.h). */
#ifndef VC_WORK_PROBE_H
#define VC_WORK_PROBE_H

#include "cuda/work/tracker.h"

/* The helper's, with the tracker's context current. Returns when to look again; UINT64_MAX: not by itself. */
uint64_t vc_probe_look(struct vc_tracker *tracker);

#endif
