/* Calls of our own that a capture, of this thread or another, would forbid, or that would spoil it. */
#ifndef VC_CAPTURE_MODE_H
#define VC_CAPTURE_MODE_H

#include "cuda/driver/hooks.h"

/* What to give `vc_capture_restore`. */
static inline int vc_capture_relax(void)
{
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (vc_real.cuThreadExchangeStreamCaptureMode)
        vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    return mode;
}

static inline void vc_capture_restore(int mode)
{
    if (vc_real.cuThreadExchangeStreamCaptureMode)
        vc_real.cuThreadExchangeStreamCaptureMode(&mode);
}

#endif
