/* Hooks and the driver's own functions, expanded from hooks.def. */
#ifndef VC_HOOKS_H
#define VC_HOOKS_H

#include "base/atomic.h"
#include "region/regions.h"
#include "vc_cuda.h"

#define VC_EXPORT __attribute__((visibility("default")))

/* The driver's functions. NULL: this driver has no such function; a hook's own original is never NULL inside it. */
struct vc_real {
    uint32_t ready;
#define VC_HOOK(name, parameters, arguments) CUresult(*name) parameters;
#define VC_REAL(name, parameters) CUresult(*name) parameters;
#include "hooks.def"
#undef VC_HOOK
#undef VC_REAL
};
extern struct vc_real vc_real __attribute__((visibility("hidden")));

/* Look all of them up, once; afterwards vc_real.ready is set even if there is no driver at all. Any thread. */
void vc_real_load(void);

/* What each owner implements. They run only in a process that has a share (vc_regions.any), and
 * never change what the driver would have answered except as the share demands. */
#define VC_HOOK(name, parameters, arguments) CUresult vc_hook_##name parameters;
#define VC_REAL(name, parameters)
#include "hooks.def"
#undef VC_HOOK
#undef VC_REAL

/* Our exported function for one of the driver's functions, or NULL if we don't hook it. Pre: vc_real is loaded. */
void *vc_hook_for(const void *real);

/* Whether we hook some version of this entry point; `base` without _v2, _ptsz, … */
int vc_hooks_base_name(const char *base, size_t length);

#endif
