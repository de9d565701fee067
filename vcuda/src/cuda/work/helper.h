/* The helper thread of a process: sees marks being reached, settles what was charged, and makes spare events. Where it does not (no thread may be
 * started, or somebody ends or holds it), the threads at the gate do in its place. */
#ifndef VC_HELPER_H
#define VC_HELPER_H

#include <stdbool.h>
#include <stdint.h>

/* Start it, once per process. */
void vc_helper_start(void);

/* If it should have looked by now and has not, do so in the calling thread; `*next_ns`: when to look again. */
bool vc_helper_stand_in(uint64_t *next_ns);

/* In a forked child there is none. */
void vc_helper_forked(void);

#endif
