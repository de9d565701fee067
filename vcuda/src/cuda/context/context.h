/* Primary contexts, as green contexts need them. */
#ifndef VC_CONTEXT_H
#define VC_CONTEXT_H

#include "cuda/driver/hooks.h"

/* Something that keeps the device's primary context; `argument` is its own. `undo` takes back what `call` did. */
struct vc_keeper {
    CUresult (*call)(void *argument, CUcontext *context);
    void (*undo)(void *argument, CUdevice device);
    void *argument;
};

/* Call it, and charge the primary context if it came into being with it; over the limit it is undone and refused. */
CUresult vc_primary_keep(CUdevice device, const struct vc_keeper *keeper, CUcontext *context);

/* One that kept it has let go: if the context is gone, so is what it held. Returns whether it is. */
bool vc_primary_ended(CUdevice device);

#endif
