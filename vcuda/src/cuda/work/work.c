/* Lanes of the calling thread, and what surrounds one operation: permit, gate, marks, the driver's answer. */
#include "cuda/work/work.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/fork.h"
#include "base/log.h"
#include "region/slot.h"

enum { LANES = 32, CACHE_LINE = 64 };

struct vc_stream_lane {
    struct vc_lane lane; /* first: the fast path touches nothing else */
    CUcontext context;
    CUstream stream;
    struct vc_tracker *tracker;
    struct vc_mark *open; /* where the interval under way began */
};

_Static_assert(sizeof(struct vc_known_launch) == CACHE_LINE, "a launch that is known is one cache line");

/* What one thread remembers; `known` is in front, so that one pointer leads to all of it. */
struct thread_work {
    struct vc_known_launch known[VC_KNOWN_LAUNCHES];
    struct vc_stream_lane *lanes[LANES];
    uint32_t epoch, generation;
};

__thread struct vc_known_launch *vc__known_launches __attribute__((tls_model("initial-exec")));
static pthread_key_t thread_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

enum { EPOCH_SHIFT = 32 };
static const uint64_t CAPTURES = UINT32_MAX;
/* On the legacy or a thread's own stream: good in one context only. As many captures there never are. */
static const uint64_t OF_CONTEXT = UINT64_C(1) << 31;
uint64_t vc__work_state = UINT64_C(1) << EPOCH_SHIFT;
static uint32_t generation = 1; /* changes in a forked child, where the lanes' gates do not exist any more */

static struct vc_gate gates[VC_MAX_CARDS];
static uint32_t gates_ready[VC_MAX_CARDS];
static pthread_mutex_t gates_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct vc_slot_card nobodys_slot; /* for a process that found no free slot */

/* --- gates --- */

static void new_epoch(void)
{
    vc_add(&vc__work_state, UINT64_C(1) << EPOCH_SHIFT);
}

static inline bool capturing_somewhere(void)
{
    return (vc_load_relaxed(&vc__work_state) & CAPTURES) != 0;
}

static void forked(void)
{
    memset(gates_ready, 0, sizeof gates_ready);
    pthread_mutex_init(&gates_mutex, NULL);
    vc_add(&generation, 1);
    new_epoch();
    __atomic_and_fetch(&vc__work_state, ~CAPTURES, __ATOMIC_SEQ_CST);
    vc_event_forked();
}
VC_AT_FORK(forked);

static struct vc_gate *gate_of(struct vc_region *region, int card)
{
    if (VC_LIKELY(vc_load_acquire(&gates_ready[card])))
        return &gates[card];
    struct vc_slot *slot = vc_region_slot(region);
    pthread_mutex_lock(&gates_mutex);
    if (!gates_ready[card]) {
        vc_gate_init(&gates[card], region->limits, &region->limits->cards[card], &region->usage->cards[card],
                     slot ? &slot->cards[card] : &nobodys_slot);
        gates[card].alone = region->state == VC_REGION_UNCOUNTED;
        if (slot && region->state == VC_REGION_ENFORCED)
            gates[card].turns = (struct vc_turns){&region->usage->cards[card], region->usage->slots,
                                                  &region->usage->slot_high_water, (uint32_t)card,
                                                  (uint32_t)(slot - region->usage->slots), 0};
        vc_store_release(&gates_ready[card], 1);
    }
    pthread_mutex_unlock(&gates_mutex);
    return &gates[card];
}

static inline bool any_gate_needed(const struct vc_region *region)
{
    for (uint32_t card = 0; card < region->card_count; card++)
        if (vc_gate_needed(&region->limits->cards[card]))
            return true;
    return false;
}

bool vc_work_gated(void)
{
    return any_gate_needed(vc_region_get());
}

/* --- the thread's lanes --- */

static void drop_lane(struct vc_stream_lane *lane, bool fold)
{
    if (fold) {
        vc_lane_end(&lane->lane);
        vc_mark_release(lane->open);
        vc_tracker_release(lane->tracker);
    }
    free(lane);
}

static void drop_lanes(struct thread_work *work)
{
    bool fold = work->generation == vc_load_relaxed(&generation);
    for (unsigned i = 0; i < LANES; i++) {
        if (work->lanes[i])
            drop_lane(work->lanes[i], fold);
        work->lanes[i] = NULL;
    }
    memset(work->known, 0, sizeof work->known);
}

static void thread_ends(void *argument)
{
    struct thread_work *work = argument;
    drop_lanes(work);
    vc__known_launches = NULL;
    free(work);
}

static void prepare(void)
{
    pthread_key_create(&thread_end, thread_ends);
}

static uint32_t epoch_now(void)
{
    return (uint32_t)(vc_load_acquire(&vc__work_state) >> EPOCH_SHIFT);
}

static void *make_aligned(size_t bytes)
{
    size_t lines = (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    void *memory = aligned_alloc(CACHE_LINE, lines);
    return memory ? memset(memory, 0, lines) : NULL;
}

static struct thread_work *make_thread_work(void)
{
    pthread_once(&once, prepare);
    struct thread_work *work = make_aligned(sizeof *work);
    if (!work)
        return NULL;
    work->epoch = epoch_now();
    work->generation = vc_load_relaxed(&generation);
    pthread_setspecific(thread_end, work);
    vc__known_launches = work->known;
    return work;
}

static inline struct thread_work *thread_work(void)
{
    struct thread_work *work = (struct thread_work *)vc__known_launches;
    if (VC_UNLIKELY(!work))
        return make_thread_work();
    if (VC_UNLIKELY(work->epoch != epoch_now())) {
        drop_lanes(work);
        work->epoch = epoch_now();
        work->generation = vc_load_relaxed(&generation);
    }
    return work;
}

static inline unsigned hash_of(uint64_t value, unsigned size)
{
    return (unsigned)((value * UINT64_C(0x9e3779b97f4a7c15)) >> 40) % size;
}

static struct vc_stream_lane *make_lane(struct thread_work *work, unsigned index, struct vc_region *region, int card,
                                        CUcontext context, CUstream stream)
{
    struct vc_stream_lane *lane = make_aligned(sizeof *lane);
    if (!lane)
        return NULL;
    if (work->lanes[index]) {
        drop_lane(work->lanes[index], true);
        memset(work->known, 0, sizeof work->known);
    }
    vc_lane_init(&lane->lane, gate_of(region, card));
    lane->context = context;
    lane->stream = stream;
    lane->tracker = vc_tracker_get(context, lane->lane.gate);
    work->lanes[index] = lane;
    return lane;
}

/* The lane of the current context's stream, or NULL if the operation is not gated. */
static inline struct vc_stream_lane *lane_of(struct thread_work *work, CUstream stream)
{
    struct vc_region *region = vc_region_get();
    CUcontext context;
    int card = vc_card_of_current(region, &context);
    if (VC_UNLIKELY(card < 0) || !vc_gate_needed(&region->limits->cards[card]))
        return NULL;
    unsigned index = hash_of((uintptr_t)stream ^ (uintptr_t)context >> 4, LANES);
    struct vc_stream_lane *lane = work->lanes[index];
    if (VC_LIKELY(lane && lane->stream == stream && lane->context == context))
        return lane;
    return make_lane(work, index, region, card, context, stream);
}

/* --- capture --- */

void vc_work_capture_began(void)
{
    vc_add(&vc__work_state, 1);
}

void vc_work_capture_ended(void)
{
    uint64_t state = vc_load(&vc__work_state);
    while ((state & CAPTURES) != 0 &&
           !__atomic_compare_exchange_n(&vc__work_state, &state, state - 1, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

/* A stream may also join a capture by waiting for an event, so while any is under way the driver is asked. */
static bool is_capturing(CUstream stream)
{
    if (VC_LIKELY(!capturing_somewhere()))
        return false;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!vc_real.cuStreamIsCapturing || vc_real.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS)
        return true; /* leave it alone */
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

/* --- one operation --- */

static void complain(void)
{
    static uint32_t complained;
    struct vc_region *region = vc_region_get();
    if (__atomic_exchange_n(&complained, 1, __ATOMIC_RELAXED))
        return;
    vc_add(&region->usage->limits_impossible, 1);
    vc_log_once(VC_NOTICE_COMPUTE_LIMITS, "the GPU-time limits of this container make no sense (cores must be 1 to 100, the limit "
                                          "cores to 100): it is held to its guaranteed share until they are corrected");
}

static void wait_for_go(struct vc_work *work)
{
    struct vc_lane *lane = &work->lane->lane;
    for (;;) {
        struct vc_gate_words words = vc_gate_words(lane->gate);
        uint64_t now = vc_now_ns();
        vc_lane_ask(lane, work->estimate, now, vc_ticks(), &work->answer, &work->step);
        if (VC_UNLIKELY(work->answer.impossible))
            complain();
        if (work->answer.reason == VC_GATE_GO)
            return;
        vc_gate_wait(lane->gate, words, &work->answer);
    }
}

/* The slow half: ask the gate, wait for it, and record where an interval begins. */
static __attribute__((noinline)) bool begin_slowly(struct vc_work *work)
{
    struct vc_stream_lane *lane = work->lane;
    wait_for_go(work);
    if (!lane->lane.open) {
        vc_mark_release(lane->open);
        lane->open = NULL;
    }
    if (work->step.mark_before) {
        bool may_create = !capturing_somewhere();
        lane->open = vc_mark_record(lane->tracker, work->stream, may_create, work->step.from_idle);
        vc_lane_opened(&lane->lane, lane->open != NULL);
    }
    return true;
}

static inline __attribute__((always_inline)) bool begin(struct vc_work *work, struct thread_work *mine, CUstream stream, struct vc_estimate *estimate)
{
    work->lane = NULL;
    if (VC_UNLIKELY(is_capturing(stream)))
        return false;
    work->lane = lane_of(mine, stream);
    if (!work->lane || VC_LIKELY(vc_lane_pass(&work->lane->lane, estimate)))
        return false;
    work->stream = stream;
    work->estimate = estimate;
    return begin_slowly(work);
}

static inline bool of_context(CUstream stream)
{
    return stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

/* Whose stream is of whatever context is current: the driver tells which. */
static inline bool context_is(CUcontext context)
{
    CUcontext now = NULL;
    return vc_real.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == context;
}

bool vc_work_begin_kernel(struct vc_work *work, CUstream stream, CUfunction function, uint64_t blocks, uint64_t threads)
{
    if (!any_gate_needed(vc_region_get()))
        return false;
    struct thread_work *mine = thread_work();
    if (VC_UNLIKELY(!mine))
        return false;
    uint64_t shape = vc_launch_shape(blocks, threads);
    uint64_t state = (uint64_t)mine->epoch << EPOCH_SHIFT | (of_context(stream) ? OF_CONTEXT : 0);
    struct vc_known_launch *known = vc__known_launch(mine->known, function, shape, stream);
    bool is_known = known->state == state && known->function == function && known->shape == shape && known->stream == stream;
    if (is_known && !capturing_somewhere() && (!of_context(stream) || context_is(known->context)) &&
        VC_LIKELY(vc_lane_pass(known->lane, known->estimate)))
        return false;
    struct vc_estimate *estimate =
        is_known ? known->estimate : vc_estimate_find(vc_estimate_function_key((uintptr_t)function, blocks, threads));
    bool asked = begin(work, mine, stream, estimate);
    if (work->lane)
        *known = (struct vc_known_launch){state, function, shape, stream, work->lane->context, &work->lane->lane, estimate};
    return asked;
}

bool vc_work_begin(struct vc_work *work, CUstream stream, uint64_t key)
{
    if (!any_gate_needed(vc_region_get()))
        return false;
    struct thread_work *mine = thread_work();
    return mine && begin(work, mine, stream, vc_estimate_find(key));
}

CUresult vc_work_end(struct vc_work *work, CUresult result)
{
    struct vc_stream_lane *lane = work->lane;
    if (work->step.mark_before)
        vc_mark_launched(lane->open);
    if (result != CUDA_SUCCESS) {
        vc_lane_refused(&lane->lane, &work->step);
        return result;
    }
    vc_lane_launched(&lane->lane, work->estimate, &work->answer, &work->step);
    if (!work->step.mark_after)
        return result;
    struct vc_mark *end = vc_mark_record(lane->tracker, work->stream, !capturing_somewhere(), false);
    if (end) {
        vc_mark_submit(lane->open, end, work->stream, &work->step);
    } else {
        struct vc_interval lost = work->step.interval;
        lost.measurable = false;
        vc_gate_seen(lane->lane.gate, vc_now_ns(), &lost);
        vc_lane_opened(&lane->lane, false);
    }
    vc_mark_release(lane->open);
    lane->open = end;
    return result;
}

/* --- what else the application does --- */

void vc_work_synchronized(bool whole_context)
{
    struct vc_region *region = vc_region_get();
    if (!any_gate_needed(region))
        return;
    if (whole_context) {
        int card = vc_card_of_current(region, NULL);
        if (card >= 0 && vc_load_acquire(&gates_ready[card]))
            vc_gate_idle(&gates[card], vc_now_ns());
    }
    vc_event_kick();
}

void vc_work_stream_gone(void)
{
    new_epoch();
}

struct vc_tracker *vc_work_context_ending(CUcontext context)
{
    return vc_event_context_suspend(context);
}

void vc_work_context_ended(struct vc_tracker *tracker, bool gone)
{
    vc_event_context_resume(tracker, gone);
    if (gone)
        new_epoch();
}
