/* Events on the stream that else tells the card's clock. */
#include "cuda/work/probe.h"

#include "base/clock.h"
#include "cuda/work/gates.h"

/* A process may have several contexts on a card: one of them asks. */
static const struct vc_tracker *asking;

static bool reached(const struct vc_tracker *tracker)
{
    return vc_real.cuEventQuery(tracker->probe) != CUDA_ERROR_NOT_READY;
}

/* Whatever the process has on the card itself would tell nothing. One that the card was found busy by may still be on its way. */
static bool ask(struct vc_tracker *tracker, bool again)
{
    struct vc_gate *gate = tracker->gate;
    if (!vc_gate_is_idle(gate, vc_now_ns()))
        return false;
    if (!tracker->clock_stream && vc_real.cuStreamCreate(&tracker->clock_stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        return false;
    if (!tracker->probe && vc_real.cuEventCreate(&tracker->probe, CU_EVENT_DISABLE_TIMING) != CUDA_SUCCESS)
        return false;
    if (!reached(tracker) || vc_real.cuEventRecord(tracker->probe, tracker->clock_stream) != CUDA_SUCCESS)
        return false;
    asking = tracker;
    vc_probe_ask(&gate->probe, vc_now_ns(), again);
    return true;
}

static enum vc_probe_answer look(const struct vc_tracker *tracker)
{
    struct vc_probe *probe = &tracker->gate->probe;
    bool mine = asking == tracker, is_reached = mine && reached(tracker);
    return vc_probe_answer(probe, vc_now_ns(), is_reached, !mine || vc_gate_others_explain(tracker->gate, probe->asked_ns));
}

/* Until the next time: what is reached so late tells nothing. */
static enum vc_probe_answer give_up(struct vc_probe *probe)
{
    vc_probe_ask(probe, 0, true);
    return vc_probe_answer(probe, vc_now_ns(), true, true);
}

uint64_t vc_probe_look(struct vc_tracker *tracker)
{
    struct vc_gate *gate = tracker->gate;
    uint64_t now = vc_now_ns(), due = vc_probe_plan(&gate->probe, now);
    if (gate->probe.asked_ns == 0) {
        if (due <= now && !ask(tracker, false) && now >= due + VC_PROBE_HOLDS_NS) /* launches waited, and it still has something there */
            give_up(&gate->probe);
        return vc_later(due, now + VC_LOOK_NS);
    }
    enum vc_probe_answer answer = look(tracker);
    if (answer == VC_PROBE_ASKS_AGAIN) /* the card has come: it goes at once to whatever else there is */
        answer = ask(tracker, true) ? VC_PROBE_WAITS : give_up(&gate->probe);
    if (answer == VC_PROBE_WAITS)
        return now + VC_LOOK_NS;
    if (answer == VC_PROBE_BUSY || answer == VC_PROBE_FREE)
        vc_gates_card_was_asked(gate, answer == VC_PROBE_BUSY);
    if (answer == VC_PROBE_BUSY) /* before a sibling finds it free */
        vc_gates_settle_abandoned(gate);
    if (answer == VC_PROBE_FREE)
        vc_gates_card_was_free(gate, gate->probe.known_ns);
    if (vc_load(&gate->waiting_threads) != 0)
        vc_gate_notify(gate);
    return gate->probe.due_ns;
}
