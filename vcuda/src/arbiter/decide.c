/* Weighted fair leases on one card: wake up returners, rank by priority, end or keep the lease, grant the next one. */
#include "arbiter/observe.h"

#include <string.h>

#include "arbiter/drain.h"
#include "arbiter/together.h"
#include "gate/bucket.h"
#include "region/share.h"

/* A lease that occupied the card for longer than its charges say, by more than this part, is charged what it occupied. */
static const double UNEXPLAINED_PART = 0.04;
/* … less what others had of it, up to this part of its charges. */
static const double BELIEVED_PART = 0.75;
/* Who interrupts another's lease, or uses no more of its own, has the card handed over once more: what that leaves it idle for is no part of its lease. */
static const double HANDED_OVER_NS = 200000;
/* So much beyond a lease's end its holder may have on the card before the next one waits for that, and so long that one waits: no longer, or what is on the card and what is held back might
 * wait for each other. */
static const uint64_t RUNS_ON_LEAST_NS = 1000000, RUNS_ON_MOST_NS = 25000000;
/* Whose processes are stopped does not see its work end, and learns that it takes longer than it does: nobody waits for that, so long after. */
static const uint64_t STOPPED_LATELY_NS = 1000000000;
/* Time used beyond the guaranteed share while others waited: carried this far, so that long operations are paid for too. */
static const double ENTITLED_DEBT_NS = 1e9;

void vc_plan_init(struct vc_card_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->holder = -1;
    plan->random = 1;
}

void vc_tenant_init(struct vc_tenant *tenant, uint32_t cores, uint32_t core_limit)
{
    memset(tenant, 0, sizeof *tenant);
    vc_tenant_resize(tenant, cores, core_limit);
    tenant->priority = VC_PRIORITY_NORMAL;
    tenant->account_ns = VC_BUCKET_NS;
    tenant->told_account_ns = VC_TOLD_SAVED_NS;
    tenant->entitled_ns = VC_BUCKET_NS;
    tenant->was_idle = true;
}

void vc_tenant_resize(struct vc_tenant *tenant, uint32_t cores, uint32_t core_limit)
{
    tenant->cores = cores < 1 ? 1 : cores > 100 ? 100 : cores;
    /* An impossible limit is none: the guaranteed share. */
    tenant->core_limit = core_limit < tenant->cores || core_limit > 100 ? tenant->cores : core_limit;
}

void vc_tenant_prioritise(struct vc_tenant *tenant, uint32_t priority)
{
    tenant->priority = priority <= VC_PRIORITY_HIGH ? priority : VC_PRIORITY_NORMAL;
}

/* --- who was idle --- */

/* A tenant that comes back from idle starts level with the least of the active ones: nothing is banked. */
static void wake_returners(struct vc_card_plan *plan)
{
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        if (!tenant->active) {
            if ((int)i != plan->holder) {
                tenant->was_idle = true;
                tenant->returned = false;
            }
            continue;
        }
        bool holds = (int)i == plan->holder;
        if (!tenant->was_idle || !(tenant->waiting || holds))
            continue;
        tenant->was_idle = false;
        tenant->returned = !holds;
        bool any = false;
        double least = 0;
        for (unsigned j = 0; j < plan->count; j++) {
            const struct vc_tenant *other = &plan->tenants[j];
            if (j == i || other->was_idle)
                continue;
            if (!any || other->virtual_ns < least)
                least = other->virtual_ns;
            any = true;
        }
        if (any && tenant->virtual_ns < least)
            tenant->virtual_ns = least;
    }
}

/* --- priorities --- */

static bool eligible(const struct vc_tenant *tenant)
{
    return tenant->waiting && tenant->in_credit;
}

static bool others_wait(const struct vc_card_plan *plan, int but)
{
    for (unsigned i = 0; i < plan->count; i++)
        if ((int)i != but && eligible(&plan->tenants[i]))
            return true;
    return false;
}

static void take_entitled(struct vc_tenant *tenant, double ns)
{
    tenant->entitled_ns -= ns;
    if (tenant->entitled_ns > VC_BUCKET_NS)
        tenant->entitled_ns = VC_BUCKET_NS;
    if (tenant->entitled_ns < -ENTITLED_DEBT_NS)
        tenant->entitled_ns = -ENTITLED_DEBT_NS;
}

/* Who has used up its guaranteed share is ranked with the lowest: so no priority can take what was promised to others. */
static void rank(struct vc_card_plan *plan, uint64_t elapsed_ns)
{
    uint32_t lowest = VC_PRIORITY_HIGH;
    for (unsigned i = 0; i < plan->count; i++)
        lowest = plan->tenants[i].priority < lowest ? plan->tenants[i].priority : lowest;
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        take_entitled(tenant, -(double)elapsed_ns * share(tenant));
        if (others_wait(plan, (int)i)) /* lent time is nobody else's */
            take_entitled(tenant, (double)tenant->look_charged_ns);
        tenant->rank = tenant->entitled_ns > 0 ? tenant->priority : lowest;
    }
}

static bool goes_before(const struct vc_tenant *one, const struct vc_tenant *other)
{
    return one->rank != other->rank ? one->rank > other->rank : one->virtual_ns < other->virtual_ns;
}

/* --- leases --- */

static int least_served(const struct vc_card_plan *plan, int candidate, int excluded)
{
    for (unsigned i = 0; i < plan->count; i++) {
        if ((int)i == excluded || !eligible(&plan->tenants[i]))
            continue;
        if (candidate < 0 || goes_before(&plan->tenants[i], &plan->tenants[candidate]))
            candidate = (int)i;
    }
    return candidate;
}

static void start_lease(struct vc_card_plan *plan, uint64_t now_ns, uint64_t clock_ns)
{
    struct vc_tenant *holder = &plan->tenants[plan->holder];
    uint64_t length = (uint64_t)(share(holder) * VC_LEASE_SCALE_NS);
    length = length < VC_LEASE_MIN_NS ? VC_LEASE_MIN_NS : length > VC_LEASE_MAX_NS ? VC_LEASE_MAX_NS : length;
    plan->lease_start_ns = now_ns;
    plan->lease_clock_ns = clock_ns;
    plan->lease_end_ns = clock_ns + length;
    plan->contended = others_wait(plan, plan->holder);
    plan->occupancy_counts = plan->contended;
    holder->lease_charged_ns = 0;
    vc_drain_forget(plan);
    plan->interrupts = false;
    plan->lease_others_ns = holder->others_gpu_ns;
    holder->deep = false;
}

static void grant(struct vc_card_plan *plan, int next, int previous, uint64_t now_ns)
{
    uint64_t clock = now_ns;
    if (previous >= 0) {
        /* The newcomer's work runs once the predecessor's is done. */
        clock = vc_later(clock, plan->tenants[previous].finish_ns);
        if (previous != next)
            plan->tenants[previous].returned = false;
    }
    if (previous != next) {
        plan->sequence++;
        plan->held_from_ns = clock;
    }
    plan->holder = next;
    plan->tenants[next].returned = false;
    plan->tenants[next].was_idle = false;
    start_lease(plan, now_ns, clock);
    plan->occupancy_counts = plan->contended || previous >= 0;
}

static void take_unexplained(struct vc_tenant *holder, double ns)
{
    holder->virtual_ns += ns / share(holder);
    take_entitled(holder, ns);
}

/* What the lease kept the card busy with, but nobody was charged for (switches, bubbles), is the holder's. */
static void end_lease(struct vc_card_plan *plan, uint64_t now_ns)
{
    struct vc_tenant *holder = &plan->tenants[plan->holder];
    uint64_t until = vc_later(holder->finish_ns, now_ns), used_until = holder->was_idle ? vc_later(now_ns - VC_LEASE_IDLE_NS, holder->finish_ns) : until;
    unsigned hand_overs = plan->interrupts + (holder->was_idle && plan->occupancy_counts);
    if (hand_overs != 0)
        take_unexplained(holder, hand_overs * HANDED_OVER_NS);
    if (used_until > plan->lease_clock_ns)
        vc_together_measure(holder, used_until - plan->lease_clock_ns, holder->lease_charged_ns);
    if (until <= plan->lease_clock_ns || !plan->occupancy_counts)
        return;
    double occupied = (double)(until - plan->lease_clock_ns);
    double charged = (double)holder->lease_charged_ns, others = (double)(holder->others_gpu_ns - plan->lease_others_ns);
    /* What others had left on the card was theirs. That goes by what the holder says of itself, too: it is believed up to a part of what it was charged. */
    double most = charged > 0 ? charged * BELIEVED_PART : 0, believed = others < most ? others : most;
    double unexplained = occupied - charged - believed;
    if (unexplained > UNEXPLAINED_PART * occupied)
        take_unexplained(holder, unexplained);
}

/* It used the lease, and what it would launch next is too long for the rest: that would be idle time. */
static bool gives_up(const struct vc_tenant *holder)
{
    return holder->waiting && holder->seen.refill_ns == VC_NOTHING_FITS && holder->lease_charged_ns > 0;
}

/* What it has on the card is too long for its lease, and paid for. Beside it the next holder would have a part of its lease at best, and next to nothing where it waits for each of its
 * short operations; and what each of the two had would be a guess. Who ranks higher waits for one lease at most. */
static bool runs_on(const struct vc_card_plan *plan, uint64_t now_ns)
{
    const struct vc_tenant *holder = &plan->tenants[plan->holder];
    uint64_t until = vc_earlier(vc_earlier(holder->finish_ns, holder->paid_until_ns), plan->lease_end_ns + RUNS_ON_MOST_NS);
    int next = least_served(plan, -1, plan->holder);
    bool higher = next >= 0 && plan->tenants[next].rank > holder->rank, stops = holder->stopped_ns != 0 && now_ns < holder->stopped_ns + STOPPED_LATELY_NS;
    bool uncut = next >= 0 && vc_uncut_between(holder, &plan->tenants[next], now_ns);
    return !higher && !stops && !uncut && until > now_ns && holder->finish_ns > plan->lease_end_ns + RUNS_ON_LEAST_NS;
}

static bool would_be_over(const struct vc_card_plan *plan, uint64_t now_ns)
{
    const struct vc_tenant *holder = &plan->tenants[plan->holder];
    bool nearly_done = holder->finish_ns <= now_ns + VC_LEASE_LEAD_NS;
    if (now_ns >= plan->lease_end_ns)
        return nearly_done || !runs_on(plan, now_ns);
    if (nearly_done && gives_up(holder))
        return true;
    if (nearly_done && now_ns + VC_LEASE_LEAD_NS >= plan->lease_end_ns)
        return true;
    return nearly_done && !holder->in_credit;
}

static bool lease_is_over(struct vc_card_plan *plan, uint64_t now_ns)
{
    return would_be_over(plan, now_ns) && !vc_drain_waits(plan, least_served(plan, -1, plan->holder), now_ns);
}

/* A returner may interrupt a holder of lower rank, or of its own if it has not been served more. */
static int returner(const struct vc_card_plan *plan)
{
    const struct vc_tenant *holder = &plan->tenants[plan->holder];
    int found = -1;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_tenant *tenant = &plan->tenants[i];
        if ((int)i == plan->holder || !tenant->returned || !eligible(tenant) || tenant->rank < holder->rank)
            continue;
        bool interrupts = tenant->rank > holder->rank || tenant->virtual_ns <= holder->virtual_ns + 1.0;
        if (interrupts && (found < 0 || tenant->rank > plan->tenants[found].rank))
            found = (int)i;
    }
    return found;
}

/* One at a time again, behind all that they have on the card together. */
static void part(struct vc_card_plan *plan, uint64_t now_ns)
{
    uint64_t clock = now_ns;
    for (unsigned i = 0; i < plan->count; i++) {
        clock += vc_later(plan->tenants[i].finish_ns, now_ns) - now_ns + VC_LEASE_LEAD_NS;
        plan->tenants[i].parted = true;
    }
    plan->together = false;
    plan->sequence++;
    plan->held_from_ns = clock;
    if (plan->holder < 0)
        return;
    start_lease(plan, now_ns, clock);
    plan->occupancy_counts = false;
}

static void move_lease(struct vc_card_plan *plan, uint64_t now_ns, uint64_t elapsed_ns)
{
    if (plan->together) {
        if (vc_together_stays(plan, now_ns, elapsed_ns))
            return;
        part(plan, now_ns);
    }
    if (plan->holder < 0) {
        int next = least_served(plan, -1, -1);
        if (next >= 0)
            grant(plan, next, -1, now_ns);
        return;
    }
    int old = plan->holder;
    struct vc_tenant *holder = &plan->tenants[old];
    /* Who was just woken waits no more, and has not launched yet. */
    bool idle = !holder->active && (holder->left || now_ns >= plan->lease_clock_ns + VC_LEASE_IDLE_NS);
    if (!others_wait(plan, old)) {
        plan->contended = false;
        vc_drain_forget(plan);
        if (idle) {
            holder->was_idle = true; /* but it keeps the lease: its next burst starts at once */
            plan->occupancy_counts = false; /* nobody lost what it leaves idle */
        } else if (now_ns + VC_LEASE_LEAD_NS >= plan->lease_end_ns) {
            start_lease(plan, now_ns, now_ns);
        }
        return;
    }
    plan->contended = true;
    if (vc_together_begins(plan, now_ns)) {
        plan->together = true;
        plan->sequence++;
        return;
    }
    bool over = idle || lease_is_over(plan, now_ns);
    int preempting = over || vc_drain_look(plan) != 0 ? -1 : returner(plan); /* who ranks higher ends the wait */
    if (idle)
        holder->was_idle = true;
    else if (preempting < 0 && !over)
        return;
    bool interrupts = preempting >= 0;
    end_lease(plan, now_ns);
    if (preempting < 0) {
        bool may_stay = holder->in_credit && !idle; /* whether it waits at this moment or its host is at work */
        preempting = least_served(plan, may_stay ? old : -1, old);
    }
    grant(plan, preempting, old, now_ns);
    plan->interrupts = interrupts;
}

/* --- results --- */

/* Who launches beside others has a lease that is renewed before it ends: it may end soon. */
static uint64_t rolling_end(const struct vc_tenant *tenant, uint64_t now_ns)
{
    bool good = tenant->lease_end_ns > now_ns + VC_LEASE_MAX_NS / 2 && tenant->lease_end_ns != UINT64_MAX;
    return good ? tenant->lease_end_ns : now_ns + VC_LEASE_MAX_NS;
}

static void write_grants(struct vc_card_plan *plan, uint64_t now_ns)
{
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        bool holds = plan->together ? vc_together_launches(plan, i) : (int)i == plan->holder;
        uint64_t end = !holds           ? 0
                       : plan->together ? rolling_end(tenant, now_ns)
                       : plan->contended ? plan->lease_end_ns
                                         : UINT64_MAX;
        uint64_t lease = plan->sequence | (plan->together ? VC_LEASE_TOGETHER : vc_plan_others_behind(plan, i, now_ns) ? VC_LEASE_UNCLEAR : 0);
        uint64_t sequence = holds ? lease : tenant->lease_sequence ? tenant->lease_sequence : 1;
        tenant->granted_ppm = tenant->core_limit * VC_PPM_PER_CORE;
        tenant->wake = end > tenant->lease_end_ns;
        tenant->lease_end_ns = end;
        tenant->lease_sequence = sequence;
        if (holds) {
            tenant->lease_start_ns = plan->lease_start_ns;
            tenant->lease_clock_ns = plan->held_from_ns;
        }
    }
}

static uint64_t next_look(const struct vc_card_plan *plan, uint64_t now_ns)
{
    uint64_t next = now_ns + VC_ARBITER_REST_NS;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_tenant *tenant = &plan->tenants[i];
        if (tenant->active || tenant->seen.open)
            next = vc_earlier(next, now_ns + VC_ARBITER_TICK_NS);
        if (tenant->waiting && !tenant->in_credit)
            next = vc_earlier(next, tenant->credit_at_ns);
    }
    if (plan->holder >= 0 && !plan->together) {
        uint64_t finish = plan->tenants[plan->holder].finish_ns;
        if (plan->contended) {
            uint64_t drained = vc_drain_look(plan), lead = drained ? drained : vc_later(plan->lease_end_ns, finish) - VC_LEASE_LEAD_NS;
            next = vc_earlier(next, vc_later(now_ns < plan->lease_end_ns ? vc_earlier(plan->lease_end_ns, lead) : lead, now_ns));
            if (gives_up(&plan->tenants[plan->holder]))
                next = vc_earlier(next, vc_later(finish - vc_earlier(finish, VC_LEASE_LEAD_NS), now_ns));
        }
        uint64_t idle_from = vc_later(finish, plan->lease_clock_ns);
        if (idle_from + VC_LEASE_IDLE_NS >= now_ns)
            next = vc_earlier(next, idle_from + VC_LEASE_IDLE_NS + 5000);
    }
    return vc_later(next, now_ns + 20000);
}

uint64_t vc_plan_decide(struct vc_card_plan *plan, uint64_t now_ns)
{
    uint64_t elapsed = plan->looked_ns != 0 && now_ns > plan->looked_ns ? now_ns - plan->looked_ns : 0;
    vc_plan_observe(plan, now_ns);
    vc_together_look(plan, now_ns, elapsed);
    rank(plan, elapsed);
    wake_returners(plan);
    move_lease(plan, now_ns, elapsed);
    write_grants(plan, now_ns);
    return next_look(plan, now_ns);
}

void vc_plan_remove(struct vc_card_plan *plan, unsigned index)
{
    unsigned last = plan->count - 1;
    if (plan->holder == (int)index)
        plan->holder = -1;
    else if (plan->holder == (int)last)
        plan->holder = (int)index;
    plan->favoured = -1; /* an index, too: whoever lags is found anew */
    plan->tenants[index] = plan->tenants[last];
    plan->count = last;
}
