/* The watches: collect the bells of those that rest, sleep, note who rang, wake the arbiter. */
#include "arbiter/watch.h"

#include <linux/futex.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"

/* Who rests rings once; more in this time is a tenant that plays with its bell, and each ring may mean reading everyone here. */
static const uint64_t WINDOW_NS = 10000000;
static const unsigned RINGS_PER_WINDOW = 5;

void vc_crew_ring(uint32_t *word)
{
    vc_add(word, 1);
    syscall(SYS_futex, word, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* Whoever rang is left out until the arbiter has read it: its bell is not as it was last read. */
static void collect(struct vc_watch *watch)
{
    struct vc_crew *crew = watch->crew;
    pthread_mutex_lock(&crew->mutex);
    vc_bells_start(&watch->bells, &watch->changed_futex);
    for (unsigned i = 0; i < crew->member_count; i++) {
        struct vc_member *member = crew->members[i];
        if (member->watch == watch)
            member->watched = vc_member_heard(member) && !member->rang && vc_bells_add(&watch->bells, member);
    }
    pthread_mutex_unlock(&crew->mutex);
}

static void note(struct vc_watch *watch, enum vc_ring ring, const struct vc_member *owner)
{
    struct vc_crew *crew = watch->crew;
    pthread_mutex_lock(&crew->mutex);
    for (unsigned i = 0; i < crew->member_count; i++) {
        struct vc_member *member = crew->members[i];
        if (member->watch != watch)
            continue;
        bool rang = member->watched && (ring == VC_RING_OWNER ? member == owner : ring != VC_RING_NONE);
        member->rang |= rang;
        member->watched = false;
    }
    if (ring == VC_RING_DEAF)
        vc_store(&crew->deaf, 1);
    pthread_mutex_unlock(&crew->mutex);
    if (ring != VC_RING_NONE)
        vc_crew_ring(&crew->changed_futex);
}

static void *run(void *argument)
{
    struct vc_watch *watch = argument;
    uint64_t window_ns = 0;
    unsigned rings = 0;
    prctl(PR_SET_NAME, "vcuda-watch");
    for (;;) {
        const struct vc_member *owner;
        collect(watch); /* reads its own word, which changes behind `stopping`: what this look misses ends the sleep */
        if (vc_load(&watch->crew->stopping))
            return NULL;
        enum vc_ring ring = vc_bells_wait(&watch->bells, UINT64_MAX, &owner);
        note(watch, ring, owner);
        uint64_t now = vc_now_ns();
        if (now - window_ns > WINDOW_NS) {
            window_ns = now;
            rings = 0;
        }
        rings += ring != VC_RING_NONE;
        /* Nobody here is noted as watched meanwhile, so all are looked at as those who can't be heard. */
        if (ring == VC_RING_DEAF || ring == VC_RING_BROKEN || rings >= RINGS_PER_WINDOW)
            vc_sleep_ns(WINDOW_NS);
    }
}

static bool start(struct vc_crew *crew, struct vc_watch *watch)
{
    sigset_t all, before;
    watch->crew = crew;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    watch->running = pthread_create(&watch->thread, NULL, run, watch) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!watch->running)
        watch->assigned = VC_BELLS_MAX; /* no threads left here: full for good, instead of a try in every round */
    return watch->running;
}

static struct vc_watch *find_place(struct vc_crew *crew, struct vc_watch *watches, unsigned bells)
{
    for (unsigned i = 0; i < VC_WATCHES; i++)
        if (watches[i].assigned + bells < VC_BELLS_MAX && (watches[i].running || start(crew, &watches[i])))
            return &watches[i];
    return NULL;
}

void vc_watch_release(struct vc_member *member)
{
    if (member->watch)
        member->watch->assigned -= member->card_count;
    member->watch = NULL;
    member->watched = false;
}

void vc_watch_assign(struct vc_crew *crew, struct vc_watch *watches)
{
    bool changed[VC_WATCHES] = {false};
    for (unsigned i = 0; i < crew->member_count; i++) {
        struct vc_member *member = crew->members[i];
        if (member->listened || vc_load(&crew->deaf)) {
            vc_watch_release(member);
            continue;
        }
        if (member->watched || member->rang || !vc_member_heard(member))
            continue;
        if (!member->watch && (member->watch = find_place(crew, watches, member->card_count)))
            member->watch->assigned += member->card_count;
        if (member->watch)
            changed[member->watch - watches] = true;
    }
    for (unsigned i = 0; i < VC_WATCHES; i++)
        if (changed[i])
            vc_crew_ring(&watches[i].changed_futex);
}

void vc_watch_stop(struct vc_watch *watches)
{
    for (unsigned i = 0; i < VC_WATCHES; i++) {
        if (!watches[i].running)
            continue;
        vc_crew_ring(&watches[i].changed_futex);
        pthread_join(watches[i].thread, NULL);
    }
}

uint64_t vc_watch_cpu_ns(const struct vc_watch *watches)
{
    uint64_t sum = 0;
    for (unsigned i = 0; i < VC_WATCHES; i++) {
        clockid_t clock;
        struct timespec spent = {0};
        if (watches[i].running && pthread_getcpuclockid(watches[i].thread, &clock) == 0)
            clock_gettime(clock, &spent);
        sum += (uint64_t)spent.tv_sec * 1000000000u + (uint64_t)spent.tv_nsec;
    }
    return sum;
}
