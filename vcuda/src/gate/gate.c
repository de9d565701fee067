/* One gate, and the policy that holds at a moment. */
#include "gate/gate.h"

#include <string.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "region/share.h"

void vc_gate_init(struct vc_gate *gate, const struct vc_limits *limits, const struct vc_card_limit *limit,
                  struct vc_card_usage *usage, struct vc_slot_card *slot)
{
    memset(gate, 0, sizeof *gate);
    pthread_mutex_init(&gate->mutex, NULL);
    gate->limits = limits;
    gate->limit = limit;
    gate->usage = usage;
    gate->slot = slot;
    gate->believed_ns = VC_BELIEVED_NS;
}

struct vc_policy vc_gate_policy(const struct vc_gate *gate, uint64_t now_ns)
{
    const struct vc_card_limit *limit = gate->limit;
    struct vc_policy policy = {
        .gated = vc_gate_needed(limit),
        .impossible = !vc_share_possible(gate->limits, limit),
        .shared = vc_load_relaxed(&limit->flags) & VC_CARD_SHARED,
        .arbitrated = !gate->alone && vc_share_arbitrated(gate->limits, now_ns),
        .lease_end_ns = UINT64_MAX,
    };
    policy.rate_ppm = vc_share_rate_ppm(limit, policy.arbitrated, policy.impossible);
    if (!policy.arbitrated)
        return policy;
    policy.closed_until_ns = vc_load_relaxed(&limit->closed_until_ns);
    policy.saved_ns = vc_earlier(vc_load_relaxed(&limit->saved_ns), VC_SAVED_NS);
    policy.lease_sequence = vc_load_acquire(&limit->lease_sequence);
    policy.leased = policy.shared && policy.lease_sequence != 0;
    if (policy.leased) {
        policy.lease_end_ns = vc_load_acquire(&limit->lease_end_ns);
        policy.lease_start_ns = vc_load_relaxed(&limit->lease_start_ns);
        policy.lease_clock_ns = vc_load_relaxed(&limit->lease_clock_ns);
        policy.holder = policy.lease_end_ns != 0;
        policy.together = policy.lease_sequence & VC_LEASE_TOGETHER;
    }
    return policy;
}
