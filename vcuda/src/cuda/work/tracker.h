/* Marks: events beside the tenant's work; trackers, which hold those of one CUDA context and what is on its way; and the bell that
 * wakes who looks after them (helper.h).
 *
 * Application threads record marks inside their own calls and never make an event: the helper, whom no capture concerns, keeps
 * spare ones. A tracker's mutex is never held across a call of the driver.
 */
#ifndef VC_TRACKER_H
#define VC_TRACKER_H

#include <pthread.h>

#include "cuda/driver/hooks.h"
#include "cuda/work/visit.h"
#include "gate/lane.h"

enum {
    VC_SPARE_MARKS_LOW = 8,   /* below so many the helper makes more … */
    VC_SPARE_MARKS_HIGH = 24, /* … up to so many */
    VC_MOST_UNDER_WAY = 512,  /* intervals whose end is not seen; beyond it nothing is marked */
    VC_MOST_UNMARKED = 8,     /* of them those of a context whose end no event could be recorded behind */
    VC_STREAMS_HOSTED = 8,    /* streams on which threads put host work that others launch on: the latest */
    VC_STREAMS_LEFT = 128,    /* streams that are looked after once nobody puts work on them any more … */
    VC_LEFT_PLACES = 8,       /* … each in one of so many places */
};

/* What is not the card's work is waited for within a lease if it usually takes no longer; behind what does the card is thought to be idle. */
#define VC_ELSEWHERE_NS UINT64_C(2000000)

struct vc_tracker;
struct vc_mark;

/* An interval whose end the helper waits for. */
struct vc_under_way {
    struct vc_mark *from, *to; /* no `to`: no event could be had behind it, so its stream is asked */
    CUstream stream;
    bool lost;      /* so it is where the driver knows nothing of the event any more */
    uint32_t epoch; /* of the stream's handle, where that is asked */
    struct vc_interval interval;
    unsigned distinct;
    struct vc_learner learners[VC_LANE_OPERATIONS];
    uint64_t expected_ns;
    struct vc_under_way *next;
};

/* One event recorded in a stream. Its owners: the lane whose interval it opened, intervals under way. */
struct vc_mark {
    CUevent event;
    struct vc_tracker *tracker;
    uint32_t references;
    struct vc_mark_times times;
    bool seen;              /* the helper saw that it was reached, as the end of an interval */
    bool noticed;           /* the helper saw that an interval began, and what the others' clock was then */
    struct vc_mark *after;         /* `behind`: that began where this one was reached; NULL: not known … */
    struct vc_estimate *elsewhere; /* … and such things take so long on this stream */
    bool behind;            /* something that is not the card's work may be under way before it: nothing tells when it is reached */
    struct vc_gate_others others; /* vc_gate_others then; until it is noticed, when it was recorded */
    struct vc_mark *next;   /* in the list of spare ones */
    struct vc_under_way interval; /* that it ends: what was launched can be waited for without memory */
};

/* A stream on which something was launched, the last of it perhaps without a mark. */
struct vc_left_stream {
    CUstream stream; /* NULL: none */
    bool gone;       /* it was destroyed meanwhile: nobody can ask it */
    bool overdue;    /* the legacy one: a capture began, so nobody may ask it, and it was not done long after it should have been */
    bool of_several; /* lanes: each knows only of its own work */
    bool hosted;     /* vc_left_look: what is not the card's work was put there lately */
    uint64_t stamp;  /* of the latest launch there */
    uint64_t done_ns;     /* when it should be done, by what was predicted at that launch */
    uint64_t launched_ns; /* vc_gate.launched_ns then */
    struct vc_mark *begins; /* nothing of it has begun until that is reached … */
    uint64_t work_ns;       /* … and it takes so long, as far as was predicted */
};

/* A stream on which one thread launches and another puts what is not the card's work. */
struct vc_hosted_stream {
    CUstream stream;
    const void *launcher; /* the lane that launched there last */
    uint64_t number;      /* of the latest such thing, of all in the context */
    uint64_t until_ns;    /* nothing is launched there without a mark */
};

/* The helper's: that stream was found busy after all should have been done. */
struct vc_overrun {
    uint64_t stamp; /* of the launch that it was; else it is done */
    struct vc_interval interval;
    struct vc_gate_others others;
};

struct vc_tracker {
    CUcontext context;
    struct vc_gate *gate;
    uint32_t references;
    struct vc_tracker *next;
    uint32_t suspended; /* threads that may be destroying the context: the helper keeps away */

    pthread_mutex_t mutex; /* guards the spare marks and the queue's links */
    pthread_cond_t changed; /* spare marks were made, or the helper has looked */
    bool gone;
    bool broken; /* the driver refused us a clock or an event: nothing is measured */
    struct vc_mark *spare;
    unsigned spare_count;
    uint64_t round;    /* each_tracker's */
    uint64_t launches; /* that were noted in: */
    struct vc_left_stream left[VC_STREAMS_LEFT]; /* places by the stream's handle */
    struct vc_hosted_stream hosted[VC_STREAMS_HOSTED];
    uint64_t hosts;           /* such things there were on all of them … */
    uint64_t hosts_forgotten; /* … up to which one had no place any more */
    uint64_t hosted_until_ns; /* the latest of them */
    uint64_t looks; /* rounds of the helper through the queue */
    struct vc_under_way *first, **last;
    uint32_t under_way_count;
    struct vc_under_way unmarked[VC_MOST_UNMARKED]; /* without a stream: free */

    /* The helper's own. */
    struct vc_overrun overruns[VC_STREAMS_LEFT];
    CUstream clock_stream;
    CUevent base, next_base; /* base: reached, all times are taken from it */
    uint64_t base_low_ns, base_high_ns; /* when, in CLOCK_MONOTONIC: the tightest bounds so far */
    uint64_t base_made_ns;   /* 0: there is none yet */
    bool renewing;
    uint64_t renewing_since_ns;
};

/* The tracker of a context, made at its first use, of `*spare` if that is none yet (and NULL then). NULL without the driver's event functions: then
 * there are no marks, and estimates are all there is. The caller holds a reference. */
struct vc_tracker *vc_tracker_get(CUcontext context, struct vc_gate *gate, struct vc_tracker **spare);
/* … if there is one. */
struct vc_tracker *vc_tracker_find(CUcontext context);
void vc_tracker_release(struct vc_tracker *tracker);

/* Whether a mark could be recorded without waiting for the helper, as it seems. */
bool vc_mark_is_spare(struct vc_tracker *tracker);
/* Record a mark in `stream` (never NULL: an explicit handle) of the current context. Where no event is spare it waits for the helper
 * for some ms. NULL if it can't be done. The caller owns a reference. */
struct vc_mark *vc_mark_record(struct vc_tracker *tracker, CUstream stream);
/* The first operation behind it is handed to the driver now, and was. The work can't begin before that; what the driver
 * took for it is the application's time too, VC_LAUNCH_GAP_NS at most: it may have been interrupted behind the start. */
void vc_mark_launching(struct vc_mark *mark);
void vc_mark_launched(struct vc_mark *mark);
void vc_mark_release(struct vc_mark *mark);
/* The helper's: one more spare mark; false if the driver refuses. Pre: the tracker's context is current. */
bool vc_mark_make(struct vc_tracker *tracker);

/* Have the helper look out for `to` and settle the interval from `from` (NULL: none was measured) when it is reached. */
void vc_mark_submit(struct vc_mark *from, struct vc_mark *to, CUstream stream, const struct vc_lane_step *step);

/* No mark could be recorded behind it: its stream is asked, and until that says that it is done all of the time is charged. */
void vc_mark_missing(struct vc_tracker *tracker, const struct vc_mark *from, CUstream stream, const struct vc_lane_step *step);

/* --- what was launched without a mark --- */

/* Something was launched there, maybe without a mark: the helper asks the stream, so that it does not last for nothing; from when `begins` (if any) is
 * reached and that much work should be done. `stamp`: the lane's. False: so many are asked already. */
bool vc_tracker_left(struct vc_tracker *tracker, CUstream stream, uint64_t *stamp, struct vc_mark *begins, uint64_t work_ns);
/* All that the lane launched there has a mark behind it, or is done. */
void vc_tracker_followed(struct vc_tracker *tracker, CUstream stream, uint64_t stamp);
/* That place as it is now; its mark is the caller's, too, to be released. */
struct vc_left_stream vc_left_look(struct vc_tracker *tracker, unsigned place);
/* What was launched there last is done, or somebody looks after it: the place is free. */
void vc_left_done(struct vc_tracker *tracker, struct vc_left_stream *place, uint64_t stamp);
/* Begin a visit to the stream of that place as it was: false if it is not what it was, or may not be visited. */
bool vc_left_visit(struct vc_tracker *tracker, const struct vc_left_stream *place, uint64_t stamp);
/* The stream can't be asked any more: what is under way there is marked now, and paid for from when it began or should have been done. Pre: the tracker's
 * context is current. */
void vc_tracker_mark_left(struct vc_tracker *tracker, CUstream stream, struct vc_mark *begins);
/* … of that one, if anything is under way there. */
void vc_tracker_mark_left_on(struct vc_tracker *tracker, CUstream stream);
/* … for one that is about to be destroyed, or (NULL) for all, because a capture is about to begin. */
void vc_trackers_mark_left(CUstream stream);
/* The calling thread is about to put something on that stream which is not the card's work; `lane`: by which it launches there itself, or NULL. What others have left
 * there is marked behind, and they are told. */
void vc_tracker_hosts(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t left_stamp);
/* Whether another thread did so within the last second, or since `lane` last launched anything there (`*since`; `*known`: how many such things there were then, and now). */
bool vc_tracker_is_hosted(struct vc_tracker *tracker, CUstream stream, const void *lane, uint64_t *known, bool *since);

/* It was destroyed: what was launched there since is charged for as long as anything that nobody can ask about. */
void vc_trackers_stream_gone(CUstream stream);

/* The helper's: take the entry that `*link` points to out of the queue. */
void vc_mark_unlink(struct vc_tracker *tracker, struct vc_under_way **link);

/* The context may be about to be destroyed: what has ended is settled first; after this returns the helper does not touch it. NULL:
 * nothing is tracked. */
struct vc_tracker *vc_tracker_suspend(CUcontext context);
/* It is gone, with all its events, or it lives on. */
void vc_tracker_resume(struct vc_tracker *tracker, bool gone);

/* In a forked child: nothing of the parent's exists any more. */
void vc_trackers_forked(void);

/* vc_helper_stand_in, which the helper sets before there is any tracker. */
extern bool (*vc_stand_in)(uint64_t *next_ns) __attribute__((visibility("hidden")));

/* --- for the helper: one round through all trackers --- */

/* Call `look` for each tracker that is not suspended; it says when it wants to look again. Returns the earliest of these. */
uint64_t vc_trackers_round(uint64_t (*look)(struct vc_tracker *));

/* --- the bell --- */

/* Something will be reached at about `expected_ns`: be awake then. */
void vc_bell_expect(uint64_t expected_ns);
/* The application has just waited for the card: look now, if a mark is on its way. */
void vc_bell_kick(void);
/* Whether the helper should have looked by now, and has not: it is held, or ended, or there is none. */
bool vc_bell_missed(uint64_t now_ns);
/* The helper's: it was started. */
void vc_bell_started(void);
/* The helper's: it is awake from now on; returns what to pass to the sleep. */
uint32_t vc_bell_awake(void);
/* … and sleeps until then (UINT64_MAX: until it is woken), or until somebody expects it earlier. */
void vc_bell_sleep(uint64_t until_ns, uint32_t word);

#endif
