/* Who may use a card next: the arbiter's rules for one card, pure arithmetic on what was observed and the time.
 *
 * Leases go to the waiting tenant with the least virtual time (GPU time charged / share); nothing is banked while idle.
 * Priority is about order, never about amounts: who is within its guaranteed share goes before tenants of lower priority.
 * All observations come from tenants and may be lies: they are bounded here, and a liar only shortens its own turn.
 */
#ifndef VC_ARBITER_CORE_H
#define VC_ARBITER_CORE_H

#include <stdbool.h>
#include <stdint.h>

#include "region/abi.h"

enum {
    VC_TOLD_SAVED_NS = 100000000, /* what is told comes late, of many processes by as much */
    VC_LEASE_SCALE_NS = 24000000, /* a lease lasts share × this … */
    VC_LEASE_MIN_NS = 3000000,    /* … but not less than this … */
    VC_LEASE_MAX_NS = 8000000,    /* … nor more than this */
    VC_LEASE_LEAD_NS = 200000,    /* the next lease may open so long before the end, if so little is outstanding */
    VC_LEASE_IDLE_NS = 200000,    /* a holder with nothing outstanding for so long passes the lease on */
    VC_CARD_SLICE_NS = 2100000,   /* the longest that a card which slices gives one tenant while others wait, and the switch */
    VC_ARBITER_TICK_NS = 1000000, /* while anything is going on, decide at least so often … */
    VC_ARBITER_REST_NS = 1000000000 /* … and otherwise so often: whoever begins rings, and says so */
};

/* What one tenant's usage file said, as read. */
struct vc_observation {
    uint64_t gpu_ns;
    uint64_t told_ns; /* its processes' charges by what the kernel keeps of them */
    int64_t credit_ns;
    uint64_t credit_updated_ns;
    int64_t refill_ns;
    uint64_t waiting_until_ns;
    uint64_t predicted_finish_ns;
    uint64_t began_ns; /* with VC_NOT_BEGUN: its work waits for others' on the card, since then; with VC_BEHIND: for something else, as was seen then; with VC_UNTOLD: nobody has looked since */
    int64_t stood_ns;  /* charged for processes that stand still, by what the kernel keeps of them, less what was charged back */
    bool hides;        /* processes of it have work on the card, by what the kernel keeps, of which the file says nothing */
    unsigned open;     /* so many living processes of it have work on the card whose end nobody saw: when they die matters */
};

/* One container on the card. The caller fills the first part; the rest belongs to these rules. */
struct vc_tenant {
    uint32_t cores, core_limit; /* bounded to 1…100 and cores…100 */
    uint32_t priority;          /* VC_PRIORITY_… */
    struct vc_observation seen;

    bool known;          /* observed before: deltas make sense */
    uint64_t last_gpu_ns, last_told_ns;
    int64_t last_stood_ns, look_stood_ns; /* the latter: since the last look … */
    int64_t unsaid_charged_ns;            /* … and of it in all, what the file said nothing of */
    int64_t refundable_ns; /* charged lately, so that much may be taken back */
    double virtual_ns;
    int64_t account_ns;  /* its bucket as its charges and its limit make it, whatever credit its file shows … */
    int64_t told_account_ns; /* … and whatever charges */
    double entitled_ns;  /* what is left of the guaranteed share: flows in at `cores`, is charged while others wait */
    uint32_t rank;       /* the priority in force: beyond the guaranteed share, the lowest on the card */
    int64_t lease_charged_ns, look_charged_ns; /* since the lease began, since the last look */
    int64_t unrun_ns, told_unrun_ns; /* charged, or told, and not yet taken to have run; below 0 where it was charged back */
    bool is_long;        /* among it are operations that are charged by how long they take … */
    int64_t long_ns;     /* … of which so much was not taken to have run since */
    uint64_t finish_ns;  /* bounded predicted finish */
    uint64_t charged_at_ns; /* when it was last charged anything */
    uint64_t paid_until_ns; /* … as far as it was charged for it */
    bool still;          /* its processes say neither that their work is done nor until when it lasts: they were stopped … */
    uint64_t stopped_ns; /* … the last time then … */
    uint64_t still_ns;   /* … and so long it was believed to be on the card for that, beyond what it was charged … */
    int64_t beside_still_ns; /* … and what others were charged meanwhile, not yet taken for their part */
    uint64_t queued_since_ns; /* its work has not begun since then; 0: it has … */
    uint64_t queued_until_ns; /* … and had not at that look */
    unsigned queued_behind;   /* the most others that had work on the card meanwhile, or wanted to */
    uint64_t uncut_until_ns;  /* lately it waited for longer than slices explain: it says that the card runs kernels to their end */
    uint64_t behind_ns; /* its work was last seen to wait for something that is not on the card, and may begin at any time */
    bool waiting, active, was_idle, returned, in_credit;
    bool left;           /* it says that it will not launch anything soon, and is done */
    uint64_t active_ns; /* when it last was */
    double fill;          /* what part of its leases it used, as far as it was charged */
    unsigned shallow;     /* leases in a row in which it never had much outstanding */
    bool deep;            /* … and in this one it had */
    bool parted;          /* its next lease is the first after it launched beside others */
    int64_t period_charged_ns; /* while tenants launch side by side: since the period began … */
    unsigned period_looks;     /* … at how many looks it was active … */
    double lag_ns;             /* … and by how much it lags behind what leases would have given it */
    int64_t hidden_ns; /* what ends of its leases that were waited for say that it hides at the others */
    uint64_t credit_at_ns; /* when a waiting tenant in debt will have credit again */

    /* What to write into its limits file. */
    uint32_t granted_ppm;
    uint64_t lease_start_ns;
    uint64_t lease_end_ns; /* 0: not the holder; UINT64_MAX: nobody else waits */
    uint64_t lease_clock_ns;
    uint64_t lease_sequence;
    uint64_t closed_until_ns;  /* the account is overdrawn: nothing starts before */
    uint64_t saved_ns;         /* so much more its bucket holds: others have taken that beyond their limits */
    uint64_t others_gpu_ns;    /* a clock: others' parts of the card while this tenant had work on it */
    uint64_t others_active_ns; /* when others last had work on the card … */
    uint64_t others_still_ns;  /* … of which nobody says until when it lasts */
    uint64_t unsaid_ns;        /* when processes of its own last had work on the card of which its file says nothing */
    bool wake; /* the grant changed: wake its waiting threads */
};

struct vc_card_plan {
    struct vc_tenant *tenants;
    unsigned count;
    int holder; /* index, or -1 */
    bool contended;        /* somebody else waits: the lease ends */
    bool occupancy_counts; /* somebody waited from its beginning: the holder answers for all of its time */
    uint64_t lease_start_ns, lease_end_ns, lease_clock_ns;
    uint64_t lease_others_ns; /* the holder's clock of others' parts when its lease began */
    uint64_t random; /* no tenant knows it */
    bool interrupts;       /* it came back from idle, and ended another's lease */
    bool over, drains, drains_by_chance; /* the lease is over, but what is on the card is let end first … */
    uint64_t over_ns; /* … since then … */
    int64_t over_charged_ns; /* … when so much had been charged for it */
    uint64_t held_from_ns; /* when the holder's work could first run; renewals keep it */
    uint64_t sequence;
    bool together;           /* all that are known to leave room for each other launch side by side */
    int favoured;            /* … or only this one, for a while; -1: all */
    uint64_t together_ns, beside_ns, period_ns, apart_until_ns;
    unsigned period_looks;
    uint64_t looked_ns;
};

/* Both say that the card runs kernels to their end. By the word of one alone another would pay for work that runs on into its leases. */
static inline bool vc_uncut_between(const struct vc_tenant *one, const struct vc_tenant *other, uint64_t now_ns)
{
    return one->uncut_until_ns > now_ns && other->uncut_until_ns > now_ns;
}

void vc_plan_init(struct vc_card_plan *plan);
void vc_tenant_init(struct vc_tenant *tenant, uint32_t cores, uint32_t core_limit);
/* The limits as they are now (live changes); bounds them. */
void vc_tenant_resize(struct vc_tenant *tenant, uint32_t cores, uint32_t core_limit);
/* An unknown priority counts as normal. */
void vc_tenant_prioritise(struct vc_tenant *tenant, uint32_t priority);

/* Decide from the tenants' observations; fills what to write and returns when to decide again at the latest. */
uint64_t vc_plan_decide(struct vc_card_plan *plan, uint64_t now_ns);

/* Tenant `index` is about to be taken out of `plan->tenants` (the last one moves into its place). */
void vc_plan_remove(struct vc_card_plan *plan, unsigned index);

#endif
