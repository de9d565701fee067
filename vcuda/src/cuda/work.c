/* Lanes of the calling thread, and what surrounds one operation: permit, gate, marks, the driver's answer. */
#include "work.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "vc_clock.h"
#include "vc_log.h"

enum { LANES = 32, FUNCTIONS = 64 };

struct vc_stream_lane {
    struct vc_lane lane; /* first: the fast path touches nothing else */
    CUcontext context;
    CUstream stream;
    struct vc_tracker *tracker;
    struct vc_mark *open; /* where the interval under way began */
};

/* What one thread remembers. Only a pointer to it lives in static TLS, which is scarce in libraries loaded late. */
struct thread_work {
    uint32_t epoch, generation;
    struct vc_stream_lane *lanes[LANES];
    struct {
        uint64_t function, blocks, threads;
        struct vc_estimate *estimate;
    } functions[FUNCTIONS];
};

static __thread struct thread_work *my_work __attribute__((tls_model("initial-exec")));
static pthread_key_t thread_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static uint32_t epoch = 1;      /* changes when handles may have changed their meaning */
static uint32_t generation = 1; /* changes in a forked child, where the lanes' gates do not exist any more */
static uint32_t captures;       /* under way anywhere in the process */

static struct vc_gate gates[VC_MAX_CARDS];
static uint32_t gates_ready[VC_MAX_CARDS];
static pthread_mutex_t gates_mutex = PTHREAD_MUTEX_INITIALIZER;
static struct vc_slot_card nobodys_slot; /* for a process that found no free slot */

/* --- gates --- */

static void forked(void)
{
    memset(gates_ready, 0, sizeof gates_ready);
    pthread_mutex_init(&gates_mutex, NULL);
    vc_add(&generation, 1);
    vc_store(&captures, 0);
    vc_event_forked();
}

static struct vc_gate *gate_of(struct vc_region *region, int card)
{
    if (VC_LIKELY(vc_load_acquire(&gates_ready[card])))
        return &gates[card];
    struct vc_slot *slot = vc_region_slot(region);
    pthread_mutex_lock(&gates_mutex);
    if (!gates_ready[card]) {
        vc_gate_init(&gates[card], region->limits, &region->limits->cards[card], &region->usage->cards[card],
                     slot ? &slot->cards[card] : &nobodys_slot);
        gates[card].alone = region->state == VC_REGION_ALONE;
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
    memset(work->functions, 0, sizeof work->functions);
}

static void thread_ends(void *argument)
{
    struct thread_work *work = argument;
    drop_lanes(work);
    my_work = NULL;
    free(work);
}

static void prepare(void)
{
    pthread_key_create(&thread_end, thread_ends);
    vc_region_on_fork(forked);
}

static struct thread_work *make_thread_work(void)
{
    pthread_once(&once, prepare);
    struct thread_work *work = calloc(1, sizeof *work);
    if (!work)
        return NULL;
    work->epoch = vc_load_relaxed(&epoch);
    work->generation = vc_load_relaxed(&generation);
    pthread_setspecific(thread_end, work);
    my_work = work;
    return work;
}

static inline struct thread_work *thread_work(void)
{
    struct thread_work *work = my_work;
    if (VC_UNLIKELY(!work))
        return make_thread_work();
    if (VC_UNLIKELY(work->epoch != vc_load_acquire(&epoch) || work->generation != vc_load_relaxed(&generation))) {
        drop_lanes(work);
        work->epoch = vc_load_acquire(&epoch);
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
    struct vc_stream_lane *lane = calloc(1, sizeof *lane);
    if (!lane)
        return NULL;
    if (work->lanes[index])
        drop_lane(work->lanes[index], true);
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
    vc_add(&captures, 1);
}

void vc_work_capture_ended(void)
{
    uint32_t count = vc_load(&captures);
    while (count != 0 && !__atomic_compare_exchange_n(&captures, &count, count - 1, true, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        ;
}

/* A stream may also join a capture by waiting for an event, so while any is under way the driver is asked. */
static bool is_capturing(CUstream stream)
{
    if (VC_LIKELY(vc_load_relaxed(&captures) == 0))
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
        bool may_create = vc_load_relaxed(&captures) == 0;
        lane->open = vc_mark_record(lane->tracker, work->stream, may_create, work->step.from_idle);
        vc_lane_opened(&lane->lane, lane->open != NULL);
    }
    return true;
}

static inline __attribute__((always_inline)) bool begin(struct vc_work *work, struct thread_work *mine, CUstream stream, struct vc_estimate *estimate)
{
    if (VC_UNLIKELY(is_capturing(stream)))
        return false;
    work->lane = lane_of(mine, stream);
    if (!work->lane || VC_LIKELY(vc_lane_pass(&work->lane->lane, estimate)))
        return false;
    work->stream = stream;
    work->estimate = estimate;
    return begin_slowly(work);
}

static inline struct vc_estimate *kernel_estimate(struct thread_work *mine, CUfunction function, uint64_t blocks,
                                                  uint64_t threads)
{
    unsigned index = hash_of((uintptr_t)function ^ blocks << 20 ^ threads, FUNCTIONS);
    if (VC_LIKELY(mine->functions[index].function == (uintptr_t)function && mine->functions[index].blocks == blocks &&
                  mine->functions[index].threads == threads))
        return mine->functions[index].estimate;
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key((uintptr_t)function, blocks, threads));
    mine->functions[index].function = (uintptr_t)function;
    mine->functions[index].blocks = blocks;
    mine->functions[index].threads = threads;
    mine->functions[index].estimate = estimate;
    return estimate;
}

bool vc_work_begin_kernel(struct vc_work *work, CUstream stream, CUfunction function, uint64_t blocks, uint64_t threads)
{
    if (!any_gate_needed(vc_region_get()))
        return false;
    struct thread_work *mine = thread_work();
    return mine && begin(work, mine, stream, kernel_estimate(mine, function, blocks, threads));
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
    struct vc_mark *end = vc_mark_record(lane->tracker, work->stream, vc_load_relaxed(&captures) == 0, false);
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
    vc_add(&epoch, 1);
}

struct vc_tracker *vc_work_context_ending(CUcontext context)
{
    return vc_event_context_suspend(context);
}

void vc_work_context_ended(struct vc_tracker *tracker, bool gone)
{
    vc_event_context_resume(tracker, gone);
    if (gone)
        vc_add(&epoch, 1);
}
