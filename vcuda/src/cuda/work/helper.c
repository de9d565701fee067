/* The helper thread: sees marks being reached, turns their times into CLOCK_MONOTONIC and settles what was charged. */
#include "cuda/work/helper.h"

#include <signal.h>
#include <sys/prctl.h>

#include "base/clock.h"
#include "cuda/work/bell.h"
#include "cuda/work/capture.h"
#include "cuda/work/clock.h"
#include "cuda/work/gates.h"
#include "cuda/work/hosted.h"
#include "cuda/work/left.h"
#include "cuda/work/mark.h"
#include "cuda/work/probe.h"
#include "cuda/work/stops.h"
#include "cuda/work/visit.h"

static const uint64_t BEGIN_LOOK_NS = 200000;
/* An operation is no longer on its way to the card: what has not begun by then waits for something else than the card, whatever that is. */
static const uint64_t ON_ITS_WAY_NS = 30000;

/* What nobody may ask about any more: then it is over, as far as we know. */
static const uint64_t UNASKED_NS = 5000000000u;
/* What may not be asked just now, because a capture begins, can be for a moment within this. */
static const uint64_t ASK_AGAIN_NS = 20000000;

static uint32_t started;
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER; /* held by whoever looks */

void vc_helper_forked(void)
{
    pthread_mutex_init(&looking, NULL);
    vc_store_relaxed(&started, 0);
}

/* --- settling --- */

/* Where the interval lies, by its end: its begin may have been placed by what was known of the clock then. */
static void place(struct vc_tracker *tracker, struct vc_interval *interval, const struct vc_mark *from, const struct vc_mark *to)
{
    uint64_t lasted = from && to->times.reached_ns != 0 ? vc_clock_between_ns(from, to) : 0, placed = interval->from_ns;
    if (lasted == 0)
        return;
    vc_interval_begin(interval, &from->times, to->times.reached_ns - lasted, to->times.reached_ns, vc_clock_uncertain_ns(tracker));
    if (placed == 0)
        return;
    if (vc_clock_moved(placed, interval->from_ns)) {
        vc_gate_clock_moved(tracker->gate);
        interval->covered_until_ns = interval->uncovered_ns = 0;
    } else {
        interval->from_ns = placed;
    }
}

/* Whether work on another stream had begun by then, and was not seen to end. Streams that run beside each other are marked at both ends. */
static bool is_beside(struct vc_tracker *tracker, CUstream stream, uint64_t at_ns)
{
    bool beside = false;
    pthread_mutex_lock(&tracker->mutex);
    for (const struct vc_under_way *other = tracker->first; other && !beside; other = other->next) {
        uint64_t begun_ns = other->from ? other->from->times.reached_ns : other->interval.from_ns;
        beside = other->stream != stream && begun_ns != 0 && begun_ns < at_ns;
    }
    pthread_mutex_unlock(&tracker->mutex);
    return beside;
}

/* A mark that is not behind host work is reached at once while the card is another stream's of its context. */
static void open_interval(struct vc_tracker *tracker, struct vc_under_way *entry)
{
    const struct vc_mark *from = entry->from;
    struct vc_interval *interval = &entry->interval;
    bool beside = from && from->behind && vc_gate_beside(tracker->gate, interval->from_ns) && is_beside(tracker, entry->stream, interval->from_ns);
    vc_interval_open(interval, from && from->alone && !beside, &tracker->slice);
}

static void notify(const struct vc_tracker *tracker)
{
    if (vc_load(&tracker->gate->waiting_threads) != 0)
        vc_gate_notify(tracker->gate);
}

/* Where the stream was idle before the mark that would be the host's pause, too. */
static void learn_elsewhere(const struct vc_mark *behind)
{
    uint64_t took = vc_clock_between_ns(behind->after, behind), known = vc_estimate_cost(behind->elsewhere);
    bool idle = behind->times.reached_ns <= behind->times.recorded_ns + VC_LOOK_NS;
    if (took == 0 || (idle && (known == 0 || took > known)))
        return;
    if (known == 0)
        vc_estimate_set(behind->elsewhere, took);
    else
        vc_estimate_learn(behind->elsewhere, known, took, known, VC_EVIDENCE_UPPER_BOUND); /* others may have had the card meanwhile */
}

static void settle(struct vc_tracker *tracker, struct vc_under_way *entry, uint64_t now_ns)
{
    struct vc_interval *interval = &entry->interval;
    struct vc_mark *from = entry->from, *to = entry->to;
    if (from && from->times.reached_ns == 0)
        from->times.reached_ns = vc_clock_when(tracker, from, now_ns);
    to->times.reached_ns = vc_clock_when(tracker, to, now_ns);
    if (from && from->times.reached_ns == 0) /* no clock, or another thread had the event captured: between these it was */
        from->times.reached_ns = from->times.recording_ns;
    if (to->times.reached_ns == 0 && tracker->broken)
        to->times.reached_ns = now_ns;
    struct vc_gate_others before = from ? from->others : interval->others_then;
    struct vc_gate_others now = vc_gate_others(tracker->gate);
    vc_interval_end(interval, &to->times);
    place(tracker, interval, from, to);
    if (from && !from->noticed) /* what was known when it was recorded */
        before.siblings_ns = vc_others_at(&before, from->times.recorded_ns, &now, now_ns, interval->from_ns).siblings_ns;
    to->others = vc_others_at(&before, interval->from_ns, &now, now_ns, interval->to_ns);
    interval->behind = from && from->behind;
    if (from && from->after)
        learn_elsewhere(from);
    bool late = from && !from->noticed && interval->from_ns != 0 && interval->to_ns > interval->from_ns && vc_seen_late(now_ns, interval->to_ns);
    if (from && !from->noticed && !late)
        vc_others_between(tracker->look.at_ns > from->times.recorded_ns ? &tracker->look : &(struct vc_others_look){from->times.recorded_ns, from->others},
                          &(struct vc_others_look){now_ns, now}, interval, &before, &to->others);
    if (from && !from->noticed && from->times.reached_ns != 0) { /* it began and ended between two looks: it does not wait any more */
        from->noticed = true;
        vc_gate_began(tracker->gate, from->times.reached_ns);
    }
    vc_store_release(&to->seen, true);
    interval->others_gpu_ns = vc_gate_others_ns(tracker->gate, now_ns, &before, &to->others);
    if (VC_UNLIKELY(late) && to->others.tenants_ns > before.tenants_ns)
        interval->others_gpu_ns -= to->others.tenants_ns - before.tenants_ns -
                                   vc_others_in_late(&tracker->latest, interval, from->times.recorded_ns, before.tenants_ns, to->others.tenants_ns);
    open_interval(tracker, entry);
    interval->measurable = interval->measurable && interval->from_ns != 0 && to->times.reached_ns > interval->from_ns;
    struct vc_settlement settlement = vc_gate_seen(tracker->gate, now_ns, interval);
    vc_interval_close(interval, &tracker->slice);
    vc_gate_learnt(tracker->gate, settlement.charged_ns, vc_lane_learn(entry->learners, entry->distinct, interval, &settlement));
    notify(tracker);
    vc_mark_release(from);
    vc_mark_release(to);
}

/* What no mark tells the end of lasted until now. Nothing is learnt of it. */
static void settle_unmarked(struct vc_tracker *tracker, struct vc_under_way *entry, uint64_t now_ns)
{
    struct vc_interval interval = entry->interval;
    struct vc_gate_others now = vc_gate_others(tracker->gate);
    pthread_mutex_lock(&tracker->mutex);
    entry->stream = NULL;
    pthread_mutex_unlock(&tracker->mutex);
    interval.to_ns = now_ns;
    interval.others_gpu_ns = vc_gate_others_ns(tracker->gate, now_ns, &interval.others_then, &now);
    vc_gate_seen(tracker->gate, now_ns, &interval);
    notify(tracker);
    if (entry->to) {
        entry->to->times.reached_ns = now_ns;
        entry->to->noticed = true;
        vc_store_release(&entry->to->seen, true);
    }
    vc_mark_release(entry->from);
    vc_mark_release(entry->to);
}

static bool unmarked_is_done(const struct vc_under_way *entry, uint64_t now_ns)
{
    bool asked = false, busy = false;
    if (entry->stream != CU_STREAM_PER_THREAD && entry->epoch == vc_visit_epoch() && vc_visit_begin()) {
        asked = entry->epoch == vc_visit_epoch() && vc_capture_lets_ask(entry->stream);
        busy = asked && vc_real.cuStreamQuery(entry->stream) == CUDA_ERROR_NOT_READY;
        vc_visit_end();
    }
    return asked ? !busy : now_ns > entry->interval.from_ns + UNASKED_NS;
}

/* Its event is none any more: another thread began a capture between the launch and the record. */
static void lose_mark(struct vc_under_way *entry)
{
    struct vc_interval *interval = &entry->interval;
    entry->lost = interval->measurable = interval->loose = true;
    if (interval->from_ns == 0)
        interval->from_ns = entry->from ? entry->from->times.recording_ns : entry->to->times.recording_ns;
    interval->others_then = entry->from ? entry->from->others : entry->to->others;
}

static bool is_done(struct vc_under_way *entry, uint64_t now_ns)
{
    if (entry->to && !entry->lost) {
        CUresult answer = vc_real.cuEventQuery(entry->to->event);
        if (answer == CUDA_SUCCESS || answer == CUDA_ERROR_NOT_READY)
            return answer == CUDA_SUCCESS;
        lose_mark(entry);
    }
    return unmarked_is_done(entry, now_ns);
}

/* Whether an earlier entry of the queue is of the same stream: then this one can't have been reached before it. */
static bool behind_another(const struct vc_under_way *first, const struct vc_under_way *entry)
{
    for (; first != entry; first = first->next)
        if (first->stream == entry->stream)
            return true;
    return false;
}

/* What is not the card's work may be under way before it. */
static bool is_behind(const struct vc_mark *from)
{
    return from->behind && !(from->past && vc_clock_reached(from->past->event));
}

/* The card may be others' for a while after the launch: what they had of it then is not inside our interval. */
static bool notice_begin(struct vc_tracker *tracker, struct vc_mark *from)
{
    if (!from || from->noticed || from->times.reached_ns != 0)
        return true;
    if (!vc_clock_reached(from->event))
        return false;
    from->noticed = true;
    from->others = vc_gate_others(tracker->gate);
    from->times.reached_ns = vc_clock_when(tracker, from, vc_now_ns());
    if (from->times.reached_ns == 0 && tracker->broken)
        from->times.reached_ns = vc_now_ns();
    vc_gate_began(tracker->gate, from->times.reached_ns);
    return true;
}

/* Whether what is not the card's work usually keeps a stream longer than is worth waiting for, or for nobody knows how long. Where nobody knows what it is, it
 * may be the card's. */
static bool takes_long(const struct vc_mark *behind)
{
    if (!behind->elsewhere)
        return false;
    uint64_t ns = vc_estimate_cost(behind->elsewhere);
    return ns == 0 || ns > VC_ELSEWHERE_NS;
}

/* What was launched behind something that is not the card's work was expected too early, and too late what was launched behind other work that took less than was thought. */
static uint64_t expected_end(const struct vc_tracker *tracker, const struct vc_under_way *entry)
{
    if (entry->from && entry->from->behind)
        return vc_later(entry->expected_ns, entry->from->times.reached_ns + entry->interval.estimate_ns);
    return vc_earlier(entry->expected_ns, vc_load_relaxed(&tracker->gate->finish_ns));
}

/* It has begun and lasts longer than was thought. False: what passes is not charged yet. */
static bool charge_progress(struct vc_tracker *tracker, struct vc_under_way *entry, uint64_t now_ns)
{
    struct vc_interval *interval = &entry->interval;
    const struct vc_mark *from = entry->from;
    if (!interval->measurable)
        return true;
    if (from && interval->from_ns == 0 && from->times.reached_ns != 0)
        vc_interval_begin(interval, &from->times, from->times.reached_ns, now_ns, vc_clock_uncertain_ns(tracker));
    if (interval->from_ns == 0)
        return true;
    interval->behind = from && from->behind;
    struct vc_gate_others now = vc_gate_others(tracker->gate);
    interval->others_gpu_ns = vc_gate_others_ns(tracker->gate, now_ns, from ? &from->others : &interval->others_then, &now);
    bool late = vc_interval_is_late(interval, now_ns);
    if (late) {
        open_interval(tracker, entry);
        vc_gate_progress(tracker->gate, now_ns, interval);
    }
    bool over = interval->loose && now_ns > interval->from_ns + interval->estimate_ns && interval->others_gpu_ns < VC_LONG_OPERATION_NS;
    return late || !over;
}

static void make_spares(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&tracker->mutex);
    unsigned count = tracker->spare_count;
    pthread_mutex_unlock(&tracker->mutex);
    if (count >= VC_SPARE_MARKS_LOW)
        return;
    vc_real.cuCtxSetCurrent(tracker->context);
    for (; count < VC_SPARE_MARKS_HIGH; count++)
        if (!vc_mark_make(tracker))
            break;
}

enum answer { IDLE, BUSY, NO_ANSWER };

/* Whether a stream has work that should have been done at `done_ns`, as far as one may ask. What nobody may ask about has, until it can be asked or for as long as such
 * things may last. */
static enum answer ask_stream(struct vc_tracker *tracker, unsigned place, const struct vc_left_stream *left, uint64_t done_ns, uint64_t now_ns)
{
    enum answer answer = NO_ANSWER;
    if (vc_left_visit(tracker, &tracker->left[place], left->stamp)) {
        if (vc_capture_lets_ask(left->stream))
            answer = vc_real.cuStreamQuery(left->stream) == CUDA_ERROR_NOT_READY ? BUSY : IDLE;
        vc_visit_end();
    }
    if (answer != NO_ANSWER)
        return answer;
    if (now_ns > done_ns + UNASKED_NS)
        return IDLE;
    bool was_busy = tracker->overruns[place].stamp == left->stamp || left->gone || left->overdue;
    return was_busy || (now_ns > done_ns + ASK_AGAIN_NS && left->stream != CU_STREAM_LEGACY) ? BUSY : NO_ANSWER;
}

static void charge_overrun(struct vc_tracker *tracker, unsigned place, const struct vc_left_stream *left, uint64_t done_ns, uint64_t now_ns)
{
    struct vc_overrun *overrun = &tracker->overruns[place];
    struct vc_gate_others others = vc_gate_others(tracker->gate);
    if (overrun->stamp != left->stamp) {
        uint64_t from_ns = vc_gate_lasts_from(tracker->gate, now_ns, done_ns, left->launched_ns);
        if (from_ns >= now_ns)
            return;
        *overrun = (struct vc_overrun){.stamp = left->stamp, .interval = {.from_ns = from_ns}, .others = others};
    }
    overrun->interval.others_gpu_ns = vc_gate_others_ns(tracker->gate, now_ns, &overrun->others, &others);
    vc_gate_overruns(tracker->gate, now_ns, &overrun->interval);
}

/* When what was left there should have been done; where it has not begun by now, that is now. */
static uint64_t left_done_at(struct vc_tracker *tracker, const struct vc_left_stream *left)
{
    struct vc_mark *begins = left->begins;
    if (!begins)
        return left->done_ns;
    if (!vc_clock_reached(begins->event))
        return vc_later(left->done_ns, vc_now_ns());
    if (begins->times.reached_ns == 0 && vc_clock_is_there(tracker))
        begins->times.reached_ns = vc_clock_when(tracker, begins, vc_now_ns());
    return begins->times.reached_ns == 0 ? left->done_ns : vc_later(left->done_ns, begins->times.reached_ns + left->work_ns);
}

/* What was launched last has no mark behind it until the next launch. Where none comes, and nobody waits: nothing told whether it lasts longer than
 * such things did before, until the stream is asked. Returns when to look again. */
static uint64_t look_at_left_streams(struct vc_tracker *tracker, uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    for (unsigned i = 0; vc_real.cuStreamQuery && i < VC_STREAMS_LEFT; i++) {
        struct vc_left_stream left = vc_left_look(tracker, i);
        if (!left.stream)
            continue;
        bool was_busy = tracker->overruns[i].stamp == left.stamp;
        uint64_t done = left_done_at(tracker, &left), since = was_busy ? tracker->overruns[i].interval.from_ns : done;
        uint64_t again = vc_later(now_ns + VC_MARK_NS, done + VC_REST_NS + 1);
        enum answer answer = NO_ANSWER;
        if (was_busy || done + VC_REST_NS < now_ns)
            answer = ask_stream(tracker, i, &left, since, now_ns);
        if (answer == BUSY)
            charge_overrun(tracker, i, &left, done, now_ns);
        if (answer == IDLE)
            vc_left_done(tracker, &tracker->left[i], left.stamp);
        vc_mark_release(left.begins);
        next = answer != IDLE && again < next ? again : next;
    }
    return next;
}

/* Whether what was launched without a mark is under way, as far as one may ask. Where others put on a stream what is not the card's work, all is marked. */
static bool left_is_busy(struct vc_tracker *tracker)
{
    bool busy = false;
    for (unsigned i = 0; vc_real.cuStreamQuery && i < VC_STREAMS_LEFT && !busy; i++) {
        struct vc_left_stream left = vc_left_look(tracker, i);
        bool begun = left.stream && !vc_stream_is_hosted(tracker, left.stream) && (!left.begins || vc_clock_reached(left.begins->event));
        if (begun && vc_left_visit(tracker, &tracker->left[i], left.stamp)) {
            if (!vc_visit_captures() && !vc_capture_is(left.stream))
                busy = vc_real.cuStreamQuery(left.stream) == CUDA_ERROR_NOT_READY;
            vc_visit_end();
        }
        vc_mark_release(left.begins);
    }
    return busy;
}

/* A process that has not had the card yet has no clock either. Until its first mark is reached it had nothing that its siblings would have to pay for, should it end. (On a shared card the
 * arbiter would take it for work that lasts.) */
static void wait_without_clock(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_under_way *entry = tracker->first;
    pthread_mutex_unlock(&tracker->mutex);
    uint64_t now = vc_now_ns();
    bool queued = entry && entry->from && !is_behind(entry->from) && !vc_clock_reached(entry->from->event);
    uint64_t expected = queued ? expected_end(tracker, entry) : now;
    if (expected < now && !vc_gate_policy(tracker->gate, now).shared)
        vc_gate_overdue(tracker->gate, now, expected, true);
}

/* Look at everything under way in one context; returns when to look again. */
static uint64_t work_off(struct vc_tracker *tracker)
{
    make_spares(tracker);
    pthread_mutex_lock(&tracker->mutex);
    bool empty = !tracker->first;
    pthread_mutex_unlock(&tracker->mutex);
    vc_real.cuCtxSetCurrent(tracker->context);
    bool *sample = vc_gates_sample(tracker->gate), busy = sample && left_is_busy(tracker);
    if (busy)
        *sample = true;
    uint64_t next = vc_earlier(look_at_left_streams(tracker, vc_now_ns()), vc_probe_look(tracker));
    if (empty && !tracker->renewing)
        return next;
    bool clock = vc_clock_is_there(tracker);
    uint64_t renewed = vc_now_ns() + VC_LOOK_NS;
    next = tracker->renewing && renewed < next ? renewed : next;
    if (!clock && !tracker->broken) {
        wait_without_clock(tracker);
        return next;
    }
    /* Only this thread takes entries out; others append, under the mutex. */
    struct vc_under_way **link = &tracker->first;
    struct vc_others_look look = {vc_now_ns(), vc_gate_others(tracker->gate)};
    bool begun = false, some_wait = false, all_wait = true, for_long = false;
    uint32_t entries = 0;
    uint64_t waits_since_ns = 0, marked_ns = 0;
    for (;;) {
        pthread_mutex_lock(&tracker->mutex);
        struct vc_under_way *entry = *link;
        pthread_mutex_unlock(&tracker->mutex);
        if (!entry)
            break;
        bool behind = behind_another(tracker->first, entry);
        uint64_t now = vc_now_ns(); /* before the question: while this thread is not let run it may end */
        if (!behind && is_done(entry, now)) {
            vc_mark_unlink(tracker, link);
            if (entry->to && !entry->lost)
                settle(tracker, entry, vc_now_ns());
            else
                settle_unmarked(tracker, entry, vc_now_ns());
            continue;
        }
        if (!behind) {
            uint64_t recorded = entry->to ? entry->to->times.recorded_ns : entry->interval.from_ns;
            uint64_t poll = vc_interval_look_again(&entry->interval, recorded, entry->expected_ns, now);
            bool has_begun = notice_begin(tracker, entry->from), behind_host = !has_begun && is_behind(entry->from);
            if (!has_begun && poll > now + BEGIN_LOOK_NS)
                poll = now + BEGIN_LOOK_NS;
            begun = begun || has_begun;
            if (!has_begun && !behind_host && waits_since_ns == 0)
                waits_since_ns = entry->from->times.recording_ns;
            next = poll < next ? poll : next;
            if (sample && (has_begun || (!behind_host && now < entry->from->times.recording_ns + ON_ITS_WAY_NS)))
                *sample = true;
            uint64_t expected = expected_end(tracker, entry);
            bool paid = charge_progress(tracker, entry, now);
            if (!behind_host)
                vc_gate_on_card(tracker->gate, now);
            some_wait = some_wait || behind_host;
            all_wait = all_wait && behind_host;
            for_long = for_long || (behind_host && takes_long(entry->from));
            if (!behind_host && expected < now)
                vc_gate_overdue(tracker->gate, now, expected, paid);
        }
        marked_ns = vc_later(marked_ns, entry->interval.launched_ns);
        entries++;
        link = &entry->next;
    }
    tracker->look = look;
    if (all_wait)
        vc_gate_all_wait(tracker->gate, entries, marked_ns);
    if (some_wait && vc_gate_not_begun(tracker->gate, vc_now_ns(), for_long)) {
        notify(tracker);
        vc_gate_call_arbiter(tracker->gate);
    }
    if (waits_since_ns != 0 && !begun)
        vc_gate_waits(tracker->gate, waits_since_ns);
    return next;
}

/* --- the thread --- */

/* `held`: somebody else may have chosen when. */
static uint64_t look(bool held)
{
    vc_gates_sample_begins(held);
    uint64_t marks = vc_trackers_round(work_off), rest = vc_gates_rest(), sample = vc_gates_sample_ends();
    return vc_earlier(vc_earlier(marks, rest), sample);
}

bool vc_helper_stand_in(uint64_t *next_ns)
{
    *next_ns = UINT64_MAX;
    if (VC_LIKELY(!vc_bell_missed(vc_now_ns())) || !vc_real.cuThreadExchangeStreamCaptureMode || pthread_mutex_trylock(&looking) != 0)
        return false;
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED, cancellable; /* a thread that is cancelled in here would never unlock */
    CUcontext before = NULL;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancellable);
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    vc_real.cuCtxGetCurrent(&before);
    *next_ns = look(false);
    vc_real.cuCtxSetCurrent(before);
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    pthread_mutex_unlock(&looking);
    pthread_setcancelstate(cancellable, NULL);
    return true;
}

static void *help(void *argument)
{
    prctl(PR_SET_NAME, "vcuda-helper");
    vc_stops_started();
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    for (;;) {
        uint64_t now = vc_now_ns();
        struct vc_stop stop = vc_stops_woke(now, vc_bell_late_ns(now));
        if (VC_UNLIKELY(stop.stopped))
            vc_gates_stood_still();
        uint32_t word = vc_bell_awake();
        pthread_mutex_lock(&looking);
        uint64_t next = look(stop.held);
        pthread_mutex_unlock(&looking);
        vc_stops_sleeps();
        vc_bell_sleep(next, word);
    }
    return argument;
}

void vc_helper_start(void)
{
    uint32_t no = 0;
    vc_store_relaxed(&vc_stand_in, vc_helper_stand_in);
    if (vc_load_relaxed(&started) || !__atomic_compare_exchange_n(&started, &no, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return;
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* the application's signals are for its own threads */
    bool created = pthread_create(&thread, &attributes, help, NULL) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (created)
        vc_bell_started();
    else
        vc_store(&started, 0);
}
