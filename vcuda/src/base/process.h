/* Who a process is, and whether another one is still there. */
#ifndef VC_PROCESS_H
#define VC_PROCESS_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

struct vc_identity {
    pid_t pid;              /* as this process's PID namespace counts */
    uint64_t start_ticks;   /* /proc/<pid>/stat field 22: tells a reused PID; 0 if unknown */
    uint64_t pid_namespace; /* inode of the namespace; 0 if unknown */
    char comm[16];
};

enum vc_presence {
    VC_GONE,    /* no such process, or a zombie: the kernel has closed its files, so the driver has freed its memory */
    VC_EXITING, /* at least its main thread has ended; while no other thread lives, it is closing its files */
    VC_PRESENT,
    VC_UNSEEN,  /* lives or lived in a PID namespace that we can't see into */
};

/* Fill in who we are. Never fails: what /proc does not tell stays 0. */
void vc_identify_self(struct vc_identity *self);

/* Whether the process that once identified itself so is still there, as seen by `self`. When in doubt VC_PRESENT. */
enum vc_presence vc_process_presence(const struct vc_identity *self, const struct vc_identity *other);

#endif
