/* What event.c and event_helper.c share: the trackers and what is on its way in them. */
#ifndef VC_EVENT_TRACKER_H
#define VC_EVENT_TRACKER_H

#include <pthread.h>

#include "cuda/work/event.h"

/* One event recorded in a stream. Its owners: the lane whose interval it opened, intervals under way. */
struct vc_mark {
    CUevent event;
    struct vc_tracker *tracker;
    uint32_t references;
    uint64_t idle_since_ns; /* recorded onto an idle card by then; 0: the card had work */
    uint64_t gap_ns;        /* so much later its work began */
    uint64_t reached_ns;    /* CLOCK_MONOTONIC; 0 until the helper knows */
    bool noticed;           /* the helper saw that an interval began, and what the others' clock was then */
    struct vc_gate_others others; /* vc_gate_others then; until it is noticed, when it was recorded */
    struct vc_mark *next;   /* in the list of spare ones */
};

/* An interval whose end the helper waits for. */
struct vc_under_way {
    struct vc_mark *from, *to;
    CUstream stream;
    struct vc_interval interval;
    unsigned distinct;
    struct vc_learner learners[VC_LANE_OPERATIONS];
    uint64_t expected_ns;
    struct vc_under_way *next;
};

struct vc_tracker {
    CUcontext context;
    struct vc_gate *gate;
    uint32_t references;
    struct vc_tracker *next;

    pthread_mutex_t mutex; /* guards the spare marks and the queue's links */
    bool gone;
    struct vc_mark *spare;
    struct vc_under_way *first, **last;
    uint32_t under_way_count;

    /* The helper's own. */
    CUstream clock_stream;
    CUevent base, next_base; /* base: reached, all times are taken from it */
    uint64_t base_ns;        /* when, in CLOCK_MONOTONIC: the tightest bound so far */
    uint64_t base_made_ns;   /* 0: there is none yet */
    bool renewing;
    bool broken;             /* the driver refused us a clock: nothing is measured */
};

/* Guards the list and `vc__tracker_in_use`, the tracker that the helper works on right now. */
extern pthread_mutex_t vc__trackers_mutex;
extern pthread_cond_t vc__trackers_idle;
extern struct vc_tracker *vc__trackers;
extern struct vc_tracker *vc__tracker_in_use;
extern uint64_t vc__trackers_changes; /* of the list */

bool vc__helper_start(void);
/* Something will be reached at about `expected_ns`: be awake then. */
void vc__helper_expect(uint64_t expected_ns);
void vc__helper_forked(void);

#endif
