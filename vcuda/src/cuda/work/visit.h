/* What is known of streams' handles in this process, and touching streams other than that of the call one is in.
 *
 * A visitor (a thread that marks its other streams before it sleeps, or the helper) makes calls that return at once. Whoever destroys a stream or
 * begins a capture keeps visitors out for that long.
 */
#ifndef VC_VISIT_H
#define VC_VISIT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/atomic.h"

enum { VC_EPOCH_SHIFT = 32 };

/* Epoch above, which changes when handles may have changed their meaning; below it how many captures are known to be under way. */
extern uint64_t vc__work_state __attribute__((visibility("hidden")));

static inline uint32_t vc_visit_epoch(void)
{
    return (uint32_t)(vc_load_acquire(&vc__work_state) >> VC_EPOCH_SHIFT);
}

static inline bool vc_visit_captures(void)
{
    return (uint32_t)vc_load_relaxed(&vc__work_state) != 0; /* even a known launch asks the driver then */
}

/* So many more captures are known to be under way, or fewer. */
void vc_visit_change_captures(int change);

/* True: visit, and say when it is over. */
bool vc_visit_begin(void);
/* … while streams are being destroyed, too: of the one that is visited it is known, from then on, that it is not. */
bool vc_visit_begin_living(void);
void vc_visit_end(void);

/* Nobody visits between these two. The first waits for visitors, 50 ms at most: one may have been cancelled meanwhile. */
void vc_visit_forbid(void);
void vc_visit_allow(void);
/* … nor of living streams: a capture begins. */
void vc_visit_forbid_all(void);
void vc_visit_allow_all(void);

/* In a forked child: the threads that were counted are the parent's. */
void vc_visits_forked(void);

#endif
