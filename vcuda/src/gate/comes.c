/* What takes no time of the card, but has it turn to its context, as the record of an event: when it may come, and how long that is known to last. */
#include "base/atomic.h"
#include "base/clock.h"
#include "gate/charge.h"
#include "gate/gate.h"

/* The card turns to another context so long after the one that has it is done, or has had a slice. */
static const uint64_t SWITCH_NS = 100000;

bool vc_gate_comes(const struct vc_gate *gate, uint64_t now_ns)
{
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    if (!policy.leased || policy.together)
        return true;
    if (!policy.holder || now_ns >= policy.lease_end_ns)
        return false;
    uint64_t own = vc_earlier(vc_load_relaxed(&gate->usage->predicted_finish_ns), now_ns + VC_LONG_OPERATION_NS);
    return vc_later(vc_later(own, vc_load_relaxed(&gate->turned_ns)), now_ns) + SWITCH_NS < policy.lease_end_ns;
}

/* So many in a row come to mark work, as before and behind it. */
enum { CAME_AROUND_WORK = 4 };

void vc_gate_came(struct vc_gate *gate, uint64_t now_ns, bool several, bool behind)
{
    pthread_mutex_lock(&gate->mutex);
    gate->came = gate->launched_ns == gate->came_then_ns ? gate->came + (gate->came <= CAME_AROUND_WORK) : 1;
    gate->came_then_ns = gate->launched_ns;
    if ((several || gate->came > CAME_AROUND_WORK) && !behind) {
        uint64_t finish = vc_later(vc_later(gate->finish_ns, vc_load_relaxed(&gate->usage->predicted_finish_ns)), now_ns);
        vc_store_relaxed(&gate->turned_ns, vc_later(gate->turned_ns, vc_earlier(finish, now_ns + VC_LONG_OPERATION_NS)) + SWITCH_NS);
        vc_gate_predict(gate, vc_later(finish, gate->turned_ns), gate->later_ns);
        vc_gate_publish(gate);
    }
    bool measured = !behind && gate->unseen != 0; /* an interval of the lease has it inside */
    if (several && gate->came > CAME_AROUND_WORK && !measured) {
        struct vc_policy policy = vc_gate_policy(gate, now_ns);
        if (policy.leased && !policy.together)
            vc_gate_charge(gate, (behind ? 2 : 1) * (int64_t)SWITCH_NS);
    }
    pthread_mutex_unlock(&gate->mutex);
}
