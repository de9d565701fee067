/* Each shim's half of preload.h; apart, because their tables use the same macros. */
#ifndef VC_PRELOAD_REALS_H
#define VC_PRELOAD_REALS_H

#include <stdbool.h>

bool vc_preload_cuda_has(const char *name);
bool vc_preload_nvml_has(const char *name);
void vc_preload_cuda_load(void);
void vc_preload_nvml_load(void);

#endif
