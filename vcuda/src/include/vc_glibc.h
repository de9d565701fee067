/* Included before every source of what is loaded into tenants and of what a wheel brings: the C library of an image, or of the
 * machine where the wheel is installed, may be older than the one we are built with.
 *
 * A library may ask for no symbol version that is younger than what an image has, or it can't be loaded there. Functions that later versions
 * of glibc moved from libdl and libpthread into libc keep their old version there, and are asked for by it (the two libraries are
 * needed by name, too: in old images they hold the functions). Functions that are younger than 2.17 are system calls here. The structures of the
 * kernel and of the C library are the same on both machines. tests/vcuda/test_shim_exports.py holds the bound. */
#ifndef VC_GLIBC_H
#define VC_GLIBC_H

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#if (defined(__x86_64__) || defined(__aarch64__)) && defined(__GLIBC__)
/* The first version that the C library had for the machine. */
#if defined(__x86_64__)
#define VC_FIRST(name, later) __asm__(".symver " #name "," #name "@" later)
#else
#define VC_FIRST(name, later) __asm__(".symver " #name "," #name "@GLIBC_2.17")
#endif
#define VC_OLD(name) VC_FIRST(name, "GLIBC_2.2.5")
#ifndef VC_PRELOAD_NAMES_H /* the preload library defines these itself, in both versions */
VC_OLD(dlopen);
VC_OLD(dlsym);
#endif
VC_OLD(dladdr);
VC_OLD(dlclose);
VC_OLD(dlerror);
VC_FIRST(pthread_condattr_setclock, "GLIBC_2.3.3");
VC_OLD(pthread_create);
VC_OLD(pthread_detach);
VC_OLD(pthread_getcpuclockid);
VC_OLD(pthread_getspecific);
VC_OLD(pthread_join);
VC_OLD(pthread_key_create);
VC_FIRST(pthread_mutex_consistent, "GLIBC_2.12");
VC_OLD(pthread_mutex_timedlock);
VC_OLD(pthread_mutex_trylock);
VC_OLD(pthread_mutexattr_destroy);
VC_OLD(pthread_mutexattr_init);
VC_OLD(pthread_mutexattr_setpshared);
VC_FIRST(pthread_mutexattr_setrobust, "GLIBC_2.12");
VC_OLD(pthread_once);
VC_OLD(pthread_setspecific);
VC_OLD(pthread_sigmask);
#undef VC_OLD
#undef VC_FIRST

static inline int vc_fstatat(int folder, const char *path, struct stat *status, int flags)
{
    return (int)syscall(SYS_newfstatat, folder, path, status, flags);
}

static inline int vc_fstat(int descriptor, struct stat *status)
{
    return (int)syscall(SYS_fstat, descriptor, status);
}

static inline int vc_memfd_create(const char *name, unsigned flags)
{
    return (int)syscall(SYS_memfd_create, name, flags);
}

static inline ssize_t vc_getrandom(void *buffer, size_t bytes, unsigned flags)
{
    return syscall(SYS_getrandom, buffer, bytes, flags);
}

#define fstatat(folder, path, status, flags) vc_fstatat(folder, path, status, flags)
#define fstat(descriptor, status) vc_fstat(descriptor, status)
#define stat(path, status) vc_fstatat(AT_FDCWD, path, status, 0)
#define lstat(path, status) vc_fstatat(AT_FDCWD, path, status, AT_SYMLINK_NOFOLLOW)
#define memfd_create(name, flags) vc_memfd_create(name, flags)
#define getrandom(buffer, bytes, flags) vc_getrandom(buffer, bytes, flags)
#endif

#endif
