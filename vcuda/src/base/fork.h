/* What a forked child has to forget, in one list that the linker makes. */
#ifndef VC_FORK_H
#define VC_FORK_H

#include <stddef.h>

typedef void (*vc_fork_reset)(void);

/* Have `function` run in a forked child before it uses its region: it forgets what belongs to the parent (memory that is not the
 * child's, locks that a thread of the parent held). It must not look for the region. Nothing registers at run time, so nothing can
 * be registered too late or once too often. */
#define VC_AT_FORK(function) \
    static const vc_fork_reset vc__at_fork_##function __attribute__((used, section("vc_at_fork"))) = function

/* Run all of them. */
void vc_fork_forget(void);

#endif
