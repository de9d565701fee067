/* Trackers and marks: recording them beside the application's work, and the queue that the helper works off. */
#include "cuda/work/tracker.h"

#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/driver/cards.h"

/* The helper makes an event in microseconds; on a busy machine it has to be let run first. */
static const uint64_t SPARE_WAIT_NS = 20000000;
static const uint64_t LAST_LOOK_NS = 50000000;

static pthread_mutex_t trackers_mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t trackers_idle = PTHREAD_COND_INITIALIZER;
static struct vc_tracker *trackers;
bool (*vc_stand_in)(uint64_t *next_ns);
static struct vc_tracker *in_use; /* the helper works on it right now */
static uint64_t trackers_changes;
static uint32_t on_their_way; /* intervals of all trackers */

/* --- the bell --- */

static uint32_t wake_word;
static uint64_t awake_at_ns; /* when the helper will look next; UINT64_MAX: not by itself; 0: it is awake */

static uint64_t rung_ns;       /* when it was first woken since it last was awake; 0: it was not */
static uint64_t awake_since_ns;

/* So late a helper has others look in its place. */
static const uint64_t MISSED_NS = 20000000;

static void wake(void)
{
    uint64_t no = 0; /* before the word: the helper reads that first */
    __atomic_compare_exchange_n(&rung_ns, &no, vc_now_ns(), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    vc_add(&wake_word, 1);
    syscall(SYS_futex, &wake_word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL, NULL, 0);
}

void vc_bell_expect(uint64_t expected_ns)
{
    uint64_t awake_at = vc_load(&awake_at_ns);
    if (awake_at == 0) { /* it may have passed by already: make it go round once more, or wake it if it is asleep by now */
        vc_add(&wake_word, 1);
        awake_at = vc_load(&awake_at_ns);
    }
    if (awake_at > expected_ns + VC_LOOK_NS)
        wake();
}

void vc_bell_kick(void)
{
    if (vc_load(&on_their_way) != 0)
        wake();
}

uint32_t vc_bell_awake(void)
{
    uint32_t word = vc_load(&wake_word);
    vc_store(&awake_since_ns, vc_now_ns());
    vc_store(&rung_ns, 0);
    vc_store(&awake_at_ns, 0); /* whoever submits need not wake us, we look at the word again */
    return word;
}

void vc_bell_started(void)
{
    vc_store(&awake_since_ns, vc_now_ns());
}

bool vc_bell_missed(uint64_t now_ns)
{
    uint64_t awake_at = vc_load(&awake_at_ns), rung = vc_load(&rung_ns);
    uint64_t since = awake_at == 0 ? vc_load(&awake_since_ns) : awake_at;
    since = rung != 0 ? vc_earlier(since, rung) : since;
    return since < now_ns && now_ns - since > MISSED_NS;
}

void vc_bell_sleep(uint64_t until_ns, uint32_t word)
{
    vc_store(&awake_at_ns, until_ns);
    uint64_t now = vc_now_ns();
    if (until_ns <= now)
        return;
    uint64_t sleep = until_ns - now;
    struct timespec timeout = {.tv_sec = (time_t)(sleep / 1000000000u), .tv_nsec = (long)(sleep % 1000000000u)};
    syscall(SYS_futex, &wake_word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, word, until_ns == UINT64_MAX ? NULL : &timeout, NULL, 0);
}

/* --- trackers --- */

static bool driver_can_measure(void)
{
    return vc_real.cuEventCreate && vc_real.cuEventRecord && vc_real.cuEventQuery && vc_real.cuEventElapsedTime &&
           vc_real.cuStreamCreate && vc_real.cuCtxSetCurrent && vc_real.cuThreadExchangeStreamCaptureMode;
}

static struct vc_tracker *find_tracker(CUcontext context)
{
    struct vc_tracker *tracker = trackers;
    while (tracker && tracker->context != context)
        tracker = tracker->next;
    return tracker;
}

static struct vc_tracker *make_tracker(struct vc_tracker *tracker, CUcontext context, struct vc_gate *gate)
{
    pthread_condattr_t clock;
    pthread_condattr_init(&clock);
    pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
    pthread_mutex_init(&tracker->mutex, NULL);
    pthread_cond_init(&tracker->changed, &clock);
    pthread_condattr_destroy(&clock);
    tracker->context = context;
    tracker->gate = gate;
    tracker->last = &tracker->first;
    tracker->references = 1; /* the list's */
    tracker->next = trackers;
    trackers = tracker;
    trackers_changes++;
    return tracker;
}

struct vc_tracker *vc_tracker_get(CUcontext context, struct vc_gate *gate, struct vc_tracker **spare)
{
    if (!driver_can_measure())
        return NULL;
    pthread_mutex_lock(&trackers_mutex);
    struct vc_tracker *tracker = find_tracker(context);
    bool made = !tracker;
    if (made) {
        tracker = make_tracker(*spare, context, gate);
        *spare = NULL;
    }
    vc_add(&tracker->references, 1);
    pthread_mutex_unlock(&trackers_mutex);
    if (made)
        vc_bell_expect(0); /* for spare marks */
    return tracker;
}

struct vc_tracker *vc_tracker_find(CUcontext context)
{
    pthread_mutex_lock(&trackers_mutex);
    struct vc_tracker *tracker = find_tracker(context);
    if (tracker)
        vc_add(&tracker->references, 1);
    pthread_mutex_unlock(&trackers_mutex);
    return tracker;
}

void vc_tracker_release(struct vc_tracker *tracker)
{
    if (!tracker || vc_sub(&tracker->references, 1) != 0)
        return;
    /* Its events went with the context, or will: it is only ever taken from the list when the context goes. */
    pthread_mutex_destroy(&tracker->mutex);
    pthread_cond_destroy(&tracker->changed);
    free(tracker);
}

uint64_t vc_trackers_round(uint64_t (*look)(struct vc_tracker *))
{
    uint64_t next = UINT64_MAX;
    pthread_mutex_lock(&trackers_mutex);
    uint64_t list = trackers_changes;
    for (struct vc_tracker *tracker = trackers; tracker; tracker = tracker->next) {
        if (tracker->suspended != 0)
            continue;
        in_use = tracker;
        pthread_mutex_unlock(&trackers_mutex);
        uint64_t wanted = look(tracker);
        next = wanted < next ? wanted : next;
        pthread_mutex_lock(&tracker->mutex);
        tracker->looks++;
        pthread_cond_broadcast(&tracker->changed);
        pthread_mutex_unlock(&tracker->mutex);
        pthread_mutex_lock(&trackers_mutex);
        in_use = NULL;
        pthread_cond_broadcast(&trackers_idle);
        if (list != trackers_changes) { /* this one may be out of the list by now */
            next = 0;
            break;
        }
    }
    pthread_mutex_unlock(&trackers_mutex);
    return next;
}

/* --- marks --- */

static struct timespec deadline(uint64_t for_ns)
{
    uint64_t at = vc_now_ns() + for_ns;
    return (struct timespec){.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
}

static struct vc_mark *take_spare(struct vc_tracker *tracker)
{
    struct timespec until = {0, 0};
    pthread_mutex_lock(&tracker->mutex);
    while (!tracker->spare && !tracker->gone && !tracker->broken && tracker->under_way_count < VC_MOST_UNDER_WAY) {
        if (until.tv_sec == 0)
            until = deadline(SPARE_WAIT_NS);
        pthread_mutex_unlock(&tracker->mutex);
        vc_bell_expect(0);
        uint64_t again;
        bool stood_in = vc_stand_in(&again);
        pthread_mutex_lock(&tracker->mutex);
        if (tracker->spare)
            break;
        if (stood_in || pthread_cond_timedwait(&tracker->changed, &tracker->mutex, &until) != 0)
            break;
    }
    struct vc_mark *mark = tracker->under_way_count < VC_MOST_UNDER_WAY ? tracker->spare : NULL;
    if (mark) {
        tracker->spare = mark->next;
        tracker->spare_count--;
    }
    bool few = tracker->spare_count < VC_SPARE_MARKS_LOW;
    pthread_mutex_unlock(&tracker->mutex);
    if (few)
        vc_bell_expect(0);
    return mark;
}

bool vc_mark_is_spare(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&tracker->mutex);
    bool spare = tracker->spare && tracker->under_way_count < VC_MOST_UNDER_WAY;
    pthread_mutex_unlock(&tracker->mutex);
    return spare;
}

static void put_spare(struct vc_tracker *tracker, struct vc_mark *mark)
{
    pthread_mutex_lock(&tracker->mutex);
    bool gone = tracker->gone;
    if (!gone) {
        mark->next = tracker->spare;
        tracker->spare = mark;
        tracker->spare_count++;
        pthread_cond_broadcast(&tracker->changed);
    }
    pthread_mutex_unlock(&tracker->mutex);
    if (gone)
        free(mark);
}

bool vc_mark_make(struct vc_tracker *tracker)
{
    struct vc_mark *mark = calloc(1, sizeof *mark);
    if (!mark || vc_real.cuEventCreate(&mark->event, 0) != CUDA_SUCCESS) {
        free(mark);
        return false;
    }
    put_spare(tracker, mark);
    return true;
}

struct vc_mark *vc_mark_record(struct vc_tracker *tracker, CUstream stream)
{
    struct vc_mark *mark = tracker ? take_spare(tracker) : NULL;
    if (!mark)
        return NULL;
    vc_add(&tracker->references, 1);
    *mark = (struct vc_mark){.event = mark->event, .tracker = tracker, .references = 1, .others = vc_gate_others(tracker->gate)};
    mark->times.recording_ns = vc_now_ns();
    if (vc_real.cuEventRecord(mark->event, stream) != CUDA_SUCCESS) {
        vc_mark_release(mark);
        return NULL;
    }
    mark->times.recorded_ns = vc_now_ns();
    return mark;
}

void vc_mark_launching(struct vc_mark *mark)
{
    if (mark)
        mark->times.begins_ns = vc_now_ns();
}

void vc_mark_launched(struct vc_mark *mark)
{
    if (!mark || mark->times.begins_ns == 0)
        return;
    uint64_t call = vc_now_ns() - mark->times.begins_ns;
    mark->times.stuck_ns = call < VC_LAUNCH_GAP_NS ? 0 : call - VC_LAUNCH_GAP_NS;
    mark->times.begins_ns += call - mark->times.stuck_ns;
}

void vc_mark_release(struct vc_mark *mark)
{
    if (!mark || vc_sub(&mark->references, 1) != 0)
        return;
    struct vc_tracker *tracker = mark->tracker;
    vc_mark_release(mark->after);
    put_spare(tracker, mark);
    vc_tracker_release(tracker);
}

/* Pre: locked. */
static void append(struct vc_tracker *tracker, struct vc_under_way *entry)
{
    vc_add(&on_their_way, 1);
    *tracker->last = entry;
    tracker->last = &entry->next;
    tracker->under_way_count++;
}

void vc_mark_submit(struct vc_mark *from, struct vc_mark *to, CUstream stream, const struct vc_lane_step *step)
{
    struct vc_tracker *tracker = to->tracker;
    struct vc_under_way *entry = &to->interval;
    vc_add(&to->references, 1);
    if (from)
        vc_add(&from->references, 1);
    entry->from = from;
    entry->to = to;
    entry->stream = stream;
    entry->epoch = vc_visit_epoch();
    entry->next = NULL;
    entry->interval = step->interval;
    entry->interval.measurable = step->interval.loose || from;
    entry->distinct = step->distinct;
    for (unsigned i = 0; i < step->distinct; i++)
        entry->learners[i] = step->learners[i];
    uint64_t now = vc_now_ns();
    uint64_t expected = vc_load_relaxed(&tracker->gate->finish_ns);
    entry->expected_ns = expected > now ? expected : now;
    pthread_mutex_lock(&tracker->mutex);
    append(tracker, entry);
    pthread_mutex_unlock(&tracker->mutex);
    vc_bell_expect(step->interval.risk_ns != 0 ? now : entry->expected_ns);
}

void vc_mark_missing(struct vc_tracker *tracker, const struct vc_mark *from, CUstream stream, const struct vc_lane_step *step)
{
    uint64_t now = vc_now_ns();
    struct vc_under_way *entry = NULL;
    pthread_mutex_lock(&tracker->mutex);
    for (unsigned i = 0; i < VC_MOST_UNMARKED && !entry; i++)
        if (!tracker->unmarked[i].stream)
            entry = &tracker->unmarked[i];
    if (entry) {
        *entry = (struct vc_under_way){.stream = stream, .epoch = vc_visit_epoch(), .interval = step->interval, .expected_ns = now};
        struct vc_interval *interval = &entry->interval;
        if (interval->from_ns == 0)
            interval->from_ns = from ? from->times.recording_ns : now;
        interval->measurable = interval->loose = true;
        interval->others_then = vc_gate_others(tracker->gate);
        append(tracker, entry);
    } else { /* what is waited for already is charged until then */
        tracker->unmarked[0].stream = stream;
        tracker->unmarked[0].epoch = vc_visit_epoch();
    }
    pthread_mutex_unlock(&tracker->mutex);
    if (!entry) {
        struct vc_interval with_it = step->interval;
        with_it.measurable = false;
        vc_gate_seen(tracker->gate, now, &with_it);
    }
    vc_bell_expect(now);
}

/* --- what was launched without a mark --- */

/* Pre: locked. The stream's place, or one that is free. */
static struct vc_left_stream *place_of(struct vc_tracker *tracker, CUstream stream)
{
    uint64_t first = ((uintptr_t)stream * UINT64_C(0x9e3779b97f4a7c15)) >> 57;
    struct vc_left_stream *place = NULL;
    for (unsigned i = 0; i < VC_LEFT_PLACES; i++) {
        struct vc_left_stream *left = &tracker->left[(first + i) % VC_STREAMS_LEFT];
        if (left->stream == stream && !left->gone)
            return left;
        if (!place && !left->stream)
            place = left;
    }
    return place;
}

bool vc_tracker_left(struct vc_tracker *tracker, CUstream stream, uint64_t *stamp, struct vc_mark *begins, uint64_t work_ns)
{
    if (!tracker)
        return true;
    struct vc_mark *before = NULL;
    pthread_mutex_lock(&tracker->mutex);
    struct vc_left_stream *place = place_of(tracker, stream);
    if (place) {
        bool several = place->of_several || (place->stream && place->stamp != *stamp);
        before = place->begins;
        begins = several ? NULL : begins;
        if (begins)
            vc_add(&begins->references, 1);
        *stamp = ++tracker->launches;
        *place = (struct vc_left_stream){.stream = stream, .of_several = several, .stamp = *stamp, .begins = begins, .work_ns = work_ns};
        vc_gate_predicted(tracker->gate, &place->done_ns, &place->launched_ns);
    }
    pthread_mutex_unlock(&tracker->mutex);
    vc_mark_release(before);
    return place;
}

void vc_left_done(struct vc_tracker *tracker, struct vc_left_stream *place, uint64_t stamp)
{
    struct vc_mark *begins = NULL;
    pthread_mutex_lock(&tracker->mutex);
    if (place->stamp == stamp) {
        begins = place->begins;
        *place = (struct vc_left_stream){0};
    }
    pthread_mutex_unlock(&tracker->mutex);
    vc_mark_release(begins);
}

void vc_tracker_followed(struct vc_tracker *tracker, CUstream stream, uint64_t stamp)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_left_stream *place = place_of(tracker, stream);
    bool own = place && place->stream && !place->of_several;
    pthread_mutex_unlock(&tracker->mutex);
    if (own)
        vc_left_done(tracker, place, stamp);
}

/* Pre: locked. */
static struct vc_hosted_stream *find_hosted(struct vc_tracker *tracker, CUstream stream)
{
    for (unsigned i = 0; i < VC_STREAMS_HOSTED; i++)
        if (tracker->hosted[i].stream == stream)
            return &tracker->hosted[i];
    return NULL;
}

struct vc_left_stream vc_left_look(struct vc_tracker *tracker, unsigned place)
{
    struct vc_left_stream none = {0};
    if (!vc_load_relaxed(&tracker->left[place].stream))
        return none;
    pthread_mutex_lock(&tracker->mutex);
    struct vc_left_stream left = tracker->left[place];
    const struct vc_hosted_stream *hosted = left.stream ? find_hosted(tracker, left.stream) : NULL;
    left.hosted = hosted && vc_now_ns() <= hosted->until_ns;
    if (left.begins)
        vc_add(&left.begins->references, 1);
    pthread_mutex_unlock(&tracker->mutex);
    return left;
}

bool vc_left_visit(struct vc_tracker *tracker, const struct vc_left_stream *place, uint64_t stamp)
{
    if (!vc_visit_begin_living())
        return false;
    pthread_mutex_lock(&tracker->mutex); /* whoever destroys it has taken it out before, and waits for visits to end */
    bool lives = place->stamp == stamp && !place->gone;
    pthread_mutex_unlock(&tracker->mutex);
    if (!lives)
        vc_visit_end();
    return lives;
}

void vc_tracker_mark_left(struct vc_tracker *tracker, CUstream stream, struct vc_mark *begins)
{
    struct vc_lane_step step = {.interval = {.loose = !begins, .measurable = true, .paused = true}};
    if (!begins)
        step.interval.from_ns = vc_load_relaxed(&tracker->gate->finish_ns);
    step.interval.others_then = vc_gate_others(tracker->gate);
    step.interval.launched_ns = vc_gate_marked(tracker->gate, 0);
    struct vc_mark *end = vc_mark_record(tracker, stream);
    if (end)
        vc_mark_submit(begins, end, stream, &step);
    else
        vc_mark_missing(tracker, begins, stream, &step);
    vc_mark_release(end);
}

/* Those of one context that have work under way; what is idle is forgotten. */
static void mark_left_of(struct vc_tracker *tracker, CUstream stream)
{
    bool inside = false, entered = false;
    for (unsigned i = 0; i < VC_STREAMS_LEFT; i++) {
        struct vc_left_stream left = vc_left_look(tracker, i);
        bool asked = left.stream && !left.gone && (stream ? left.stream == stream : !vc_stream_of_context(left.stream));
        if (asked && !inside) {
            entered = vc_context_enter(tracker->context);
            inside = true;
        }
        if (asked && vc_left_visit(tracker, &tracker->left[i], left.stamp)) {
            bool may = left.stream != CU_STREAM_LEGACY || !vc_visit_captures();
            if (may && !vc_stream_captures(left.stream) && vc_real.cuStreamQuery(left.stream) == CUDA_ERROR_NOT_READY)
                vc_tracker_mark_left(tracker, left.stream, left.begins);
            if (may)
                vc_left_done(tracker, &tracker->left[i], left.stamp);
            vc_visit_end();
        }
        vc_mark_release(left.begins);
    }
    if (inside)
        vc_context_leave(entered);
}

static struct vc_left_stream *find_left(struct vc_tracker *tracker, CUstream stream, uint64_t *stamp)
{
    struct vc_left_stream *place = NULL;
    pthread_mutex_lock(&tracker->mutex);
    for (unsigned i = 0; i < VC_STREAMS_LEFT && !place; i++)
        if (tracker->left[i].stream == stream && !tracker->left[i].gone)
            place = &tracker->left[i];
    *stamp = place ? place->stamp : 0;
    pthread_mutex_unlock(&tracker->mutex);
    return place;
}

static bool left_is_busy(struct vc_tracker *tracker, const struct vc_left_stream *place, CUstream stream, uint64_t stamp)
{
    if (!vc_left_visit(tracker, place, stamp))
        return false;
    bool entered = vc_context_enter(tracker->context);
    bool busy = !vc_visit_captures() && vc_real.cuStreamQuery(stream) == CUDA_ERROR_NOT_READY;
    vc_context_leave(entered);
    vc_visit_end();
    return busy;
}

/* While anything captures nobody may ask the legacy stream, and a mark on it would put others' work in order (a callback there may wait for just that work):
 * so the capture begins a little later, when it is done. What is not done long after it should have been is known to be long. */
static void follow_legacy(struct vc_tracker *tracker, CUstream legacy)
{
    uint64_t stamp, now = vc_now_ns(), until = vc_earlier(vc_load_relaxed(&tracker->gate->finish_ns), now + VC_BUCKET_NS) + VC_REST_NS;
    struct vc_left_stream *place = find_left(tracker, legacy, &stamp);
    for (; place && left_is_busy(tracker, place, legacy, stamp); now = vc_now_ns()) {
        if (now >= until) {
            pthread_mutex_lock(&tracker->mutex);
            place->overdue = place->stamp == stamp;
            pthread_mutex_unlock(&tracker->mutex);
            return;
        }
        vc_sleep_ns(VC_LOOK_NS);
    }
}

/* Once for each tracker there is; other threads' trackers may come and go meanwhile. */
static void each_tracker(void (*call)(struct vc_tracker *, CUstream), CUstream stream)
{
    static uint64_t rounds;
    pthread_mutex_lock(&trackers_mutex);
    uint64_t round = ++rounds;
    for (struct vc_tracker *tracker = trackers; tracker;) {
        if (tracker->round >= round || tracker->suspended != 0) {
            tracker = tracker->next;
            continue;
        }
        tracker->round = round;
        vc_add(&tracker->references, 1);
        pthread_mutex_unlock(&trackers_mutex);
        call(tracker, stream);
        vc_tracker_release(tracker);
        pthread_mutex_lock(&trackers_mutex);
        tracker = trackers;
    }
    pthread_mutex_unlock(&trackers_mutex);
}

void vc_trackers_mark_left(CUstream stream)
{
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the thread may be capturing another stream */
    if (!vc_real.cuStreamQuery || !driver_can_measure())
        return;
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    each_tracker(mark_left_of, stream);
    if (!stream)
        each_tracker(follow_legacy, CU_STREAM_LEGACY);
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
}

void vc_tracker_mark_left_on(struct vc_tracker *tracker, CUstream stream)
{
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* the thread may be capturing another stream */
    if (!vc_real.cuStreamQuery)
        return;
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    mark_left_of(tracker, stream);
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
}

/* For so long nothing is launched there without a mark. */
static const uint64_t HOSTED_NS = 1000000000;

/* Pre: locked. */
static struct vc_hosted_stream *make_hosted(struct vc_tracker *tracker, CUstream stream)
{
    struct vc_hosted_stream *oldest = &tracker->hosted[0];
    for (unsigned i = 1; i < VC_STREAMS_HOSTED; i++)
        if (tracker->hosted[i].number < oldest->number)
            oldest = &tracker->hosted[i];
    tracker->hosts_forgotten = vc_later(tracker->hosts_forgotten, oldest->number);
    *oldest = (struct vc_hosted_stream){.stream = stream};
    return oldest;
}

void vc_tracker_hosts(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t left_stamp)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    struct vc_left_stream *left = place_of(tracker, stream);
    bool left_there = left && left->stream, others = !lane || (left_there && (left->of_several || left->stamp != left_stamp));
    if (others && !hosted)
        hosted = make_hosted(tracker, stream);
    if (hosted && (others || hosted->launcher != lane)) {
        hosted->number = tracker->hosts + 1;
        vc_store_relaxed(&tracker->hosted_until_ns, vc_now_ns() + HOSTED_NS);
        hosted->until_ns = tracker->hosted_until_ns;
        vc_store_relaxed(&tracker->hosts, hosted->number);
    }
    pthread_mutex_unlock(&tracker->mutex);
    if (others && left_there)
        vc_tracker_mark_left_on(tracker, stream);
}

bool vc_tracker_is_hosted(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t *known, bool *since)
{
    uint64_t now = vc_now_ns(), before = *known;
    *since = false;
    if (VC_LIKELY(vc_load_relaxed(&tracker->hosts) == before && now > vc_load_relaxed(&tracker->hosted_until_ns)))
        return false;
    pthread_mutex_lock(&tracker->mutex);
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    *since = (hosted ? hosted->number : tracker->hosts_forgotten) > before;
    *known = tracker->hosts;
    bool lately = hosted && now <= hosted->until_ns;
    if (hosted)
        hosted->launcher = lane;
    pthread_mutex_unlock(&tracker->mutex);
    return *since || lately;
}

static void stream_gone(struct vc_tracker *tracker, CUstream stream)
{
    pthread_mutex_lock(&tracker->mutex);
    for (unsigned i = 0; i < VC_STREAMS_LEFT; i++)
        if (tracker->left[i].stream == stream)
            tracker->left[i].gone = true;
    struct vc_hosted_stream *hosted = find_hosted(tracker, stream);
    if (hosted)
        *hosted = (struct vc_hosted_stream){0};
    pthread_mutex_unlock(&tracker->mutex);
}

void vc_trackers_stream_gone(CUstream stream)
{
    each_tracker(stream_gone, stream);
}

/* --- the queue --- */

void vc_mark_unlink(struct vc_tracker *tracker, struct vc_under_way **link)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_under_way *entry = *link;
    *link = entry->next;
    if (!entry->next)
        tracker->last = link;
    tracker->under_way_count--;
    pthread_mutex_unlock(&tracker->mutex);
    vc_sub(&on_their_way, 1);
}

/* --- the end of a context, and of everything in a forked child --- */

/* What the helper did not see end went with the context: it had the card from its begin until now, if it had begun. */
static void drop_under_way(struct vc_tracker *tracker)
{
    struct vc_under_way *entry = tracker->first;
    while (entry) {
        struct vc_under_way *next = entry->next;
        struct vc_interval lost = entry->interval;
        uint64_t now = vc_now_ns();
        if (lost.measurable && lost.from_ns != 0)
            vc_gate_progress(tracker->gate, now, &lost);
        lost.measurable = false;
        vc_gate_seen(tracker->gate, now, &lost);
        vc_mark_release(entry->from);
        vc_mark_release(entry->to);
        vc_sub(&on_their_way, 1);
        entry = next;
    }
    tracker->first = NULL;
    tracker->last = &tracker->first;
    tracker->under_way_count = 0;
}

/* Let the helper go through the queue once more, from its beginning. */
static void have_it_looked_at(struct vc_tracker *tracker)
{
    struct timespec until = deadline(LAST_LOOK_NS);
    pthread_mutex_lock(&tracker->mutex);
    uint64_t wanted = tracker->looks + 2; /* one round may be half done */
    bool late = false;
    while (tracker->first && tracker->looks < wanted && !late) {
        pthread_mutex_unlock(&tracker->mutex);
        uint64_t again;
        vc_bell_expect(0);
        bool stood_in = vc_stand_in(&again);
        pthread_mutex_lock(&tracker->mutex);
        late = !stood_in && pthread_cond_timedwait(&tracker->changed, &tracker->mutex, &until) != 0;
    }
    pthread_mutex_unlock(&tracker->mutex);
}

struct vc_tracker *vc_tracker_suspend(CUcontext context)
{
    struct vc_tracker *tracker = vc_tracker_find(context);
    if (!tracker)
        return NULL;
    if (vc_real.cuStreamQuery)
        mark_left_of(tracker, NULL);
    have_it_looked_at(tracker);
    pthread_mutex_lock(&trackers_mutex);
    tracker->suspended++;
    while (in_use == tracker) /* the helper only makes calls that return at once */
        pthread_cond_wait(&trackers_idle, &trackers_mutex);
    pthread_mutex_unlock(&trackers_mutex);
    return tracker;
}

/* Pre: locked. Two threads may see one context end; it leaves the list once. */
static bool take_out(struct vc_tracker *tracker)
{
    for (struct vc_tracker **link = &trackers; *link; link = &(*link)->next)
        if (*link == tracker) {
            *link = tracker->next;
            trackers_changes++;
            return true;
        }
    return false;
}

void vc_tracker_resume(struct vc_tracker *tracker, bool gone)
{
    if (!tracker)
        return;
    pthread_mutex_lock(&trackers_mutex);
    bool out = gone && take_out(tracker);
    if (!gone)
        tracker->suspended--; /* what is gone stays suspended */
    pthread_mutex_unlock(&trackers_mutex);
    if (out) {
        pthread_mutex_lock(&tracker->mutex);
        tracker->gone = true;
        struct vc_mark *spare = tracker->spare;
        tracker->spare = NULL;
        tracker->spare_count = 0;
        pthread_cond_broadcast(&tracker->changed);
        pthread_mutex_unlock(&tracker->mutex);
        drop_under_way(tracker);
        for (unsigned i = 0; i < VC_STREAMS_LEFT; i++)
            vc_left_done(tracker, &tracker->left[i], tracker->left[i].stamp);
        while (spare) {
            struct vc_mark *next = spare->next;
            free(spare);
            spare = next;
        }
        vc_tracker_release(tracker); /* the list's */
    } else {
        vc_bell_expect(0);
    }
    vc_tracker_release(tracker);
}

void vc_trackers_forked(void)
{
    pthread_mutex_init(&trackers_mutex, NULL);
    pthread_cond_init(&trackers_idle, NULL);
    trackers = NULL; /* the parent's; its memory here is left alone */
    in_use = NULL;
    vc_store_relaxed(&awake_at_ns, 0);
    vc_store_relaxed(&awake_since_ns, 0);
    vc_store_relaxed(&rung_ns, 0);
    vc_store_relaxed(&on_their_way, 0);
}
