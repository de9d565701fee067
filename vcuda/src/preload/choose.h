/* What the exported dlsym, dlvsym and dlmopen do before they jump to libc's. Called from jump.c only. */
#ifndef VC_PRELOAD_CHOOSE_H
#define VC_PRELOAD_CHOOSE_H

#define VC_JUMP ((void *)0)      /* let libc answer, as if we were not there */
#define VC_NOTHING ((void *)1)   /* the answer is NULL; dlerror says why */

/* The answer to dlsym(handle, name), or VC_JUMP, or VC_NOTHING. `version` NULL: dlsym. */
void *vc_preload_choose(void *handle, const char *name, const char *version);

/* The namespace in which dlmopen(space, file) opens: the drivers' libraries belong into the first one, with our hooks. */
long vc_preload_space(long space, const char *file);

#endif
