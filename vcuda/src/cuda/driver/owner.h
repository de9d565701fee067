/* Which context the memory of a context belongs to: itself, or the primary one for a context made of a green one. */
#ifndef VC_OWNER_H
#define VC_OWNER_H

#include "cuda/driver/hooks.h"

/* Memory that is allocated in `context` dies with `owner`. Without host memory nothing is recorded. */
void vc_owner_set(CUcontext context, CUcontext owner);

/* The context that memory dies with which is allocated in this one. */
CUcontext vc_context_owner(CUcontext context);

/* A context is gone: handles that were its own, or made of it, may come back for others. */
void vc_owner_ended(CUcontext owner);

#endif
