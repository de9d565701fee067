/* Hooks of what takes no time of the card, but is reached only once the card has come to its context: records of events, values that are written, semaphores that are signalled.
 *
 * A context that has nothing else on the card has a turn of its own for that, and the card two switches. So it waits for a lease as work does, but no longer than a deadlock may last:
 * whoever waits for the event may be the one for whom others wait. */
#include "base/clock.h"
#include "cuda/work/capture.h"
#include "cuda/work/gates.h"
#include "cuda/work/left.h"
#include "cuda/work/work.h"

static bool is_shared(uint32_t card)
{
    const struct vc_card_limit *limit = vc_card(card)->limit;
    return (vc_load_relaxed(&limit->flags) & VC_CARD_SHARED) && vc_gate_needed(limit);
}

static inline bool any_shared(void)
{
    const struct vc_regions *regions = vc_regions_get();
    for (uint32_t card = 0; card < regions->card_count; card++)
        if (is_shared(card))
            return true;
    return false;
}

/* The card's gate, if others have it; else NULL. */
static struct vc_gate *closed_gate(uint32_t card, uint64_t now_ns)
{
    struct vc_gate *gate = is_shared(card) ? vc_gates_get((int)card) : NULL;
    return gate && !vc_gate_comes(gate, now_ns) ? gate : NULL;
}

static bool any_closed(uint64_t now_ns)
{
    const struct vc_regions *regions = vc_regions_get();
    for (uint32_t card = 0; card < regions->card_count; card++)
        if (VC_UNLIKELY(closed_gate(card, now_ns) != NULL))
            return true;
    return false;
}

/* What this thread launched there, or anybody in the process's only context, brings that to the card: known without asking the driver. */
static bool is_plainly_behind_own(CUstream stream, uint64_t now_ns)
{
    const struct vc_stream_lane *lane = vc_lane_of_stream_known(stream);
    if (lane && lane->lane.finish_ns > now_ns)
        return true;
    if (vc_regions_get()->card_count != 1 || vc_several_contexts())
        return false;
    uint64_t done, launched;
    vc_gate_predicted(vc_gates_get(0), &done, &launched);
    return done > now_ns;
}

/* What other threads launched on that stream does, too. */
static bool is_behind_own(CUcontext context, CUstream stream, uint64_t now_ns)
{
    struct vc_tracker *tracker = vc_tracker_find(context);
    if (!tracker)
        return false;
    pthread_mutex_lock(&tracker->mutex);
    const struct vc_left_stream *left = vc_left_place(tracker, stream);
    bool there = left && left->stream == stream && left->done_ns > now_ns;
    pthread_mutex_unlock(&tracker->mutex);
    vc_tracker_release(tracker);
    return there;
}

/* As far as one may ask: a callback, a copy over the bus or a wait comes first. */
static bool waits_for_more(CUstream stream)
{
    return vc_real.cuStreamQuery && !vc_stream_of_context(stream) && !vc_visit_captures() && vc_real.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
}

/* It comes to the card now. */
static void turns(struct vc_gate *gate, CUstream stream, uint64_t now_ns)
{
    bool several = vc_several_contexts();
    vc_gate_came(gate, now_ns, several, several && waits_for_more(stream));
}

static void wait_for_lease(struct vc_gate *gate)
{
    vc_work_waits(); /* as before any sleep */
    struct vc_gate_answer answer = {.reason = VC_GATE_COMES};
    uint64_t now = vc_now_ns();
    answer.until_ns = now + VC_STALL_NS;
    while (now < answer.until_ns) {
        struct vc_gate_words words = vc_gate_words(gate);
        if (vc_gate_comes(gate, now))
            break;
        now = vc_gate_wait(gate, words, &answer);
    }
    vc_gate_passed(gate);
}

static __attribute__((noinline)) void come(CUstream stream, uint64_t now_ns)
{
    if (is_plainly_behind_own(stream, now_ns))
        return;
    CUcontext context = NULL;
    int card = vc_stream_of_context(stream) ? vc_card_of_current(&context) : vc_card_of_stream(stream, &context);
    struct vc_gate *gate = card >= 0 ? closed_gate((uint32_t)card, now_ns) : NULL;
    /* The legacy stream never captures, and to ask it would break another one's capture. */
    if (!gate || (stream != CU_STREAM_LEGACY && vc_capture_is(stream)) || is_behind_own(context, stream, now_ns))
        return;
    wait_for_lease(gate);
    turns(gate, stream, vc_now_ns());
}

/* Of several contexts, of this process or of siblings, each has the card turn to it. Where a process has several cards this is not counted. */
static void count_turn(CUstream stream, uint64_t now_ns)
{
    struct vc_gate *gate = vc_gates_get(0);
    bool several = vc_several_contexts(), siblings = gate->turns.slots && vc_load_relaxed(gate->turns.slots_used) > 1;
    if ((several || siblings) && !is_plainly_behind_own(stream, now_ns))
        turns(gate, stream, now_ns);
}

static inline void comes(CUstream stream)
{
    if (VC_LIKELY(!any_shared()))
        return;
    uint64_t now = vc_now_ns();
    if (VC_UNLIKELY(any_closed(now)))
        come(stream, now);
    else if (vc_regions_get()->card_count == 1)
        count_turn(stream, now);
}

#define VC__COMES_AS(name, stream, parameters, arguments) \
    CUresult vc_hook_##name parameters                    \
    {                                                     \
        comes(stream);                                    \
        return vc_real.name arguments;                    \
    }
#define VC__COMES(name, parameters, arguments)                                   \
    VC__COMES_AS(name, vc_work_stream(stream, false), parameters, arguments)     \
    VC__COMES_AS(name##_ptsz, vc_work_stream(stream, true), parameters, arguments)

VC__COMES(cuEventRecord, (CUevent event, CUstream stream), (event, stream))
VC__COMES(cuEventRecordWithFlags, (CUevent event, CUstream stream, unsigned int flags), (event, stream, flags))
VC__COMES(cuStreamWriteValue32, (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags), (stream, address, value, flags))
VC__COMES(cuStreamWriteValue64, (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags), (stream, address, value, flags))
VC__COMES(cuStreamWriteValue32_v2, (CUstream stream, CUdeviceptr address, uint32_t value, unsigned int flags), (stream, address, value, flags))
VC__COMES(cuStreamWriteValue64_v2, (CUstream stream, CUdeviceptr address, uint64_t value, unsigned int flags), (stream, address, value, flags))
VC__COMES(cuSignalExternalSemaphoresAsync, (const void *semaphores, const void *values, unsigned int count, CUstream stream),
          (semaphores, values, count, stream))

/* In each of a context's streams: as on the legacy one, which is behind all of them. */
VC__COMES_AS(cuCtxRecordEvent, CU_STREAM_LEGACY, (CUcontext context, CUevent event), (context, event))
VC__COMES_AS(cuGreenCtxRecordEvent, CU_STREAM_LEGACY, (CUgreenCtx context, CUevent event), (context, event))
