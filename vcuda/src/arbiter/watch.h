/* Who listens to the tenants that rest, so that they cost nothing: threads that sleep until one of them rings.
 *
 * The arbiter's own thread wakes up often, for heartbeats and leases, and every bell that it listens to costs it something each
 * time. A watch takes up to 127 bells from it and wakes it when one rings.
 */
#ifndef VC_ARBITER_WATCH_H
#define VC_ARBITER_WATCH_H

#include <pthread.h>

#include "arbiter/bells.h"

enum { VC_WATCHES = 8 };

/* What the threads of an arbiter share. */
struct vc_crew {
    pthread_mutex_t mutex; /* guards the members and what is noted in them; held while deciding, never while sleeping */
    struct vc_member **members;
    unsigned member_count;
    uint32_t changed_futex; /* the arbiter's thread sleeps on it beside its bells */
    uint32_t stopping;
    uint32_t deaf; /* futex_waitv can't be used: everyone is looked at */
};

struct vc_watch {
    struct vc_crew *crew;
    pthread_t thread;
    uint32_t changed_futex; /* the watch sleeps on it beside its bells */
    unsigned assigned;      /* bells; guarded by the crew's mutex */
    bool running;
    struct vc_bells bells; /* of the watch's thread */
};

/* Wake a thread that sleeps on `word`. */
void vc_crew_ring(uint32_t *word);

/* Have each member that the arbiter's thread does not listen to, and that can be heard, listened to by a watch; let go of the
 * others. Starts watches as they are needed; whoever finds no place must be looked at. Pre: the mutex is held. */
void vc_watch_assign(struct vc_crew *crew, struct vc_watch *watches);
/* The member goes. Pre: the mutex is held. */
void vc_watch_release(struct vc_member *member);
/* End the threads. Pre: crew->stopping is set, the mutex is not held. */
void vc_watch_stop(struct vc_watch *watches);
/* Processor time of all of them, ns. */
uint64_t vc_watch_cpu_ns(const struct vc_watch *watches);

#endif
