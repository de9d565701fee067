/* What surrounds one operation: the capture, the permit, the gate, the marks, the driver's answer. */
#include "cuda/work/work.h"

#include "base/clock.h"
#include "base/log.h"
#include "cuda/work/behind.h"
#include "cuda/work/bell.h"
#include "cuda/work/capture.h"
#include "cuda/work/ending.h"
#include "cuda/work/gates.h"
#include "cuda/work/helper.h"
#include "cuda/work/hosted.h"
#include "cuda/work/left.h"
#include "cuda/work/mark.h"
#include "cuda/work/marked.h"

/* On the legacy or a thread's own stream: good in one context only. As many captures there never are. */
static const uint64_t OF_CONTEXT = UINT64_C(1) << 31;

/* A copy or a set that was never measured: so long by itself, and so many bytes in a nanosecond. */
static const uint64_t GUESS_NS = 2000, GUESS_BYTES_PER_NS = 500;

bool vc_work_gated(void)
{
    return vc_gates_needed();
}

static uint64_t functions_generation; /* changes when handles of functions may have changed their meaning */

static void complain(const struct vc_gate *gate)
{
    static vc_cards complained;
    const struct vc_card *card = vc_gates_card(gate);
    vc_cards own = 1u << (card - vc_card(0));
    if (__atomic_fetch_or(&complained, own, __ATOMIC_RELAXED) & own)
        return;
    vc_add(&card->region->usage->limits_impossible, 1);
    vc_log_once(VC_NOTICE_COMPUTE_LIMITS, "the GPU-time limits of this container make no sense (cores must be 1 to 100, the limit "
                                          "cores to 100): it is held to its guaranteed share until they are corrected");
}

CUresult vc_work_refusal(void)
{
    if (VC_UNLIKELY(vc_regions_get()->lost) && vc_card_of_current(NULL) == VC_CARD_LOST)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return !vc_work_gated() || vc_lanes_reserve() ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void pause_behind(struct vc_stream_lane *lane)
{
    if (lane->lane.behind)
        vc_marked_end(lane);
}

/* What a lane holds when it ends, as all do when a stream is destroyed, is settled with what was charged for it: what others did meanwhile is charged by their
 * intervals' time, so it would be paid twice. A mark on the legacy stream would order others. */
static void end_lane(struct vc_stream_lane *lane)
{
    if (!lane->open || vc_stream_of_context(lane->stream))
        return;
    bool entered = vc_context_enter(lane->context);
    vc_marked_end(lane);
    vc_context_leave(entered);
}

/* Streams run beside each other: what a thread has launched before it sleeps has nobody behind it to mark its end. */
static void before_sleep(struct vc_work *work)
{
    enum vc_gate_reason reason = work->answer.reason;
    if (work->lane->lane.behind)
        vc_marked_end(work->lane);
    if (reason != VC_GATE_OUTSTANDING && vc_gate_beside(work->lane->lane.gate, vc_now_ns()))
        vc_lanes_each(work->lane->context, vc_marked_end);
}

/* As far as one may ask: while something captures, the legacy stream may not be. */
static bool is_busy(CUstream stream)
{
    return vc_real.cuStreamQuery && stream != CU_STREAM_LEGACY && !vc_visit_captures() && vc_real.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
}

static void wait_for_go(struct vc_work *work)
{
    struct vc_lane *lane = &work->lane->lane;
    for (bool waited = false;; waited = true) {
        struct vc_gate_words words = vc_gate_words(lane->gate);
        vc_gates_settle_abandoned(lane->gate);
        uint64_t look;
        bool stood_in = vc_helper_stand_in(&look);
        uint64_t now = vc_now_ns();
        if (vc_lane_all_marked(lane) && work->lane->open && vc_load_acquire(&work->lane->open->seen))
            vc_lane_idle(lane, now);
        vc_store_relaxed(&lane->gate->unwatched, stood_in || vc_bell_missed(now));
        vc_lane_ask(lane, work->estimate, now, vc_ticks(), &work->answer, &work->step);
        if (VC_UNLIKELY(work->answer.impossible))
            complain(lane->gate);
        if (work->answer.reason == VC_GATE_GO) {
            if (waited)
                vc_gate_passed(lane->gate);
            if (VC_UNLIKELY(work->answer.call_next))
                vc_gate_call_heir(lane->gate, VC_HEIR_SIBLING);
            if (VC_UNLIKELY(work->answer.opened)) { /* and the arbiter notes as long as we live */
                vc_gates_opened(lane->gate, now);
                vc_bell_expect(now + VC_REST_NS);
                vc_gate_call_arbiter(lane->gate);
            }
            return;
        }
        before_sleep(work);
        if (work->answer.until_ns > look)
            work->answer.until_ns = look;
        vc_gate_wait(lane->gate, words, &work->answer);
        if (lane->behind) /* what comes first may be done by now */
            vc_behind_look(work->lane);
    }
}

/* Ask the gate, wait for it, and record where an interval begins. */
static bool begin_here(struct vc_work *work)
{
    struct vc_stream_lane *lane = work->lane;
    work->capture = vc_capture_under_way(work->stream);
    if (VC_UNLIKELY(work->capture != 0)) {
        work->from_ns = vc_now_ns();
        return true;
    }
    /* What is left there nobody could ask about; a thread's own stream only the thread can. */
    lane->lane.mark_all = vc_visit_captures() || vc_capture_lately() || work->stream == CU_STREAM_PER_THREAD || vc_behind_is_hosted(lane) || vc_gate_marks_all(lane->lane.gate);
    vc_behind_look_legacy(lane);
    if (VC_UNLIKELY(lane->lane.behind))
        vc_behind_look(lane);
    wait_for_go(work);
    if (!lane->lane.open) {
        vc_mark_release(lane->open);
        lane->open = NULL;
    }
    if (work->step.mark_before) {
        bool busy = work->step.left && is_busy(work->stream); /* else the mark may wait for others' slices alone */
        lane->open = vc_mark_record(lane->tracker, work->stream);
        if (lane->open && busy) {
            struct vc_lane_step left = vc_lane_left(&lane->lane, &work->step, lane->open->times.recording_ns);
            vc_mark_submit(NULL, lane->open, work->stream, &left);
        }
        vc_lane_opened(&lane->lane, lane->open != NULL);
        if (lane->open)
            lane->open->alone = work->step.left ? !busy : work->step.alone;
        vc_behind_note(lane);
        if (lane->open) {
            lane->open->after = lane->before;
            lane->open->elsewhere = lane->elsewhere;
            lane->before = NULL;
        }
    }
    work->first = vc_lane_all_marked(&lane->lane);
    if (work->first)
        vc_mark_launching(lane->open);
    if (work->answer.from_idle)
        vc_gate_hands_over(lane->lane.gate, vc_now_ns(), &work->answer);
    return true;
}

/* The slow half. Marks are recorded in the stream's own context, which need not be current. */
static __attribute__((noinline)) bool begin_slowly(struct vc_work *work)
{
    bool entered = vc_context_enter(work->lane->context);
    bool begun = begin_here(work);
    vc_context_leave(entered);
    return begun;
}

static inline __attribute__((always_inline)) bool begin(struct vc_work *work, struct vc_thread_work *mine, CUstream stream,
                                                        struct vc_estimate *estimate)
{
    work->lane = vc_lane_of_stream(mine, stream, end_lane);
    if (!work->lane || VC_LIKELY(!vc_visit_captures() && vc_lane_pass(&work->lane->lane, estimate)))
        return false;
    work->stream = stream;
    work->estimate = estimate;
    return begin_slowly(work);
}

/* The legacy and per-thread streams belong to the current context: unless there is one only, the driver is asked which that is. */
static inline CUcontext only_context(void)
{
    int card;
    return vc_only_context(&card);
}

bool vc_work_begin_kernel(struct vc_work *work, CUstream stream, CUfunction function, uint64_t blocks, uint64_t threads)
{
    if (!vc_work_gated())
        return false;
    struct vc_thread_work *mine = vc_lanes_of_thread();
    if (VC_UNLIKELY(!mine))
        return false;
    uint64_t shape = vc_launch_shape(blocks, threads);
    uint64_t epoch = (uint64_t)mine->epoch << VC_EPOCH_SHIFT, state = epoch | (vc_stream_of_context(stream) && !only_context() ? OF_CONTEXT : 0);
    struct vc_known_launch *known = vc__known_launch(mine->known, function, shape, stream);
    bool is_known = known->state == state && known->function == function && known->shape == shape && known->stream == stream;
    if (is_known && !vc_visit_captures() && (!(state & OF_CONTEXT) || vc_context_is_current(known->context)) &&
        VC_LIKELY(vc_lane_pass(known->lane, known->estimate)))
        return false;
    struct vc_estimate *estimate =
        is_known ? known->estimate
                 : vc_estimate_of(vc_estimate_function_key((uintptr_t)function, blocks, threads), vc_load(&functions_generation));
    bool asked = begin(work, mine, stream, estimate);
    if (work->lane) {
        CUcontext context = work->lane->context; /* of one that we did not see made it is not the only */
        state = epoch | (vc_stream_of_context(stream) && context != only_context() ? OF_CONTEXT : 0);
        *known = (struct vc_known_launch){state, function, shape, stream, context, &work->lane->lane, estimate};
    }
    return asked;
}

bool vc_work_begin(struct vc_work *work, CUstream stream, uint64_t key)
{
    if (!vc_work_gated())
        return false;
    struct vc_thread_work *mine = vc_lanes_of_thread();
    return mine && begin(work, mine, stream, vc_estimate_find(key));
}

bool vc_work_begin_sized(struct vc_work *work, CUstream stream, bool per_thread, uint64_t kind, uint64_t bytes)
{
    if (bytes == 0 || !vc_work_gated())
        return false;
    struct vc_thread_work *mine = vc_lanes_of_thread();
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_key(kind, 0, bytes));
    vc_estimate_guess(estimate, GUESS_NS + bytes / GUESS_BYTES_PER_NS);
    return mine && begin(work, mine, vc_work_stream(stream, per_thread), estimate);
}

/* It was thought to be captured, and may have run: another thread ended the capture meanwhile. It is charged and marked at once, since who waited before would
 * be charged for the wait where no mark can be had; then its thread waits as it would have. */
static void charge_late(struct vc_work *work)
{
    struct vc_stream_lane *lane = work->lane;
    struct vc_mark *end = vc_capture_is(work->stream) ? NULL : vc_mark_record(lane->tracker, work->stream);
    vc_mark_release(lane->open);
    lane->open = NULL;
    vc_lane_launched_unasked(&lane->lane, work->estimate, work->from_ns, vc_now_ns(), &work->answer, &work->step);
    if (end)
        vc_mark_submit(NULL, end, work->stream, &work->step);
    else
        vc_marked_lost(lane, &work->step);
    vc_mark_release(end);
    wait_for_go(work);
    vc_lane_refused(&lane->lane, &work->step); /* what it may launch now, it has */
}

/* What has no mark behind it, or soon, is somebody's to ask about. */
static void leave(struct vc_work *work)
{
    struct vc_stream_lane *lane = work->lane;
    if (work->stream == CU_STREAM_PER_THREAD || (work->step.mark_after && lane->lane.allowance_ns == 0))
        return;
    struct vc_mark *begins = lane->lane.behind ? lane->open : NULL;
    uint64_t work_ns = lane->lane.estimate_ns + lane->lane.allowance_ns;
    if (vc_tracker_left(lane->tracker, work->stream, &lane->left_stamp, begins, work_ns))
        return;
    vc_lane_fold(&lane->lane);
    if (!work->step.mark_after)
        vc_tracker_mark_left(lane->tracker, work->stream, begins);
}

static void end_here(struct vc_work *work)
{
    struct vc_stream_lane *lane = work->lane;
    if (VC_UNLIKELY(work->capture != 0)) {
        if (vc_capture_under_way(work->stream) != work->capture)
            charge_late(work);
        return;
    }
    vc_lane_launched(&lane->lane, work->estimate, &work->answer, &work->step);
    if (VC_UNLIKELY(vc_load_relaxed(&lane->lane.gate->unsampled))) {
        vc_store_relaxed(&lane->lane.gate->unsampled, false);
        vc_bell_expect(vc_now_ns());
    }
    leave(work);
    if (!work->step.mark_after)
        return;
    struct vc_mark *end = vc_mark_record(lane->tracker, work->stream);
    if (end)
        vc_mark_submit(lane->open, end, work->stream, &work->step);
    else
        vc_marked_lost(lane, &work->step);
    if (end && lane->lane.allowance_ns == 0)
        vc_marked_followed(lane);
    vc_mark_release(lane->open);
    lane->open = end;
    vc_behind_note(lane);
}

CUresult vc_work_end(struct vc_work *work, CUresult result)
{
    struct vc_stream_lane *lane = work->lane;
    if (work->capture == 0 && work->first)
        vc_mark_launched(lane->open);
    if (result == CUDA_SUCCESS) {
        bool entered = vc_context_enter(lane->context);
        end_here(work);
        vc_context_leave(entered);
    } else if (work->capture == 0) {
        vc_lane_refused(&lane->lane, &work->step);
    }
    return result;
}

/* --- what else the application does --- */

void vc_work_elsewhere(CUstream stream)
{
    if (vc_work_gated() && !vc_capture_is(stream))
        vc_behind_put(stream);
}

uint64_t vc_work_waits(void)
{
    if (!vc_work_gated())
        return 0;
    CUcontext context;
    int card = vc_card_of_current(&context);
    const struct vc_gate *gate = card >= 0 ? vc_gates_find(card) : NULL;
    uint64_t now = vc_now_ns();
    if (gate) /* as before a sleep at the gate */
        vc_lanes_each(context, vc_gate_beside(gate, now) ? vc_marked_end : pause_behind);
    return now;
}

/* What was never measured is, before the application goes on: if the process ends now, what passes until that is found is charged as far as its work may have lasted. */
static void measure_now(CUcontext context, struct vc_gate *gate)
{
    struct vc_tracker *tracker = vc_visit_captures() ? NULL : vc_tracker_find(context);
    if (tracker) {
        vc_marks_look(tracker);
        vc_tracker_release(tracker);
    }
    vc_gate_idle(gate, vc_now_ns());
    vc_gates_close(gate);
}

void vc_work_waited(uint64_t from_ns, CUstream stream)
{
    CUcontext context;
    if (from_ns == 0)
        return;
    int card = vc_card_of_current(&context);
    if (card >= 0 || stream)
        vc_lanes_waited(card >= 0 ? context : NULL, stream, from_ns);
    struct vc_gate *gate = card >= 0 && !stream ? vc_gates_find(card) : NULL;
    if (gate && VC_UNLIKELY(vc_load_relaxed(&gate->unknown) != 0))
        measure_now(context, gate);
    else if (gate)
        vc_gate_idle(gate, vc_now_ns());
    vc_bell_kick();
}

void vc_work_waited_otherwise(void)
{
    if (vc_work_gated())
        vc_bell_kick();
}

void vc_work_functions_gone(void)
{
    vc_add(&functions_generation, 1);
    vc_lanes_new_epoch();
}

void vc_work_capture_begins(CUstream stream)
{
    if (vc_work_gated() && !vc_visit_captures())
        vc_trackers_mark_left(NULL); /* nobody can be asked from now on */
    vc_capture_begins(stream);
}

void vc_work_stream_ending(CUstream stream)
{
    if (vc_work_gated() && stream) {
        vc_lanes_each(NULL, end_lane);
        vc_trackers_mark_left(stream);
    }
    vc_visit_forbid();
}

void vc_work_stream_gone(CUstream stream, bool gone)
{
    if (gone && vc_work_gated())
        vc_trackers_stream_gone(stream);
    vc_capture_stream_gone(stream);
    vc_lanes_new_epoch();
    vc_visit_allow();
}

struct vc_tracker *vc_work_context_ending(CUcontext context)
{
    return vc_tracker_suspend(context);
}

void vc_work_context_ended(struct vc_tracker *tracker, CUcontext context, bool gone)
{
    vc_tracker_resume(tracker, gone);
    if (!gone)
        return;
    if (context)
        vc_capture_context_gone(context);
    vc_work_functions_gone();
}
