/* Trackers: one for each CUDA context, with all that is known of the work in it (mark.h, left.h, hosted.h).
 *
 * A tracker's mutex is never held across a call of the driver.
 */
#ifndef VC_TRACKER_H
#define VC_TRACKER_H

#include <pthread.h>

#include "cuda/driver/hooks.h"
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
    bool alone;             /* nothing that has no mark behind it lay before it on its stream */
    bool noticed;           /* the helper saw that an interval began, and what the others' clock was then */
    struct vc_mark *after;         /* `behind`: that began where this one was reached; NULL: not known … */
    struct vc_estimate *elsewhere; /* … and such things take so long on this stream */
    bool behind;            /* something that is not the card's work may be under way before it: nothing tells when it is reached … */
    struct vc_mark *past;   /* … until this one is; NULL: it is the first behind that */
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
    uint64_t stamp;  /* of the latest launch there */
    uint64_t done_ns;     /* when it should be done, by what was predicted at that launch */
    uint64_t launched_ns; /* vc_gate.launched_ns then */
    struct vc_mark *begins; /* nothing of it has begun until that is reached … */
    uint64_t work_ns;       /* … and it takes so long, as far as was predicted */
};

/* A stream on which one thread launches and another puts what is not the card's work, or the legacy one that waits for such things elsewhere. */
struct vc_hosted_stream {
    CUstream stream;
    const void *launcher; /* the lane that launched there last */
    uint64_t number;      /* of the latest such thing, of all in the context */
    uint64_t held_number; /* … that is elsewhere */
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
    uint64_t round;    /* vc_trackers_each's */
    uint64_t launches; /* that were noted in: */
    struct vc_left_stream left[VC_STREAMS_LEFT]; /* places by the stream's handle */
    struct vc_hosted_stream hosted[VC_STREAMS_HOSTED];
    uint64_t hosts;           /* such things there were on all of them … */
    uint64_t hosts_forgotten; /* … up to which one had no place any more */
    uint64_t hosted_until_ns; /* the latest of them */
    uint64_t legacy_until_ns; /* … and of those on the legacy stream, for which all blocking ones wait */
    uint64_t legacy_hosts;    /* so many of those there were */
    uint64_t looks; /* rounds of the helper through the queue */
    struct vc_under_way *first, **last;
    uint32_t under_way_count;
    struct vc_under_way unmarked[VC_MOST_UNMARKED]; /* without a stream: free */

    /* The helper's own. */
    struct vc_overrun overruns[VC_STREAMS_LEFT];
    struct vc_late latest;
    struct vc_slice slice;
    struct vc_others_look look; /* what had been reached by then is settled, or noticed */
    CUstream clock_stream;
    CUevent probe; /* probe.h */
    CUevent base, next_base; /* base: reached, all times are taken from it */
    uint64_t base_low_ns, base_high_ns; /* when, in CLOCK_MONOTONIC: the tightest bounds so far */
    uint64_t base_made_ns;   /* 0: there is none yet */
    bool renewing;
    uint64_t renewing_since_ns;
};

/* Whether the driver has the functions without which nothing is tracked. */
bool vc_driver_can_measure(void);

/* The tracker of a context, made at its first use, of `*spare` if that is none yet (and NULL then). NULL without the driver's event functions: then
 * there are no marks, and estimates are all there is. The caller holds a reference. */
struct vc_tracker *vc_tracker_get(CUcontext context, struct vc_gate *gate, struct vc_tracker **spare);
/* … if there is one. */
struct vc_tracker *vc_tracker_find(CUcontext context);
void vc_tracker_release(struct vc_tracker *tracker);

/* It leaves the list, with the context. False: another thread saw the context end, too. */
bool vc_tracker_take_out(struct vc_tracker *tracker);

/* From its return on the helper does not touch the tracker … */
void vc_tracker_keep_away(struct vc_tracker *tracker);
/* … until this. */
void vc_tracker_lives_on(struct vc_tracker *tracker);

/* Call `look` for each tracker that is not suspended, for the helper; it says when it wants to look again. Returns the earliest of these. */
uint64_t vc_trackers_round(uint64_t (*look)(struct vc_tracker *));
/* Once for each tracker there is; other threads' trackers may come and go meanwhile. */
void vc_trackers_each(void (*call)(struct vc_tracker *, CUstream), CUstream stream);

/* In a forked child: nothing of the parent's exists any more. */
void vc_trackers_forked(void);

#endif
