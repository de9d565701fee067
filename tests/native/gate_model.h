/* A card, its tenants and the arbiter on a simulated clock: the real gate, lanes and arbiter rules, nothing timed.
 *
 * The card time-slices contexts (2 ms, 75 us per switch); the helper sees an event 60 us after it happened, a woken thread
 * runs 30 us later. One step is a microsecond.
 */
#ifndef GATE_MODEL_H
#define GATE_MODEL_H

#include <stdbool.h>
#include <stdint.h>

#include "arbiter/plan.h"
#include "gate/lane.h"

enum { MODEL_TENANTS = 4, MODEL_PROCESSES = 64, MODEL_QUEUE = 4096, MODEL_MARKS = 1024, MODEL_KINDS = 64 };

/* What a process does: kernels of `kernel_ns` (+-10 %), `sync_every` of them and then a wait for the card (0: never),
 * then `pause_ns` on the processor; active from `from_ns` to `until_ns`. With `longest_ns` they are of MODEL_KINDS kinds, of times between
 * the two, always in the same order; `host_ns` more than a launch takes the host passes between two of them. `native`: it has no share.
 * `slower_ns`: so long they take from the first second on; with `change_ns` by turns, each for so long; with `seldom_ns` one of another kind that often.
 * `tail_ns`: of MODEL_KINDS kinds in turn each takes so long from a lease's 4th ms on; with `tail_every` from the 5th of one lease in so many, where two tenants take turns.
 * `in_turn`: the threads of the process are one thread's streams, on which it launches in turn: one, or a `burst` and then sleeps for `pause_ns`.
 * `hidden_ns`: every second one takes so long, and is not waited for but `pause_ns`.
 * `sly_ns`: so long they take while others may launch meanwhile, which a tenant can read in its limits. */
struct model_load {
    uint64_t kernel_ns, longest_ns, host_ns;
    unsigned sync_every;
    uint64_t pause_ns;
    bool native;
    uint64_t sly_ns, slower_ns, change_ns, seldom_ns, tail_ns, hidden_ns;
    unsigned tail_every;
    bool in_turn;
    unsigned burst;
    uint64_t from_ns, until_ns;
};

/* How the card and the host behave: slices and what a switch costs; how late the helper sees an event and a woken thread runs; what
 * a launch takes the host, how much later the card has it, and for how long a mark keeps the card from the next kernel. */
struct model_timing {
    uint64_t slice_ns, switch_ns, see_ns, wake_ns, late_ns, launch_ns, reach_ns, mark_ns;
    uint64_t record_ns;   /* a mark takes the host so long … */
    double jitter;        /* … and that and a launch vary by this part */
    unsigned stall_every; /* one launch in so many is held up, for up to `stall_ns`, before or behind its work is handed over */
    uint64_t stall_ns;
    bool stalls_marks;    /* … and one mark in so many */
    bool sleeps;          /* the helper, until vc_interval_look_again says; else it sees all after `see_ns` */
};
extern const struct model_timing MODEL_TIMING, MODEL_H100, MODEL_H100_HOST;

struct model;

struct model *model_new(unsigned seed, bool arbiter);
void model_free(struct model *model);
/* Another card than MODEL_TIMING; before it runs. */
void model_set_timing(struct model *model, const struct model_timing *timing);
/* A container on the card; returns its index. */
unsigned model_tenant(struct model *model, uint32_t cores, uint32_t core_limit, bool shared);
void model_process(struct model *model, unsigned tenant, struct model_load load);
/* Another thread of the process made last, with a stream of its own: the card shares its time equally among a context's streams. */
void model_thread(struct model *model, struct model_load load);
void model_run(struct model *model, uint64_t until_ns);

/* GPU time that the tenant really got in [from, to), from the card's own books. */
uint64_t model_work_ns(const struct model *model, unsigned tenant, uint64_t from_ns, uint64_t to_ns);
/* GPU time that one process got since the start; processes count in the order in which they were made. */
uint64_t model_process_ns(const struct model *model, unsigned process);
/* Mean of |share - target| over windows, in points of the card. */
double model_error(const struct model *model, unsigned tenant, double target, uint64_t window_ns, uint64_t from_ns,
                   uint64_t to_ns);
/* Time from a burst's first launch to its end, once the costs are learnt (only with sync_every). */
uint64_t model_burst_percentile(const struct model *model, unsigned tenant, double part);
struct vc_card_usage *model_usage(struct model *model, unsigned tenant);
struct vc_card_limit *model_limit(struct model *model, unsigned tenant);
void model_arbiter(struct model *model, bool alive);
/* From now on the card runs every kernel that has begun to its end; the switch comes then. */
void model_run_to_completion(struct model *model);

#endif
