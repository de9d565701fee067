/* What processes that stand still with work on the card have of it, by what they told where nobody else can write (region/charged.h).
 *
 * Who runs tells every few milliseconds until when all that it had is told. Who does not and has work there has the card as it passes, as far as neither its
 * siblings told that they had it, nor other tenants had, nor a sibling that asked the card found it free. It is charged by the arbiter's own account
 * only, and charged back once it goes on: then it tells itself what it had. Arithmetic only, on times that are passed in.
 */
#ifndef VC_STOOD_H
#define VC_STOOD_H

#include <stdbool.h>
#include <stdint.h>

#include "region/abi.h"

enum {
    VC_STANDS_AFTER_NS = 12000000,    /* a helper that runs tells sooner */
    VC_STOOD_COUNTS_NS = 100000000,   /* who stands still for less may go on, or be asked for */
    VC_STOOD_UNASKED_NS = 1000000000, /* so long what passed may turn out to have been free: beside other tenants the card can be asked now and then only */
    VC_STOOD_TOLD_NS = 1000000,       /* the unit of what is told */
    VC_STOOD_LOOKS = 6, VC_STOOD_LOOK_NS = 5000000, /* what was known at looks so far apart is remembered */
};
/* Nobody sees a stopped process's work end: so much it is charged, or its container would wait for ever. */
#define VC_STOOD_MOST_NS UINT64_C(5000000000)
/* … and so much where the file hides it, which no honest program does. */
#define VC_STOOD_HIDDEN_MOST_NS UINT64_C(60000000000)

/* What one process tells. */
struct vc_stood_slot {
    uint64_t since_ns; /* which process that is */
    uint64_t until_ns; /* what it had of the card is told until then; 0: it has nothing there */
    double charged_ns; /* for what passed since … */
    double fresh_ns;   /* … of which nobody said whether the card was free */
    double excused_ns; /* not charged, as siblings said that it was */
};

/* Of one container on one card. */
struct vc_stood {
    struct vc_stood_slot slots[VC_MAX_SLOTS];
    unsigned open, standing; /* how many have work there, and stand still */
    bool hidden;            /* the file says nothing of it: so little may be left to who is killed soon that no silence is too short */
    bool hides;             /* … for longer than a process that closes its own takes from one word to the next */
    uint64_t until_ns;      /* what passed until then is charged, while one stands; 0: none does */
    uint64_t fresh_from_ns; /* … and from then on nobody said whether the card was free */
    double charged_ns;      /* in all, less what was charged back */
    double excused_ns;      /* of all that stand still */
    double ahead_ns;        /* told beyond what passed meanwhile */
    struct vc_stood_clocks {
        uint64_t at_ns, told_ns, others_ns;
    } then, looks[VC_STOOD_LOOKS]; /* at `until_ns`; at the latest looks, the last one first */
};

/* That process was killed or ended at `ended_ns`, as far as anybody knows, with work on the card: what passed since it last told what it had it had, too. Other arguments as below; called
 * before vc_stood_tells says so. */
void vc_stood_ends(struct vc_stood *stood, uint32_t slot, uint64_t ended_ns, uint64_t now_ns, uint64_t told_ns, uint64_t others_ns);

/* What the process of a slot tells now. `since_ns` of another process than before: that one has ended. */
void vc_stood_tells(struct vc_stood *stood, uint32_t slot, uint64_t since_ns, uint64_t until_ns);

/* A sibling asked the card at `at_ns`; answers in the order of their times. Anybody in the container can make up an answer: that it was free is believed for VC_STOOD_MOST_NS in all, and
 * until the stopped process is killed, which then is charged after all. Who goes on has told what it had. */
void vc_stood_asked(struct vc_stood *stood, uint64_t at_ns, bool busy);

/* Charge what passed until now. `told_ns`: what all processes of the container told that they had; `others_ns`: the clock of other tenants' parts. */
void vc_stood_look(struct vc_stood *stood, uint64_t now_ns, uint64_t told_ns, uint64_t others_ns);

/* What of it counts: who has stood still for a moment only goes on, or is asked for, before its container would have to wait. */
double vc_stood_counts(const struct vc_stood *stood, uint64_t now_ns);

/* When who says nothing until then begins to stand still; UINT64_MAX: nobody. */
uint64_t vc_stood_next(const struct vc_stood *stood, uint64_t now_ns);

#endif
