/* What the model's sources have in common; see gate_model.h. The tests look at none of it. */
#ifndef GATE_MODEL_PARTS_H
#define GATE_MODEL_PARTS_H

#include "gate_model.h"

enum { MODEL_BINS = 100000, MODEL_BURSTS = 4096 }; /* bins of 100 us: 10 s */
static const uint64_t STEP = 1000, LOOKS_ON = 100000, NONE = UINT64_MAX; /* LOOKS_ON: so often helpers look at what lasts */

/* A kernel, or a mark. */
struct entry {
    uint64_t left_ns;
    uint64_t reaches_ns; /* the card knows of it from then on */
    bool begun;
    int mark; /* -1: a kernel */
};

struct mark {
    struct vc_mark_times times;
    bool alone;   /* nothing without a mark lay before it on its stream */
    bool noticed; /* the helper has seen that an interval began */
    struct vc_gate_others others;
};

struct expected {
    bool used;
    int from, to;
    uint64_t expected_ns, look_ns;
    struct vc_lane_step step;
};

/* What each step looks at of each comes first and lies close together: half a megabyte of arrays is elsewhere. */
struct process {
    unsigned tenant;
    unsigned context; /* the process whose thread this is; its own number for the first */
    unsigned head, count; /* of the queue */
    unsigned expected_head, expected_count;
    uint64_t held_until_ns; /* by a mark, on the card */
    uint64_t ready_ns, sync_from_ns;
    bool blocked, syncing;
    enum vc_gate_reason why;
    unsigned since_sync;
    unsigned turn; /* of the first stream of a thread that launches on several in turn: whose it is, counted from here */
    unsigned streams;
    struct vc_gate *gate;
    struct model_load load;
    struct vc_slot_card *slot;
    unsigned kind;
    bool hides; /* its next kernel */
    struct vc_slice slice; /* the context's, in its first process */
    uint64_t seldom_at_ns;
    int open;
    uint64_t burst_from_ns;
    unsigned next_mark;
    uint64_t worked_ns;
    struct vc_gate own_gate;
    struct vc_lane lane;
    struct vc_estimate estimates[MODEL_KINDS];
    struct expected *expected; /* MODEL_MARKS */
    struct mark *marks;        /* MODEL_MARKS */
    struct entry *queue;       /* MODEL_QUEUE */
};

struct tenant {
    struct vc_usage *region;
    struct vc_card_usage *usage; /* its only card's */
    uint32_t *bins;
    uint64_t bursts[MODEL_BURSTS];
    unsigned burst_count;
    uint32_t last_grant;
};

struct model {
    uint64_t now;
    unsigned seed;
    bool arbiter;
    struct vc_limits limits; /* one card entry per tenant: they share the heartbeat only */
    struct tenant tenants[MODEL_TENANTS];
    unsigned tenant_count;
    struct process processes[MODEL_PROCESSES];
    unsigned process_count;
    uint64_t reaches_ns[MODEL_PROCESSES]; /* of what is at each one's queue's head; NONE: it is empty. Together, as each step looks at all of them */
    struct vc_tenant plan_tenants[MODEL_TENANTS];
    struct vc_card_plan plan;
    uint64_t decide_at;
    struct model_timing timing;
    int on_card; /* process whose context is on the card */
    unsigned stream; /* the process, or thread, of which it worked on last */
    bool run_to_completion;
    uint64_t slice_end, switched_at;
    bool taken_out; /* the card took something out of a queue in this step */
};

/* One step of the card; of the helper, for one process, which looks on at what lasts; of a process; and of the arbiter. */
void model_card_step(struct model *model);
/* The step just made again and again, as long as nothing else comes of it and before `until_ns`. Returns when the last of them was. */
uint64_t model_card_goes_on(struct model *model, uint64_t until_ns);
void model_helper_step(struct model *model, struct process *process, bool looks_on);
void model_process_step(struct model *model, struct process *process);
void model_arbiter_step(struct model *model);

/* The stream of the context that the card works on now: they take turns of a step each, and lie one behind the other. -1: none has work. */
int model_next_stream(const struct model *model, unsigned context, unsigned after);

#endif
