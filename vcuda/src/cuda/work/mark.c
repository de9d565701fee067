/* Recording marks beside the application's work, and the queue that the helper works off. */
#include "cuda/work/mark.h"

#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "cuda/driver/capture_mode.h"
#include "cuda/work/bell.h"
#include "cuda/work/visit.h"

/* Where the driver refuses one to the thread itself. */
static const uint64_t SPARE_WAIT_NS = 20000000;
static const uint64_t LAST_LOOK_NS = 50000000;

bool (*vc_stand_in)(uint64_t *next_ns);

static struct timespec deadline(uint64_t for_ns)
{
    uint64_t at = vc_now_ns() + for_ns;
    return (struct timespec){.tv_sec = (time_t)(at / 1000000000u), .tv_nsec = (long)(at % 1000000000u)};
}

/* By a thread that can't wait for the helper to be let run. No capture, its own or another thread's, is concerned in that mode. */
static bool make_here(struct vc_tracker *tracker)
{
    int mode = vc_capture_relax();
    bool made = vc_mark_make(tracker);
    vc_capture_restore(mode);
    return made;
}

/* Pre: the tracker's context is current. */
static struct vc_mark *take_spare(struct vc_tracker *tracker)
{
    struct timespec until = {0, 0};
    pthread_mutex_lock(&tracker->mutex);
    while (!tracker->spare && !tracker->gone && !tracker->broken && tracker->under_way_count < VC_MOST_UNDER_WAY) {
        bool first = until.tv_sec == 0;
        if (first)
            until = deadline(SPARE_WAIT_NS);
        pthread_mutex_unlock(&tracker->mutex);
        vc_bell_expect(0);
        uint64_t again;
        bool stood_in = !(first && make_here(tracker)) && vc_stand_in(&again);
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
    vc_mark_release(mark->past);
    put_spare(tracker, mark);
    vc_tracker_release(tracker);
}

/* Pre: locked. */
static void append(struct vc_tracker *tracker, struct vc_under_way *entry)
{
    vc_bell_awaits(1);
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

void vc_mark_unlink(struct vc_tracker *tracker, struct vc_under_way **link)
{
    pthread_mutex_lock(&tracker->mutex);
    struct vc_under_way *entry = *link;
    *link = entry->next;
    if (!entry->next)
        tracker->last = link;
    tracker->under_way_count--;
    pthread_mutex_unlock(&tracker->mutex);
    vc_bell_awaits(-1);
}

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
        vc_bell_awaits(-1);
        entry = next;
    }
    tracker->first = NULL;
    tracker->last = &tracker->first;
    tracker->under_way_count = 0;
}

void vc_marks_gone(struct vc_tracker *tracker)
{
    pthread_mutex_lock(&tracker->mutex);
    tracker->gone = true;
    struct vc_mark *spare = tracker->spare;
    tracker->spare = NULL;
    tracker->spare_count = 0;
    pthread_cond_broadcast(&tracker->changed);
    pthread_mutex_unlock(&tracker->mutex);
    drop_under_way(tracker);
    while (spare) {
        struct vc_mark *next = spare->next;
        free(spare);
        spare = next;
    }
}

void vc_marks_look(struct vc_tracker *tracker)
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
