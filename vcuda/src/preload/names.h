/* Included before every source of the preload library: there the sources of the shims look things up by way of libc, not by
 * our own dlsym and dlopen, and the real libraries have their usual names instead of an alias. */
#ifndef VC_PRELOAD_NAMES_H
#define VC_PRELOAD_NAMES_H

#define dlsym vc_libc_dlsym
#define dlopen vc_libc_dlopen

#define VC_CUDA_ALIAS vc_preload_cuda
#define VC_NVML_ALIAS vc_preload_nvml

/* Paths or names by which the real libraries are loaded already. */
extern char vc_preload_cuda[];
extern char vc_preload_nvml[];

#include "vc_glibc.h"

#endif
