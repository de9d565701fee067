/* The gate of one process before one card: may this operation start now, and what did it really cost?
 *
 * Pure arithmetic on a clock that is passed in, plus the shared bucket; it knows no CUDA and waits nowhere (vc_gate_wait is
 * in wait.c). One mutex per process and card guards the prediction; it is held for arithmetic only.
 */
#ifndef VC_GATE_H
#define VC_GATE_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "gate/bucket.h"
#include "gate/estimate.h"
#include "gate/probe.h"
#include "gate/sample.h"
#include "gate/settle.h"
#include "gate/turn.h"
#include "region/abi.h"
#include "region/share.h"

enum {
    VC_AHEAD_NS = 2000000,            /* work that a lease holder may have outstanding */
    VC_AHEAD_LOW_NS = 500000,         /* … and below which it may always add one more operation */
    VC_BURST_NS = 6000000,            /* … and while nobody waits, what begins on an idle card: a short request never sleeps */
    VC_UNSEEN_NS = 5000000,           /* work launched but not yet seen to end */
    VC_UNSEEN_TIMES = 64, VC_UNSEEN_LEAST_NS = 1250000, /* … of short operations not more than so many: each may suddenly take a thousand times as long */
    VC_UNSEEN_MARKS = 256,            /* … and of what is marked one by one no more: what has no mark behind it can't be told from what never ends */
    VC_RISK_NS = 50000000,            /* what operations whose cost varies may together turn out to cost before one is seen to end */
    VC_CONCURRENT_NS = 50000,         /* work worth an interval of its own when it runs beside another stream */
    VC_RECHECK_NS = 10000000,         /* longest sleep before a waiting thread looks again */
    VC_LATE_NS = 1000000,             /* work that is overdue for so long refutes the estimates: nothing more is launched until its end is seen */
    VC_LATE_DRY_NS = 200000,          /* … of a container on a card of its own, whose credit is used up */
    VC_STALL_NS = 50000000,           /* nothing seen for so long: do not wait for it any more */
    VC_UNWATCHED_NS = 100000000,      /* nobody looked for so long, with something outstanding: all of it is charged until somebody does */
    VC_LOOKS_NS = 500000,             /* a helper looks at all streams of its process more often while one of them has something else to do */
    VC_VISITS = 4,                    /* single bursts after a pause that make one who comes for such */
    VC_AT_GATE = 4,                   /* threads of a process that sleep at the gate; further ones sleep behind them */
    VC_BELIEVED_NS = 100000000,       /* so much that siblings did may not be told yet */
    VC_REST_NS = 2000000,             /* a process whose work is predicted to have ended so long ago has none on the card */
};

/* What the region says about this container and card at one moment. */
struct vc_policy {
    bool gated;          /* false: alone and uncapped; no gate, no events */
    bool impossible;     /* the limits make no sense: the guaranteed share, as far as there is one */
    bool shared;         /* other containers are placed on the card */
    bool arbitrated;     /* the arbiter is alive */
    bool leased;         /* … and hands out leases on this card */
    bool holder;         /* … and we hold it */
    bool together;       /* … beside others */
    uint32_t rate_ppm;   /* GPU ns per million wall ns */
    uint64_t saved_ns;   /* the bucket holds so much more, because others owe it */
    uint64_t closed_until_ns; /* the arbiter's account of what was charged is overdrawn until then */
    uint64_t lease_start_ns;
    uint64_t lease_end_ns; /* UINT64_MAX: nobody else waits */
    uint64_t lease_clock_ns;
    uint64_t lease_sequence;
    bool turn_wanted;      /* siblings wait for our turn … */
    bool turn_ends_first;  /* … and `lease_end_ns` is its end */
    uint64_t queue_end_ns; /* when work of a sibling process is predicted to end that runs before ours */
};

enum vc_gate_reason {
    VC_GATE_GO,
    VC_GATE_CREDIT,      /* the bucket is in debt: wait for the deadline (or a new grant) */
    VC_GATE_LEASE,       /* another tenant's turn: wait for a grant */
    VC_GATE_TURN,        /* our lease, but a sibling process's turn in it: wait for the deadline */
    VC_GATE_OUTSTANDING, /* enough work is under way: wait for the deadline or for an event */
    VC_GATE_COMES,       /* what takes no time of the card waits for the lease only (vc_gate_comes) */
};

struct vc_gate_answer {
    enum vc_gate_reason reason;
    uint64_t until_ns;     /* when to ask again at the latest; unless GO */
    int64_t refill_ns;     /* CREDIT: the credit at which the gate opens again */
    uint64_t allowance_ns; /* GO: further work that may be launched without asking, already paid for */
    uint64_t permit_until_ns; /* … and until when; UINT64_MAX: no limit */
    uint64_t sequence;     /* GO: the lease under which the work starts */
    bool impossible;       /* the limits make no sense; somebody should say so */
    bool from_idle;        /* GO: nothing of this process was on the card */
    uint64_t asked_ns, finish_ns; /* GO: when, and by when all of this process should be done */
    uint64_t joins_until_ns; /* GO: work of this process is predicted to be running on the card until then; 0: none */
    bool call_next;      /* TURN, or GO: siblings should look at once */
    bool no_turn;        /* TURN, OUTSTANDING: it could not use one now */
    bool no_lease;       /* OUTSTANDING: … nor a lease, as all that is outstanding waits for something that is not the card */
    uint64_t mark_ns;      /* GO: estimated work after which an interval is measured */
    bool opened;           /* GO: from now on the helper has to look (vc_gate_rest) */
    bool closing;          /* GO: this is the last operation before the gate shuts: have its end seen */
};

struct vc_gate {
    /* Of the region; usage and slot may be private memory when the region's can't be used. */
    const struct vc_limits *limits;
    const struct vc_card_limit *limit;
    struct vc_card_usage *usage;
    struct vc_slot_card *slot;
    struct vc_turns turns; /* set by whoever has the whole region; zero: no siblings … */
    struct vc_paid *paid;  /* … as this: what the card's time was charged for already */
    bool alone; /* usage is this process's own: guaranteed share, no lending */

    pthread_mutex_t mutex;
    uint64_t finish_ns;    /* when the card is predicted to have done all that was launched: the later of these … */
    uint64_t packed_ns;    /* … when it would have, if all of it could begin as soon as the card is free … */
    uint64_t later_ns;     /* … and when it will have what a stream has something else to do before: the card is anybody's until that begins */
    uint64_t launched_ns;  /* estimated work ever launched … */
    uint64_t seen_ns;      /* … and the part of it whose end was seen */
    uint64_t idle_ns;      /* … and what of it had been launched when the card was last idle */
    uint64_t progress_ns;  /* when something was last seen to end, or launched onto an idle card */
    uint32_t unseen;       /* end marks on their way */
    uint64_t unpaid_since_ns; /* what is overdue is not charged yet, from then on; else 0 */
    uint64_t stepped_ns;   /* … or it is charged as it passes, and was predicted to last until then at the latest look … */
    uint64_t unpaid_ns;    /* … so long behind what was charged */
    uint64_t late_since_ns; /* when the first of them was expected, if that is past; else 0 */
    uint32_t unknown;      /* those of them whose cost was not known */
    /* Since when, until when at the latest, and until when as far as it is known now others are held, for one of unknown cost to begin alone. */
    uint64_t alone_since_ns, alone_ends_ns, alone_until_ns;
    uint64_t ended_ns;     /* when work was last seen to end, by its mark */
    uint64_t on_card_ns;   /* when work was last seen that is on the card, or waits for nothing else */
    bool all_done;         /* the application waited for all of it, and nothing was launched since */
    uint64_t risk_ns;      /* what the operations whose cost varies among them may turn out to cost */
    struct vc_own own;     /* what this process was charged, where nobody but it can write */
    uint64_t busy_from_ns; /* since when it had work on the card, with short pauses */
    uint64_t told_ns, told_at_ns; /* vc_gate_tell: what, and when */
    /* What siblings may have had of our intervals: no more than they told, whatever the file says they were charged. */
    uint64_t container_told_ns, siblings_told_ns, siblings_told_at_ns, believed_ns;
    /* What they were charged and may have of the card still, by the file: that runs within our next intervals. As known at the end of the latest one, and by their clock then. */
    uint64_t queued_ns, queued_at_ns, queued_clock_ns, queued_read_ns;
    bool untold;           /* it can't be told: with all the others that may be so it has the share of one */
    uint64_t charged_ns;   /* … in all, and by siblings for it */
    uint64_t late_ns;      /* … for what was seen long after it had run */
    int64_t refill_ns;     /* credit to wait for after the bucket ran dry; 0: not refilling */
    uint64_t saved_ns;     /* of the latest policy */
    bool watched;          /* there is a helper that looks after this gate */
    bool unwatched;        /* … which did not look when it should have: everything is marked */
    uint64_t looked_ns;    /* when somebody last looked, or nothing was outstanding */
    bool open;             /* our bit in vc_card_usage.open_slots is set (region/abandoned.h) … */
    bool untold_open;      /* … and the arbiter was not called for it */
    uint64_t owed_ns;      /* what siblings charged for us while we stood still, not yet settled */
    uint64_t unwatched_ns; /* what was charged while nobody looked, not yet settled */
    uint64_t published_ns; /* the predicted finish that this process wrote into the region */
    struct vc_busy busy;
    struct vc_samples samples;
    struct vc_probe probe;     /* of what stopped siblings left on the card */
    uint64_t launches, begins; /* operations, and those of them that found the card idle */
    uint64_t surprises;        /* vc_gate_learnt, where nobody but this process can write */
    int64_t beyond_ns;         /* … and what overlapped intervals lasted beyond what they were charged, likewise */
    uint64_t stopped_launches; /* `launches` when it last went on after it had stood still */
    bool unsampled;            /* nobody looks, because nothing was launched for a while: whoever launches wakes the helper */
    uint64_t all_until_ns;    /* until then everything is marked: samples told of work that was not charged */
    const void *latest_lane;  /* whoever passed last … */
    const void *burst_lane;    /* … and whose all is that was launched since the card had nothing of this process; NULL: several lanes' */
    uint64_t beside_until_ns; /* … and until when streams are believed to run beside each other, because another did while that one's was on the card */
    uint64_t came_then_ns; /* `launched_ns` when such came last that takes no time of the card … */
    uint32_t came;         /* … and how many since anything was launched */
    uint64_t turned_ns;    /* when the card should have turned to all of them */
    uint32_t visits;       /* bursts in a row that came after a pause, and for which the application waited once (vc_gate_leave) … */
    uint64_t visited_ns;   /* … as for the latest one then; 0: it has asked since */
    uint32_t waiting_threads;
    uint32_t at_gate;      /* those of them that sleep where grants and events wake them; the others wait to be called */
    uint32_t called_futex; /* private: changes whenever one of those is called */
    uint32_t events_futex; /* private: changes whenever waiting threads should look again */
};

void vc_gate_init(struct vc_gate *gate, const struct vc_limits *limits, const struct vc_card_limit *limit,
                  struct vc_card_usage *usage, struct vc_slot_card *slot);

/* Read the policy; every value of the file is bounded, an impossible one falls back to the guaranteed share. */
struct vc_policy vc_gate_policy(const struct vc_gate *gate, uint64_t now_ns);

/* May an operation of `cost_ns` (0: unknown), perhaps of `risk_ns` (0: certainly not), start? If so it is charged at once and counted as launched. */
void vc_gate_enter(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, struct vc_gate_answer *answer);
/* … one that is predicted not to begin before `ready_ns` (0: it is not), because its stream has something else to do first. */
void vc_gate_enter_behind(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, uint64_t ready_ns, struct vc_gate_answer *answer);

/* Whether what takes no time of the card, but has to come to it, as the record of an event, may do so now: not while others have it. */
bool vc_gate_comes(const struct vc_gate *gate, uint64_t now_ns);
/* It comes now, and not behind work of its context's: the card will have turned to it so much later, or nobody knows when, `behind` something that is not the card's work.
 * `several`: contexts, so that each is another's turn, and charged where it does not mark work. */
void vc_gate_came(struct vc_gate *gate, uint64_t now_ns, bool several, bool behind);

/* What the gate let go is handed to the driver now, after what had to be done before: until then a process that had nothing on the card has nothing there, and owes nothing, should it end. */
void vc_gate_hands_over(struct vc_gate *gate, uint64_t now_ns, const struct vc_gate_answer *answer);

/* It was launched before anybody asked: charge it and count it as launched, whatever it may. Nothing is allowed beyond it. */
void vc_gate_launched_unasked(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, struct vc_gate_answer *answer);

/* Give back what is left of an allowance; `used_ns` of `allowance_ns` was launched. */
void vc_gate_fold(struct vc_gate *gate, uint64_t allowance_ns, uint64_t used_ns);

/* The driver refused the operation: nothing was launched. */
void vc_gate_undo(struct vc_gate *gate, uint64_t cost_ns, uint64_t risk_ns);

/* An end mark was recorded behind what has been launched, which is all but the `unused_ns` of the caller's allowance;
 * returns the value for vc_interval.launched_ns. */
uint64_t vc_gate_marked(struct vc_gate *gate, uint64_t unused_ns);

/* What those clocks say now. */
struct vc_gate_others vc_gate_others(const struct vc_gate *gate);

/* What they had in between. Siblings that take turns are not on the card at the same time: nothing is theirs then. */
uint64_t vc_gate_others_ns(const struct vc_gate *gate, uint64_t now_ns, const struct vc_gate_others *from,
                           const struct vc_gate_others *to);

/* Whether streams of this process ran beside each other lately. */
bool vc_gate_beside(const struct vc_gate *gate, uint64_t now_ns);

/* When the work under way began, as its mark tells. */
void vc_gate_began(struct vc_gate *gate, uint64_t began_ns);
/* The card has work of ours, or will have it as soon as it is free. */
void vc_gate_on_card(struct vc_gate *gate, uint64_t now_ns);
/* It still waits for others' on the card, since then, or since work of our own before it ended. */
void vc_gate_waits(struct vc_gate *gate, uint64_t since_ns);

/* An end mark is still on its way past the predicted finish, `expected_ns`: the card is busy, not idle. `paid`: what passes is charged as it passes, or
 * it has not begun; else, if the process ended now, it would have to be charged from then on. */
void vc_gate_overdue(struct vc_gate *gate, uint64_t now_ns, uint64_t expected_ns, bool paid);

/* An end mark is still on its way, and what it ends has not begun: its stream has something else to do first. `idle`: that may last, so the card is thought
 * to be idle until it begins. Returns whether it was not until now: who waits at the gate should look again. */
bool vc_gate_not_begun(struct vc_gate *gate, uint64_t now_ns, bool idle);
/* So many marks are on their way, and each waits for that; the last of them is behind `launched_ns`. Where that is all, nothing is on the card any more. */
void vc_gate_all_wait(struct vc_gate *gate, uint32_t marks, uint64_t launched_ns);

/* The interval, of which the end was not seen yet, began at its `from_ns`: charge what passes beyond its estimate as it passes, as
 * long as this process runs. `others_gpu_ns` as far as it is known now. */
void vc_gate_progress(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval);

/* Whether what was given back is all that threads wait for: under leases the arbiter sees that itself, and says when. */
bool vc_gate_refilled(struct vc_gate *gate, uint64_t now_ns);

/* When all that was launched so far should be done, and how much that is. */
void vc_gate_predicted(struct vc_gate *gate, uint64_t *done_ns, uint64_t *launched_ns);

/* When what should have been done at `done_ns`, while `launched_ns` had been launched, is known to last longer: what was launched since and is not seen to
 * have ended is paid for. UINT64_MAX: others' slices may explain it, as long as marks are under way. */
uint64_t vc_gate_lasts_from(struct vc_gate *gate, uint64_t now_ns, uint64_t done_ns, uint64_t launched_ns);

/* A stream is not done: charge what passes from the interval's `from_ns` on, and tell the others that the card is busy. */
void vc_gate_overruns(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval);

/* The application waited for the card so long, with nothing on it that would be measured. */
void vc_gate_waited(struct vc_gate *gate, uint64_t from_ns, uint64_t to_ns);

/* An end mark was reached (or lost: measurable = false). Settles the charge and renews the prediction. */
struct vc_settlement vc_gate_seen(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval);

/* Estimates followed what became of an interval that was charged so much, and were surprised so much (VC_SURPRISE). Who does that with one function, size or graph now and another one then varies more
 * than any of them shows: for as long as it goes on, what its container launches is charged by how long it takes where others' slices may be inside. */
void vc_gate_learnt(struct vc_gate *gate, uint64_t charged_ns, unsigned surprise);

/* Nobody looked when somebody should have: the process was stopped with all its threads, and goes on. What it left on the card may have ended unseen, and nobody took samples meanwhile. Who does that again
 * and again is doubted as one that varies by ever other operations is, and everything is marked. */
void vc_gate_stood_still(struct vc_gate *gate, uint64_t now_ns);

/* What passes between the two was charged for, though no interval tells of it. */
void vc_gate_pays(struct vc_gate *gate, uint64_t from_ns, uint64_t to_ns);

/* The clock that places intervals was wrong, as is known now: where those lie that were paid for is not known any more. */
void vc_gate_clock_moved(struct vc_gate *gate);

/* Whether everything is to be marked. */
static inline bool vc_gate_marks_all(const struct vc_gate *gate)
{
    uint64_t until = vc_load_relaxed(&gate->all_until_ns);
    return VC_UNLIKELY(until != 0) && vc_now_ns() < until;
}

/* Everything is to be marked until then. */
void vc_gate_mark_all(struct vc_gate *gate, uint64_t now_ns, uint64_t until_ns);

/* The helper's: at a moment that no program can foresee the card was `busy` with this process's work, or not. `held`: the
 * moment is later than it should be, so somebody may have chosen it. Returns how long it should be on average until the next one. */
uint64_t vc_gate_sampled(struct vc_gate *gate, uint64_t now_ns, bool busy, bool held);
/* What they found beyond what was charged, ever, and what less. */
void vc_gate_found(struct vc_gate *gate, uint64_t *more_ns, uint64_t *less_ns);
/* … and nobody looks until something is launched again. */
void vc_gate_not_sampled(struct vc_gate *gate);

/* The helper's: whether the process may have work on the card still. Returns when to look again; UINT64_MAX: not by itself. `*opened`: it has
 * where it was thought to rest, so the arbiter has to note as long as it lives. */
uint64_t vc_gate_rest(struct vc_gate *gate, uint64_t now_ns, bool *opened);
/* … now, if nothing is left to be seen. */
void vc_gate_close(struct vc_gate *gate, uint64_t now_ns);

/* Whether it may, as it was last found. */
bool vc_gate_is_open(struct vc_gate *gate);

/* What this process was charged in all, as far as that was work that can have been done by now: an estimate that turns out too high is taken
 * back. Never less than before. Called by one thread, at least every few ms while there is work. */
uint64_t vc_gate_tell(struct vc_gate *gate, uint64_t now_ns);

/* The helper's: whether this process has nothing on the card, as far as is known. */
bool vc_gate_is_idle(struct vc_gate *gate, uint64_t now_ns);
/* … whether siblings that run, or other tenants, may have had work on it since `since_ns`. */
bool vc_gate_others_explain(const struct vc_gate *gate, uint64_t since_ns);

/* Charge the container for what siblings left on the card, of which `dead_ns` by those that ended. */
void vc_gate_owe(struct vc_gate *gate, uint64_t ns, uint64_t dead_ns);

/* The application waited for all of its work on the card. */
void vc_gate_idle(struct vc_gate *gate, uint64_t now_ns);

/* The application waited for all that it launched in a burst. One that always comes for a single burst and then stays away for a while does not keep what it holds until it is thought to be idle:
 * says who gets that now, and must be called. */
enum vc_gate_heir {
    VC_HEIR_NONE,    /* it keeps it */
    VC_HEIR_SIBLING, /* the turn is over, and a sibling waits for it */
    VC_HEIR_ARBITER, /* the lease is */
};
enum vc_gate_heir vc_gate_leave(struct vc_gate *gate, uint64_t now_ns);
void vc_gate_call_heir(struct vc_gate *gate, enum vc_gate_heir heir);

/* Sleep until the answer's deadline, until something changes or until called; counts the time as waited. Returns the time now.
 * The words are those read before vc_gate_enter. */
struct vc_gate_words {
    uint32_t events, grant, called;
};
struct vc_gate_words vc_gate_words(const struct vc_gate *gate);
uint64_t vc_gate_wait(struct vc_gate *gate, struct vc_gate_words words, const struct vc_gate_answer *answer);

/* A thread that had waited was let in, and leaves its place to the next. */
void vc_gate_passed(struct vc_gate *gate);

/* Wake the threads of this process that wait at the gate for an event. */
void vc_gate_notify(struct vc_gate *gate);
/* Tell the arbiter that something changed (a waiter, an early end). */
void vc_gate_call_arbiter(struct vc_gate *gate);

#endif
