/* Streams on which one thread launches and another puts what is not the card's work: the launcher is told. */
#ifndef VC_HOSTED_H
#define VC_HOSTED_H

#include "cuda/work/tracker.h"

/* The calling thread is about to put something on that stream which is not the card's work; `lane`: by which it launches there itself, or NULL. What others have left
 * there is marked behind, and they are told. */
void vc_tracker_hosts(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t left_stamp);
/* … on a stream for which the legacy one waits: what is launched there next begins when nobody knows. No mark is put there, which would put others' work in order. */
void vc_tracker_holds_legacy(struct vc_tracker *tracker);
/* … on the legacy stream: what is launched on blocking ones next begins when nobody knows. */
void vc_tracker_legacy_holds(struct vc_tracker *tracker);
bool vc_tracker_legacy_held(struct vc_tracker *tracker);
enum vc_hosting {
    VC_NOT_HOSTED,
    VC_PUT_THERE, /* what was left there is marked before it */
    VC_HELD,      /* … is not */
};
/* Whether another thread did so within the last second, or since `lane` last launched anything there (`*since`; `*known`: how many such things there were then, and now). */
bool vc_tracker_is_hosted(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t *known, enum vc_hosting *since);

/* Whether any thread was told so of the stream within the last second. */
bool vc_stream_is_hosted(struct vc_tracker *tracker, CUstream stream);

/* It was destroyed. */
void vc_trackers_stream_gone(CUstream stream);

#endif
