/* Memory that something else than a mapping keeps: multicast objects and sparse arrays. */
#ifndef VC_BINDING_H
#define VC_BINDING_H

#include "cuda/driver/hooks.h"

/* A multicast object or an array is gone, and with it what it kept. */
void vc_bindings_end(const void *holder);

/* Drop what sparse arrays have let go of and the card has got round to. Returns whether anything was. */
bool vc_bindings_settle(void);

/* A context is gone, and with it all work that was still to be done in it. */
void vc_bindings_context_ended(CUcontext context);

#endif
