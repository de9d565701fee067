/* libc's own dlsym and its like, found in libc's symbol table: our exports of the same names hide them from every other way. */
#ifndef VC_PRELOAD_LIBC_H
#define VC_PRELOAD_LIBC_H

struct vc_libc {
    void *(*sym)(void *handle, const char *name);
    void *(*vsym)(void *handle, const char *name, const char *version);
    void *(*open)(const char *file, int flags);
    void *(*mopen)(long space, const char *file, int flags);
};

/* Their addresses; before vc_libc_find, and where libc has none (not glibc), functions that find nothing. The jumps in jump.c
 * go through it. */
extern struct vc_libc vc_libc;

/* Fill vc_libc in, at the first call. Any thread, at any moment of a process's life; takes the loader's lock only. */
void vc_libc_find(void);

#endif
