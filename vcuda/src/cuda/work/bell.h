/* The bell that wakes who looks after what is on its way (helper.h). */
#ifndef VC_BELL_H
#define VC_BELL_H

#include <stdbool.h>
#include <stdint.h>

/* Something will be reached at about `expected_ns`: be awake then. */
void vc_bell_expect(uint64_t expected_ns);
/* So many more marks are on their way, or fewer. */
void vc_bell_awaits(int marks);
/* The application has just waited for the card: look now, if a mark is on its way. */
void vc_bell_kick(void);
/* Whether the helper should have looked by now, and has not: it is held, or ended, or there is none. */
bool vc_bell_missed(uint64_t now_ns);
/* The helper's, before it is awake: how long ago it should have been. */
uint64_t vc_bell_late_ns(uint64_t now_ns);
/* The helper's: it was started. */
void vc_bell_started(void);
/* The helper's: it is awake from now on; returns what to pass to the sleep. */
uint32_t vc_bell_awake(void);
/* … and sleeps until then (UINT64_MAX: until it is woken), or until somebody expects it earlier. */
void vc_bell_sleep(uint64_t until_ns, uint32_t word);

/* In a forked child: nothing is on its way. */
void vc_bell_forked(void);

#endif
