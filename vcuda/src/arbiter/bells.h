/* Sleeping on many tenants' bells at once: futex_waitv. The words are tenants': they are waited on and never loaded. */
#ifndef VC_ARBITER_BELLS_H
#define VC_ARBITER_BELLS_H

#include "arbiter/member.h"

enum { VC_BELLS_MAX = 128 /* the kernel's limit */ };

/* As in <linux/futex.h> since 5.16. */
struct vc_waiter {
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};

struct vc_bells {
    struct vc_waiter waiters[VC_BELLS_MAX];
    struct vc_member *owners[VC_BELLS_MAX]; /* of the first: nobody, it is the listener's own word */
    unsigned count;
};

enum vc_ring {
    VC_RING_NONE,   /* the deadline passed, or the listener's own word changed */
    VC_RING_OWNER,  /* the bell of *owner rang */
    VC_RING_ANYONE, /* something changed before the sleep: it may be anyone's bell */
    VC_RING_BROKEN, /* a bell can't be listened to any more: its file was cut short, or unmapped meanwhile */
    VC_RING_DEAF,   /* this kernel can't wait for several words (before 5.16), or a sandbox forbids it */
};

/* Nothing but the listener's own word, as it is now. */
void vc_bells_start(struct vc_bells *bells, const uint32_t *own);
/* All bells of a member as it was last read; false: there is no room. */
bool vc_bells_add(struct vc_bells *bells, struct vc_member *member);
/* Sleep until a bell rings or CLOCK_MONOTONIC reaches `until_ns` (UINT64_MAX: never). The owner may be gone when this returns. */
enum vc_ring vc_bells_wait(const struct vc_bells *bells, uint64_t until_ns, const struct vc_member **owner);

#endif
