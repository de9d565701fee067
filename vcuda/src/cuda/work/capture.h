/* Stream capture: whether a stream captures is the driver's to say. What is remembered here only tells when to ask it at every launch.
 *
 * A stream may join a capture by waiting for an event, and newer drivers have newer ways to begin one: no list of ours is the truth.
 */
#ifndef VC_CAPTURE_H
#define VC_CAPTURE_H

#include <stdbool.h>

#include "cuda/driver/hooks.h"

/* Whether work put on the stream now is captured, not run. An answer that is an error counts as yes: the stream is left alone. */
bool vc_capture_is(CUstream stream);

/* For a visitor (visit.h): whether the stream may be asked if it is done, which ends its capture where there is one. It may while others capture, but for
 * the legacy and the per-thread stream: what begins on it or what it joins waits for the visitor. */
bool vc_capture_lets_ask(CUstream stream);

/* Which capture that is: another number for each, 0: none. Where the driver can't tell them apart, or whether there is one, it is a number
 * that is no other's, not even its own. */
uint64_t vc_capture_under_way(CUstream stream);

/* Whether one began so lately that they may come in quick succession: between them nobody can be sure to ask what was launched without a mark. */
bool vc_capture_lately(void);

/* A capture is about to begin on this stream of the current context: from the driver's first moment on nobody may touch it. */
void vc_capture_begins(CUstream stream);
/* It is over, or did not begin. */
void vc_capture_over(CUstream stream);
/* What was destroyed captures no more. */
void vc_capture_stream_gone(CUstream stream);
void vc_capture_context_gone(CUcontext context);

#endif
