/* Making, finding and dropping the lanes of a thread. */
#include "cuda/work/lanes.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/fork.h"
#include "cuda/work/bell.h"
#include "cuda/work/gates.h"
#include "cuda/work/helper.h"
#include "cuda/work/mark.h"

enum { CACHE_LINE = 64, PLACES = 8 /* in which a stream's lane may be */ };

_Static_assert(sizeof(struct vc_known_launch) == CACHE_LINE, "a launch that is known is one cache line");

__thread struct vc_known_launch *vc__known_launches __attribute__((tls_model("initial-exec")));
static uint32_t generation = 1; /* changes in a forked child, where the lanes' gates do not exist any more */
static pthread_key_t thread_end;
static pthread_once_t once = PTHREAD_ONCE_INIT;

void vc_lanes_new_epoch(void)
{
    vc_add(&vc__work_state, UINT64_C(1) << VC_EPOCH_SHIFT);
}

static void forked(void)
{
    vc_gates_forked();
    vc_add(&generation, 1);
    vc_lanes_new_epoch();
    vc_visits_forked();
    vc_trackers_forked();
    vc_bell_forked();
    vc_helper_forked();
}

VC_AT_FORK(forked);

/* --- dropping --- */

static void drop_lane(struct vc_stream_lane *lane, bool fold)
{
    if (fold) {
        vc_lane_end(&lane->lane, vc_now_ns());
        vc_mark_release(lane->open);
        vc_mark_release(lane->before);
        vc_mark_release(lane->past);
        vc_tracker_release(lane->tracker);
    }
    free(lane);
}

static void drop_lanes(struct vc_thread_work *work)
{
    bool fold = work->generation == vc_load_relaxed(&generation);
    for (unsigned i = 0; i < VC_THREAD_LANES; i++) {
        if (work->lanes[i])
            drop_lane(work->lanes[i], fold);
        work->lanes[i] = NULL;
    }
    memset(work->known, 0, sizeof work->known);
}

static void thread_ends(void *argument)
{
    struct vc_thread_work *work = argument;
    drop_lanes(work);
    vc__known_launches = NULL;
    free(work->spare);
    free(work->spare_tracker);
    free(work);
}

/* --- making --- */

static void prepare(void)
{
    pthread_key_create(&thread_end, thread_ends);
}

static void *make_aligned(size_t bytes)
{
    size_t lines = (bytes + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    void *memory = aligned_alloc(CACHE_LINE, lines);
    return memory ? memset(memory, 0, lines) : NULL;
}

static struct vc_thread_work *make_thread_work(void)
{
    pthread_once(&once, prepare);
    struct vc_thread_work *work = make_aligned(sizeof *work);
    if (!work)
        return NULL;
    work->epoch = vc_visit_epoch();
    work->generation = vc_load_relaxed(&generation);
    pthread_setspecific(thread_end, work);
    vc__known_launches = work->known;
    return work;
}

struct vc_thread_work *vc_lanes_of_thread(void)
{
    struct vc_thread_work *work = (struct vc_thread_work *)vc__known_launches;
    if (VC_UNLIKELY(!work))
        return make_thread_work();
    if (VC_UNLIKELY(work->epoch != vc_visit_epoch())) {
        drop_lanes(work);
        work->epoch = vc_visit_epoch();
        work->generation = vc_load_relaxed(&generation);
    }
    return work;
}

bool vc_lanes_reserve(void)
{
    struct vc_thread_work *work = vc_lanes_of_thread();
    if (!work)
        return false;
    if (VC_UNLIKELY(!work->spare))
        work->spare = make_aligned(sizeof *work->spare);
    if (VC_UNLIKELY(!work->spare_tracker))
        work->spare_tracker = calloc(1, sizeof *work->spare_tracker);
    return work->spare && work->spare_tracker;
}

static struct vc_stream_lane *make_lane(struct vc_thread_work *work, struct vc_stream_lane **place, int card, CUcontext context,
                                        CUstream stream, void (*ends)(struct vc_stream_lane *))
{
    if (!vc_lanes_reserve()) /* several cards in one call; else it was before */
        return NULL;
    struct vc_stream_lane *lane = work->spare;
    work->spare = NULL;
    if (*place) {
        if (vc_visit_begin()) {
            ends(*place);
            vc_visit_end();
        }
        drop_lane(*place, true);
        memset(work->known, 0, sizeof work->known);
    }
    vc_lane_init(&lane->lane, vc_gates_get(card));
    lane->lane.behind = true; /* until its stream is seen to be idle: what was put there before nobody knows any more */
    lane->context = context;
    lane->stream = stream;
    vc_helper_start();
    lane->tracker = vc_tracker_get(context, lane->lane.gate, &work->spare_tracker);
    if (lane->tracker)
        vc_store_relaxed(&lane->lane.gate->watched, true);
    *place = lane;
    return lane;
}

static inline bool is_needed(int card)
{
    return card >= 0 && vc_gate_needed(vc_card((uint32_t)card)->limit);
}

/* `context`: NULL where the stream's handle is enough to know it by. */
static inline bool is_of(const struct vc_stream_lane *lane, CUcontext context, CUstream stream)
{
    return lane->stream == stream && (!context || lane->context == context);
}

/* Where its lane is, or is to be made: where another one's is, that has to go. */
static struct vc_stream_lane **place_of(struct vc_thread_work *work, CUcontext context, CUstream stream)
{
    uint64_t value = (uintptr_t)stream ^ (uintptr_t)context >> 4;
    unsigned first = (unsigned)((value * UINT64_C(0x9e3779b97f4a7c15)) >> 40);
    for (unsigned i = 0; i < PLACES; i++) {
        struct vc_stream_lane **place = &work->lanes[(first + i) % VC_THREAD_LANES];
        if (!*place || is_of(*place, context, stream))
            return place;
    }
    return &work->lanes[first % VC_THREAD_LANES];
}

struct vc_stream_lane *vc_lane_of_stream(struct vc_thread_work *work, CUstream stream, void (*ends)(struct vc_stream_lane *))
{
    CUcontext context = NULL;
    bool of_context = vc_stream_of_context(stream);
    int card = of_context ? vc_card_of_current(&context) : VC_CARD_UNKNOWN;
    if (of_context && !is_needed(card))
        return NULL;
    struct vc_stream_lane **place = place_of(work, context, stream), *lane = *place;
    if (VC_LIKELY(lane && is_of(lane, context, stream)))
        return vc_gate_needed(vc_gates_card(lane->lane.gate)->limit) ? lane : NULL;
    if (!of_context)
        card = vc_card_of_stream(stream, &context);
    return is_needed(card) ? make_lane(work, place, card, context, stream, ends) : NULL;
}

struct vc_stream_lane *vc_lane_of_stream_known(CUstream stream)
{
    struct vc_thread_work *work = (struct vc_thread_work *)vc__known_launches;
    CUcontext context = NULL;
    if (!work || work->epoch != vc_visit_epoch())
        return NULL;
    if (vc_stream_of_context(stream) && vc_real.cuCtxGetCurrent(&context) != CUDA_SUCCESS)
        return NULL;
    struct vc_stream_lane *lane = *place_of(work, context, stream);
    return lane && is_of(lane, context, stream) ? lane : NULL;
}

void vc_lanes_waited(CUcontext context, CUstream stream, uint64_t from_ns)
{
    struct vc_thread_work *work = (struct vc_thread_work *)vc__known_launches;
    if (!work || work->epoch != vc_visit_epoch())
        return;
    uint64_t now = vc_now_ns();
    for (unsigned i = 0; i < VC_THREAD_LANES; i++) {
        struct vc_stream_lane *lane = work->lanes[i];
        if (lane && (stream ? lane->stream == stream : lane->context == context) &&
            (lane->context == context || !vc_stream_of_context(lane->stream))) {
            vc_lane_waited(&lane->lane, from_ns, now, stream && lane->tracker && vc_load_relaxed(&lane->tracker->hosts) == lane->hosted);
            vc_gate_call_heir(lane->lane.gate, vc_lane_leave(&lane->lane, now));
        }
    }
}

void vc_lanes_each(CUcontext context, void (*pause)(struct vc_stream_lane *))
{
    struct vc_thread_work *work = (struct vc_thread_work *)vc__known_launches; /* not dropped here: one of them is in use */
    if (!vc_visit_begin())
        return;
    if (work && work->epoch == vc_visit_epoch())
        for (unsigned i = 0; i < VC_THREAD_LANES; i++) {
            struct vc_stream_lane *lane = work->lanes[i];
            if (lane && (!context || lane->context == context) && !vc_stream_of_context(lane->stream))
                pause(lane);
        }
    vc_visit_end();
}
