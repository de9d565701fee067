/* The parts of the preload library that know the shims' own tables. */
#ifndef VC_PRELOAD_H
#define VC_PRELOAD_H

#include <stdbool.h>

/* Look the real functions up, once: libcuda's, or libnvidia-ml's. Pre: that library is loaded. */
void vc_preload_load(bool cuda);

/* Whether the real library has this hooked function. Pre: vc_preload_load of it. */
bool vc_preload_has(const char *name, bool cuda);

/* Our exported dlsym, or dlvsym. */
void *vc_preload_lookup(bool versioned);

#endif
