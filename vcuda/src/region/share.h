/* What part of a card the limits give a container at one moment: pure reading, every value bounded. */
#ifndef VC_SHARE_H
#define VC_SHARE_H

#include <stdbool.h>
#include <stdint.h>

#include "region/abi.h"

enum {
    VC_PPM = 1000000, /* a whole card */
    VC_PPM_PER_CORE = 10000,
};

/* In a lease's sequence: other tenants may launch meanwhile. */
#define VC_LEASE_TOGETHER (UINT64_C(1) << 63)
/* … or what they launched before may begin meanwhile. */
#define VC_LEASE_UNCLEAR (UINT64_C(1) << 62)

enum { VC_HEARTBEAT_LIMIT_NS = 50000000 /* an arbiter silent for longer is not obeyed */ };

/* Whether the limits ask for a gate at all; inline, for the launch path of unlimited tenants. */
static inline bool vc_gate_needed(const struct vc_card_limit *limit)
{
    uint32_t flags = __atomic_load_n(&limit->flags, __ATOMIC_RELAXED);
    if (flags & VC_CARD_WHOLE)
        return false;
    return (flags & VC_CARD_SHARED) || __atomic_load_n(&limit->core_limit, __ATOMIC_RELAXED) != 100;
}

/* Whether cores, limit and priority can be meant. While they are being changed they count as possible. */
bool vc_share_possible(const struct vc_limits *limits, const struct vc_card_limit *limit);

/* The share in force, in parts per million of the card: what the arbiter grants, or the guaranteed share without one. */
uint32_t vc_share_granted_ppm(const struct vc_limits *limits, const struct vc_card_limit *limit, uint64_t now_ns);

/* Whether the arbiter is alive. */
bool vc_share_arbitrated(const struct vc_limits *limits, uint64_t now_ns);

/* The rate of the bucket: what was granted, between the guaranteed share and the limit; impossible limits are none. */
uint32_t vc_share_rate_ppm(const struct vc_card_limit *limit, bool arbitrated, bool impossible);

#endif
