/* What operations cost: a table of estimates per (function, launch size) and per executable graph, learnt from events.
 *
 * Look-ups take no lock; entries are never removed, only reset, so a pointer to one stays good for the process's life.
 * When the table is full, further keys share entries by their hash: their cost is then a mean, still trued up.
 */
#ifndef VC_ESTIMATE_H
#define VC_ESTIMATE_H

#include <stdbool.h>
#include <stdint.h>

struct vc_estimate {
    uint64_t key;           /* 0: free */
    uint64_t cost_ns;       /* the mean; 0: unknown */
    uint64_t unmeasured_ns; /* estimated work launched since an interval with it was last marked */
    uint64_t peak_ns, least_ns; /* the longest and the shortest that it took lately; they come nearer slowly */
    uint64_t seen_peak_ns;  /* the longest of those that nobody else was beside, as far as anybody knew … */
    uint64_t sure_peak_ns;  /* … and as long as it was seen twice */
    uint64_t pass_ns;       /* the mean again, where an operation may go unmeasured; 0: it may not */
    uint64_t measured;      /* how often it was */
    uint64_t followed;      /* … and how many short intervals its mean follows */
    uint64_t generation;    /* of the handles, when it was last looked up (vc_estimate_of) */
};

/* How much is known about an interval that was measured; decides how fast an estimate follows it. */
enum vc_evidence {
    VC_EVIDENCE_CLEAN,         /* nobody else was on the card */
    VC_EVIDENCE_LONG_OVERLAP,  /* others were, but their part has been taken out */
    VC_EVIDENCE_BESIDE,        /* others launched all the time: it tells nothing but that it was not much longer */
    VC_EVIDENCE_UPPER_BOUND,   /* others may have been, or the card may have been idle: it is no more than the wall time */
};

/* A cost that varies by more than this factor, and reaches more than this, is told by no mean: each operation is measured. */
#define VC_VARIES_FACTOR UINT64_C(4)
#define VC_VARIES_NS UINT64_C(100000)
/* So is one that surely varied by more than 2.5, and reaches so much: the longest are launched at a lease's end, and run on into others'. */
#define VC_VARIES_SURELY_NS UINT64_C(500000)
/* A short one that was measured less often may turn out to cost so much: what it does may depend on its arguments. */
#define VC_PROVEN_TIMES UINT64_C(8)
#define VC_UNPROVEN_NS UINT64_C(5000000)

/* Operations of at least this cost are timed one by one and charged by their own interval. */
#define VC_LONG_OPERATION_NS UINT64_C(2000000)

/* The key of a function launched on `blocks` blocks of `threads` threads; sizes within about 20 % share one. */
uint64_t vc_estimate_function_key(uint64_t function, uint64_t blocks, uint64_t threads);
/* The key of anything else: an executable graph, a kind of copy with its size. */
uint64_t vc_estimate_key(uint64_t kind, uint64_t handle, uint64_t size);

/* The entry for `key`, made at first use. Never NULL. */
struct vc_estimate *vc_estimate_find(uint64_t key);
/* … of something whose handle may have meant something else in an earlier generation: then it is unknown again. */
struct vc_estimate *vc_estimate_of(uint64_t key, uint64_t generation);

static inline uint64_t vc_estimate_cost(const struct vc_estimate *estimate)
{
    return __atomic_load_n(&estimate->cost_ns, __ATOMIC_RELAXED);
}

static inline uint64_t vc_estimate_pass(const struct vc_estimate *estimate)
{
    return __atomic_load_n(&estimate->pass_ns, __ATOMIC_RELAXED);
}

/* What one more such operation may turn out to cost, where that varies or is hardly known; else 0. */
static inline uint64_t vc_estimate_risk(const struct vc_estimate *estimate)
{
    uint64_t peak = __atomic_load_n(&estimate->peak_ns, __ATOMIC_RELAXED);
    uint64_t least = __atomic_load_n(&estimate->least_ns, __ATOMIC_RELAXED);
    uint64_t sure = __atomic_load_n(&estimate->sure_peak_ns, __ATOMIC_RELAXED);
    bool varies = (peak > VC_VARIES_NS && peak > VC_VARIES_FACTOR * least) || (sure > VC_VARIES_SURELY_NS && 2 * sure > 5 * least);
    uint64_t risk = varies ? peak : 0;
    bool proven = __atomic_load_n(&estimate->measured, __ATOMIC_RELAXED) >= VC_PROVEN_TIMES || vc_estimate_cost(estimate) > VC_LONG_OPERATION_NS / 4;
    return proven || risk != 0 ? risk : VC_UNPROVEN_NS;
}

/* The operation's first measurement. */
void vc_estimate_set(struct vc_estimate *estimate, uint64_t cost_ns);

/* A cost to begin with, where none is known yet: what is measured corrects it. */
void vc_estimate_guess(struct vc_estimate *estimate, uint64_t cost_ns);

/* Follow a measurement: `measured_ns` was seen where the estimates said `expected_ns` (> 0) when this one's cost was taken
 * to be `cost_then_ns`; it may have learnt more since, from work launched before. Returns how much that surprises: 0, or up to VC_SURPRISE where
 * it took much longer with nobody beside it than it does at least and on average. */
enum { VC_SURPRISE = 16 };
unsigned vc_estimate_learn(struct vc_estimate *estimate, uint64_t cost_then_ns, uint64_t measured_ns, uint64_t expected_ns,
                       enum vc_evidence evidence);

/* Something says that it may have cost more than was thought: the next one is measured. */
void vc_estimate_doubt(struct vc_estimate *estimate);

/* The operation may have changed (graph update, parameters): its cost is kept, but not proven again. */
void vc_estimate_unprove(struct vc_estimate *estimate);

/* It may be another one now: unknown again. */
void vc_estimate_reset(struct vc_estimate *estimate);

#endif
