/* NVML hooks and the real library's functions, expanded from hooks.def. */
#ifndef VC_NVML_HOOKS_H
#define VC_NVML_HOOKS_H

#include "base/atomic.h"
#include "vc_nvml.h"
#include "region/regions.h"

#define VC_EXPORT __attribute__((visibility("default")))

/* No setter has more than six parameters, all integers or pointers: they travel in registers whatever their number. */
#define VC_SETTER_PARAMETERS (long a, long b, long c, long d, long e, long f)
#define VC_SETTER_ARGUMENTS (a, b, c, d, e, f)

/* The real functions. NULL: this driver has no such function. */
struct vc_nvml_real {
    uint32_t ready;
#define VC_HOOK(name, parameters, arguments) nvmlReturn_t(*name) parameters;
#define VC_REAL(name, parameters) nvmlReturn_t(*name) parameters;
#define VC_SETTER(name) nvmlReturn_t(*name) VC_SETTER_PARAMETERS;
#include "hooks.def"
#undef VC_HOOK
#undef VC_REAL
#undef VC_SETTER
};
extern struct vc_nvml_real vc_nvml_real;

/* Look all of them up, once; afterwards vc_nvml_real.ready is set. Any thread. */
void vc_nvml_load(void);

/* Whether this return address lies in the real library: it calls some of its own functions through its PLT. */
bool vc_nvml_called_by_driver(const void *return_address);

#define VC_HOOK(name, parameters, arguments) nvmlReturn_t vc_hook_##name parameters;
#define VC_REAL(name, parameters)
#define VC_SETTER(name)
#include "hooks.def"
#undef VC_HOOK
#undef VC_REAL
#undef VC_SETTER

#endif
