/* When to ask, and what follows from an answer; see probe.h. */
#include "gate/probe.h"

#include "base/atomic.h"
#include "base/clock.h"

static uint64_t at_random(struct vc_probe *probe, uint64_t most_ns)
{
    probe->dice ^= probe->dice << 13;
    probe->dice ^= probe->dice >> 7;
    probe->dice ^= probe->dice << 17;
    return probe->dice % most_ns;
}

static bool somebody_stands(const struct vc_probe *probe, uint64_t now_ns)
{
    uint64_t stands = vc_load_relaxed(&probe->stands_ns);
    return stands != 0 && now_ns < stands + VC_PROBE_STANDS_NS;
}

bool vc_probe_holds(const struct vc_probe *probe, uint64_t now_ns, bool idle)
{
    uint64_t due = vc_load_relaxed(&probe->due_ns);
    return due != 0 && now_ns >= due && now_ns < due + VC_PROBE_HOLDS_NS && (!idle || vc_load_relaxed(&probe->asked_ns) != 0);
}

uint64_t vc_probe_plan(struct vc_probe *probe, uint64_t now_ns)
{
    if (!somebody_stands(probe, now_ns)) {
        if (probe->asked_ns == 0)
            vc_store_relaxed(&probe->due_ns, 0);
        return UINT64_MAX;
    }
    if (probe->dice == 0)
        probe->dice = now_ns | 1;
    if (probe->due_ns == 0)
        vc_store_relaxed(&probe->due_ns, now_ns + at_random(probe, VC_PROBE_SPREAD_NS));
    return probe->due_ns;
}

void vc_probe_ask(struct vc_probe *probe, uint64_t now_ns, bool again)
{
    probe->come = again;
    vc_store_relaxed(&probe->asked_ns, now_ns);
}

static enum vc_probe_answer judge(const struct vc_probe *probe, uint64_t now_ns, bool reached, bool explained)
{
    uint64_t since = now_ns - probe->asked_ns;
    if (!probe->come)
        return reached ? VC_PROBE_ASKS_AGAIN : since > VC_PROBE_COMES_NS ? VC_PROBE_SAYS_NOTHING : VC_PROBE_WAITS;
    if (reached)
        return since <= VC_PROBE_LATE_NS ? VC_PROBE_FREE : VC_PROBE_SAYS_NOTHING;
    return since <= VC_PROBE_LATE_NS ? VC_PROBE_WAITS : explained ? VC_PROBE_SAYS_NOTHING : VC_PROBE_BUSY;
}

enum vc_probe_answer vc_probe_answer(struct vc_probe *probe, uint64_t now_ns, bool reached, bool explained)
{
    enum vc_probe_answer answer = judge(probe, now_ns, reached, explained);
    if (answer == VC_PROBE_WAITS || answer == VC_PROBE_ASKS_AGAIN)
        return answer;
    bool tells = answer != VC_PROBE_SAYS_NOTHING;
    if (tells)
        vc_store_relaxed(&probe->known_ns, probe->asked_ns);
    vc_store_relaxed(&probe->due_ns, now_ns + VC_PROBE_LEAST_NS + at_random(probe, tells ? VC_PROBE_SPREAD_NS : VC_PROBE_AGAIN_NS));
    vc_store_relaxed(&probe->asked_ns, 0);
    return answer;
}
