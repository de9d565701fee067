/* The helper thread of a process: sees marks being reached, settles what was charged, and makes spare events. */
#ifndef VC_HELPER_H
#define VC_HELPER_H

#include <stdbool.h>

/* Start it, once per process. False: there is none, so nothing may be marked. */
bool vc_helper_start(void);

/* In a forked child there is none. */
void vc_helper_forked(void);

#endif
