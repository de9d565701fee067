/* The list of resets lies in a section of its own, whose ends the linker names. */
#include "base/fork.h"

/* Weak: a library may have no reset at all. */
extern const vc_fork_reset __start_vc_at_fork[] __attribute__((weak, visibility("hidden")));
extern const vc_fork_reset __stop_vc_at_fork[] __attribute__((weak, visibility("hidden")));

void vc_fork_forget(void)
{
    for (const vc_fork_reset *reset = __start_vc_at_fork; reset < __stop_vc_at_fork; reset++)
        (*reset)();
}
