/* The set of futex words of one sleep, and the sleep. */
#include "arbiter/bells.h"

#include <errno.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/atomic.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

enum { FUTEX_IS_32_BITS = 2 };

void vc_bells_start(struct vc_bells *bells, const uint32_t *own)
{
    bells->waiters[0] = (struct vc_waiter){vc_load(own), (uintptr_t)own, FUTEX_IS_32_BITS, 0};
    bells->owners[0] = NULL;
    bells->count = 1;
}

bool vc_bells_add(struct vc_bells *bells, struct vc_member *member)
{
    if (bells->count + member->card_count > VC_BELLS_MAX)
        return false;
    for (uint32_t card = 0; card < member->card_count; card++) {
        bells->owners[bells->count] = member;
        bells->waiters[bells->count++] = (struct vc_waiter){
            member->last_ring[card], (uintptr_t)vc_member_bell(member, card), FUTEX_IS_32_BITS, 0};
    }
    return true;
}

enum vc_ring vc_bells_wait(const struct vc_bells *bells, uint64_t until_ns, const struct vc_member **owner)
{
    struct timespec deadline = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
    long woken = syscall(SYS_futex_waitv, bells->waiters, bells->count, 0, until_ns == UINT64_MAX ? NULL : &deadline,
                         CLOCK_MONOTONIC);
    *owner = woken > 0 && woken < (long)bells->count ? bells->owners[woken] : NULL;
    if (woken >= 0)
        return *owner ? VC_RING_OWNER : VC_RING_NONE;
    if (errno == ETIMEDOUT)
        return VC_RING_NONE;
    if (errno == ENOSYS || errno == EPERM) /* EPERM: a sandbox's way to say so */
        return VC_RING_DEAF;
    if (errno != EAGAIN && errno != EINTR)
        return VC_RING_BROKEN;
    /* If a bell rang as well, the next sleep tells. */
    const uint32_t *own = (const uint32_t *)(uintptr_t)bells->waiters[0].address;
    return vc_load(own) != (uint32_t)bells->waiters[0].value ? VC_RING_NONE : VC_RING_ANYONE;
}
