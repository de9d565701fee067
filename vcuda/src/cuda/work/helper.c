/* The helper thread: sees marks being reached, turns their times into CLOCK_MONOTONIC and settles what was charged. */
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "cuda/work/tracker.h"
#include "base/clock.h"

/* cuEventElapsedTime is a float of ms: the base must stay near for it to resolve fractions of a microsecond. */
static const uint64_t BASE_AGE_NS = 3000000000u;
static const uint64_t POLL_SHORT_NS = 50000;
static const uint64_t POLL_LONG_NS = 200000;
static const uint64_t POLL_EARLY_NS = 1000000;

static uint32_t wake_word;
static uint64_t awake_at_ns; /* when the helper will look next; UINT64_MAX: not by itself */
static uint32_t started;

static void wake(void)
{
    vc_add(&wake_word, 1);
    syscall(SYS_futex, &wake_word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL, NULL, 0);
}

void vc__helper_expect(uint64_t expected_ns)
{
    uint64_t awake_at = vc_load(&awake_at_ns);
    if (awake_at == 0) { /* it may have passed by already: make it go round once more, or wake it if it is asleep by now */
        vc_add(&wake_word, 1);
        awake_at = vc_load(&awake_at_ns);
    }
    if (awake_at > expected_ns + POLL_SHORT_NS)
        wake();
}

void vc_event_kick(void)
{
    if (vc_load_relaxed(&started) && vc_load(&awake_at_ns) != UINT64_MAX)
        wake();
}

void vc__helper_forked(void)
{
    vc_store_relaxed(&started, 0);
    vc_store_relaxed(&awake_at_ns, 0);
}

/* --- the clock of a context --- */

static bool reached(CUevent event)
{
    return vc_real.cuEventQuery(event) != CUDA_ERROR_NOT_READY;
}

static bool make_base(struct vc_tracker *tracker, CUevent *event)
{
    if (!tracker->clock_stream && vc_real.cuStreamCreate(&tracker->clock_stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        return false;
    if (!*event && vc_real.cuEventCreate(event, 0) != CUDA_SUCCESS)
        return false;
    return vc_real.cuEventRecord(*event, tracker->clock_stream) == CUDA_SUCCESS;
}

static int64_t since_base(const struct vc_tracker *tracker, CUevent event, bool *known)
{
    float milliseconds = 0;
    *known = vc_real.cuEventElapsedTime(&milliseconds, tracker->base, event) == CUDA_SUCCESS;
    return (int64_t)((double)milliseconds * 1e6);
}

/* Have a base that was reached, renewed in time. False: not yet. */
static bool have_clock(struct vc_tracker *tracker)
{
    uint64_t now = vc_now_ns();
    if (tracker->base_made_ns != 0 && !tracker->renewing && now - tracker->base_made_ns < BASE_AGE_NS)
        return true;
    if (!tracker->renewing) {
        tracker->renewing = make_base(tracker, &tracker->next_base);
        tracker->broken = !tracker->renewing && tracker->base_made_ns == 0;
    }
    if (!tracker->renewing || !reached(tracker->next_base))
        return tracker->base_made_ns != 0;
    now = vc_now_ns();
    uint64_t base_ns = now;
    if (tracker->base_made_ns != 0) {
        bool known;
        uint64_t continued = tracker->base_ns + (uint64_t)since_base(tracker, tracker->next_base, &known);
        if (known && continued < base_ns)
            base_ns = continued;
    }
    CUevent old = tracker->base;
    tracker->base = tracker->next_base;
    tracker->next_base = old;
    tracker->base_ns = base_ns;
    tracker->base_made_ns = now;
    tracker->renewing = false;
    return true;
}

/* Seen now, so it was reached before: that bounds the base's own time, which is known no better. */
static uint64_t when(struct vc_tracker *tracker, CUevent event, uint64_t now_ns)
{
    bool known;
    int64_t since = since_base(tracker, event, &known);
    if (!known)
        return 0;
    if ((int64_t)(tracker->base_ns + (uint64_t)since - now_ns) > 0)
        tracker->base_ns = now_ns - (uint64_t)since;
    return tracker->base_ns + (uint64_t)since;
}

/* --- settling --- */

static void settle(struct vc_tracker *tracker, struct vc_under_way *entry, uint64_t now_ns)
{
    struct vc_interval *interval = &entry->interval;
    struct vc_mark *from = entry->from, *to = entry->to;
    to->reached_ns = when(tracker, to->event, now_ns);
    to->others = vc_gate_others(tracker->gate);
    interval->to_ns = to->reached_ns;
    if (from && from->reached_ns == 0)
        from->reached_ns = when(tracker, from->event, now_ns);
    if (from && from->reached_ns != 0 && to->reached_ns > from->reached_ns) {
        uint64_t gap = from->gap_ns;
        uint64_t lasted = to->reached_ns - from->reached_ns;
        interval->from_ns = from->reached_ns + (gap < lasted / 2 ? gap : lasted / 2);
        interval->others_gpu_ns = vc_gate_others_ns(tracker->gate, now_ns, &from->others, &to->others);
    } else {
        interval->measurable = false;
    }
    struct vc_settlement settlement = vc_gate_seen(tracker->gate, now_ns, interval);
    vc_lane_learn(entry->learners, entry->distinct, interval, &settlement);
    if (vc_load(&tracker->gate->waiting_threads) != 0)
        vc_gate_notify(tracker->gate);
    vc_mark_release(from);
    vc_mark_release(to);
}

static void unlink_entry(struct vc_tracker *tracker, struct vc_under_way **link)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_under_way *entry = *link;
    *link = entry->next;
    if (!entry->next)
        tracker->last = link;
    tracker->under_way_count--;
    pthread_mutex_unlock(&tracker->mutex);
}

/* Whether an earlier entry of the queue is of the same stream: then this one can't have been reached before it. */
static bool behind_another(const struct vc_under_way *first, const struct vc_under_way *entry)
{
    for (; first != entry; first = first->next)
        if (first->stream == entry->stream)
            return true;
    return false;
}

static uint64_t next_poll(const struct vc_under_way *entry, uint64_t now_ns)
{
    if (entry->expected_ns > now_ns) {
        uint64_t wait = entry->expected_ns - now_ns;
        return now_ns + (wait < POLL_SHORT_NS ? POLL_SHORT_NS : wait < POLL_EARLY_NS ? wait : POLL_EARLY_NS);
    }
    uint64_t late = (now_ns - entry->expected_ns) / 4;
    return now_ns + (late < POLL_SHORT_NS ? POLL_SHORT_NS : late > POLL_LONG_NS ? POLL_LONG_NS : late);
}

/* The card may be others' for a while after the launch: what they had of it then is not inside our interval. */
static bool notice_begin(struct vc_tracker *tracker, struct vc_mark *from)
{
    if (!from || from->noticed || from->reached_ns != 0)
        return true;
    if (!reached(from->event))
        return false;
    from->noticed = true;
    from->others = vc_gate_others(tracker->gate);
    vc_gate_began(tracker->gate, when(tracker, from->event, vc_now_ns()));
    return true;
}

/* Look at everything under way in one context; returns when to look again. */
static uint64_t work_off(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&tracker->mutex);
    bool empty = !tracker->first;
    pthread_mutex_unlock(&tracker->mutex);
    if (empty && !tracker->renewing)
        return UINT64_MAX;
    vc_real.cuCtxSetCurrent(tracker->context);
    bool clock = have_clock(tracker);
    uint64_t next = tracker->renewing ? vc_now_ns() + POLL_SHORT_NS : UINT64_MAX;
    if (!clock && !tracker->broken)
        return next;
    /* Only this thread takes entries out; others append, under the mutex. */
    struct vc_under_way **link = &tracker->first;
    bool any = false, begun = false;
    for (;;) {
        pthread_mutex_lock(&tracker->mutex);
        struct vc_under_way *entry = *link;
        pthread_mutex_unlock(&tracker->mutex);
        if (!entry)
            break;
        bool behind = behind_another(tracker->first, entry);
        if (!behind && reached(entry->to->event)) {
            unlink_entry(tracker, link);
            settle(tracker, entry, vc_now_ns());
            free(entry);
            continue;
        }
        uint64_t now = vc_now_ns();
        if (!behind) {
            uint64_t poll = next_poll(entry, now);
            bool has_begun = notice_begin(tracker, entry->from);
            if (!has_begun && poll > now + POLL_LONG_NS)
                poll = now + POLL_LONG_NS;
            any = true;
            begun = begun || has_begun;
            next = poll < next ? poll : next;
            if (entry->expected_ns < now)
                vc_gate_overdue(tracker->gate, now);
        }
        link = &entry->next;
    }
    if (any && !begun)
        vc_gate_began(tracker->gate, VC_NOT_BEGUN);
    return next;
}

/* --- the thread --- */

static uint64_t round_of_all(void)
{
    uint64_t next = UINT64_MAX;
    pthread_mutex_lock(&vc__trackers_mutex);
    uint64_t list = vc__trackers_changes;
    for (struct vc_tracker *tracker = vc__trackers; tracker; tracker = tracker->next) {
        vc__tracker_in_use = tracker;
        pthread_mutex_unlock(&vc__trackers_mutex);
        uint64_t wanted = work_off(tracker);
        next = wanted < next ? wanted : next;
        pthread_mutex_lock(&vc__trackers_mutex);
        vc__tracker_in_use = NULL;
        pthread_cond_broadcast(&vc__trackers_idle);
        if (list != vc__trackers_changes) { /* this one may be out of the list by now */
            next = 0;
            break;
        }
    }
    pthread_mutex_unlock(&vc__trackers_mutex);
    return next;
}

static void sleep_until(uint64_t next_ns, uint32_t expected)
{
    uint64_t now = vc_now_ns();
    if (next_ns <= now)
        return;
    uint64_t sleep = next_ns - now;
    struct timespec timeout = {.tv_sec = (time_t)(sleep / 1000000000u), .tv_nsec = (long)(sleep % 1000000000u)};
    syscall(SYS_futex, &wake_word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, expected, next_ns == UINT64_MAX ? NULL : &timeout, NULL, 0);
}

static void *help(void *argument)
{
    prctl(PR_SET_NAME, "vcuda-helper");
    prctl(PR_SET_TIMERSLACK, 1000);
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    vc_real.cuThreadExchangeStreamCaptureMode(&mode);
    for (;;) {
        uint32_t word = vc_load(&wake_word);
        vc_store(&awake_at_ns, 0); /* awake now: whoever submits need not wake us, we look at the word again */
        uint64_t next = round_of_all();
        vc_store(&awake_at_ns, next);
        sleep_until(next, word);
    }
    return argument;
}

bool vc__helper_start(void)
{
    uint32_t no = 0;
    if (vc_load_relaxed(&started))
        return true;
    if (!__atomic_compare_exchange_n(&started, &no, 1, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
        return true;
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
    if (!created)
        vc_store(&started, 0);
    return created;
}
