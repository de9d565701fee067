/* What part of a card the limits give a container at one moment. */
#include "region/share.h"

#include "base/atomic.h"

static const uint32_t GUARANTEED_AT_LEAST_CORES = 1;

static uint32_t bounded(uint32_t value, uint32_t low, uint32_t high)
{
    return value < low ? low : value > high ? high : value;
}

bool vc_share_possible(const struct vc_limits *limits, const struct vc_card_limit *limit)
{
    uint64_t before = vc_load_acquire(&limits->sequence);
    uint32_t cores = vc_load_acquire(&limit->cores), ceiling = vc_load_acquire(&limit->core_limit);
    bool possible = cores >= GUARANTEED_AT_LEAST_CORES && cores <= 100 && ceiling >= cores && ceiling <= 100 &&
                    vc_load_acquire(&limit->priority) <= VC_PRIORITY_HIGH;
    return possible || before % 2 != 0 || vc_load_relaxed(&limits->sequence) != before;
}

bool vc_share_arbitrated(const struct vc_limits *limits, uint64_t now_ns)
{
    uint64_t heartbeat = vc_load_acquire(&limits->arbiter_heartbeat_ns);
    return heartbeat != 0 && now_ns < heartbeat + VC_HEARTBEAT_LIMIT_NS;
}

uint32_t vc_share_rate_ppm(const struct vc_card_limit *limit, bool arbitrated, bool impossible)
{
    uint32_t cores = bounded(vc_load_relaxed(&limit->cores), GUARANTEED_AT_LEAST_CORES, 100);
    uint32_t ceiling = impossible ? cores : bounded(vc_load_relaxed(&limit->core_limit), cores, 100);
    uint32_t granted = vc_load_relaxed(&limit->granted_ppm);
    if (!arbitrated || granted == 0)
        return cores * VC_PPM_PER_CORE;
    return bounded(granted, cores * VC_PPM_PER_CORE, ceiling * VC_PPM_PER_CORE);
}

uint32_t vc_share_granted_ppm(const struct vc_limits *limits, const struct vc_card_limit *limit, uint64_t now_ns)
{
    if (!vc_gate_needed(limit))
        return 100 * VC_PPM_PER_CORE;
    return vc_share_rate_ppm(limit, vc_share_arbitrated(limits, now_ns), !vc_share_possible(limits, limit));
}
