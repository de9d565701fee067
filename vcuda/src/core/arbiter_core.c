/* Weighted fair leases on one card: observe, wake up returners, end or keep the lease, grant the next one. */
#include "arbiter_core.h"

#include <string.h>

#include "bucket.h"

/* No tenant can have been charged, nor have predicted, more than this between two looks. */
static const uint64_t CHARGE_BOUND_NS = UINT64_C(10000000000);
/* Refunds correct estimates: never more than was charged before, so that a counter that runs backwards gains nothing. */
static const uint64_t REFUND_BOUND_NS = UINT64_C(1000000000);
static const uint64_t FINISH_BOUND_NS = UINT64_C(2000000000);
static const uint64_t FINISH_SLACK_NS = 1000000;
/* A lease that occupied the card for longer than its charges say, by more than this part, is charged what it occupied. */
static const double UNEXPLAINED_PART = 0.04;

static uint64_t later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

void vc_plan_init(struct vc_card_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->holder = -1;
}

void vc_tenant_init(struct vc_tenant *tenant, uint32_t cores, uint32_t core_limit)
{
    memset(tenant, 0, sizeof *tenant);
    vc_tenant_resize(tenant, cores, core_limit);
    tenant->was_idle = true;
}

void vc_tenant_resize(struct vc_tenant *tenant, uint32_t cores, uint32_t core_limit)
{
    tenant->cores = cores < 1 ? 1 : cores > 100 ? 100 : cores;
    tenant->core_limit = core_limit < tenant->cores ? tenant->cores : core_limit > 100 ? 100 : core_limit;
}

static double share(const struct vc_tenant *tenant)
{
    return (double)tenant->cores / 100.0;
}

/* --- observing --- */

static int64_t charge_since_last_look(struct vc_tenant *tenant)
{
    if (!tenant->known) {
        tenant->known = true;
        tenant->last_gpu_ns = tenant->seen.gpu_ns;
        return 0;
    }
    int64_t delta = (int64_t)(tenant->seen.gpu_ns - tenant->last_gpu_ns);
    tenant->last_gpu_ns = tenant->seen.gpu_ns;
    if (delta > (int64_t)CHARGE_BOUND_NS)
        delta = (int64_t)CHARGE_BOUND_NS;
    if (delta < -tenant->refundable_ns)
        delta = -tenant->refundable_ns;
    tenant->refundable_ns += delta;
    if (tenant->refundable_ns > (int64_t)REFUND_BOUND_NS)
        tenant->refundable_ns = (int64_t)REFUND_BOUND_NS;
    return delta;
}

/* The bucket as the tenant will see it at its next look; in debt, also when it will have refilled. */
static void judge_credit(struct vc_tenant *tenant, uint64_t now_ns)
{
    const struct vc_observation *seen = &tenant->seen;
    uint32_t rate = tenant->core_limit * VC_PPM_PER_CORE;
    int64_t credit = seen->credit_ns;
    if (credit < -VC_CHARGE_LIMIT_NS)
        credit = -VC_CHARGE_LIMIT_NS;
    uint64_t elapsed = now_ns > seen->credit_updated_ns ? now_ns - seen->credit_updated_ns : 0;
    elapsed = earlier(elapsed, CHARGE_BOUND_NS);
    credit += (int64_t)(elapsed * rate / VC_PPM);
    int64_t needed = seen->refill_ns < 1 ? 1 : seen->refill_ns > VC_CHUNK_NS ? VC_CHUNK_NS : seen->refill_ns;
    if (!tenant->waiting)
        needed = 1;
    uint64_t wait = vc_bucket_wait_ns(credit, needed, rate);
    tenant->in_credit = wait == 0;
    tenant->credit_at_ns = now_ns + wait;
}

static bool on_card(const struct vc_tenant *tenant, uint64_t now_ns)
{
    return tenant->finish_ns + VC_LEASE_IDLE_NS > now_ns;
}

/* What a tenant predicts is believed as far as it was charged for it: who claims more work than that pays for it. */
static uint64_t believed_finish(const struct vc_tenant *tenant, uint64_t now_ns, int64_t charged)
{
    uint64_t paid = later(now_ns, tenant->finish_ns) + (charged > 0 ? (uint64_t)charged : 0) + FINISH_SLACK_NS;
    return earlier(tenant->seen.predicted_finish_ns, earlier(paid, now_ns + FINISH_BOUND_NS));
}

/* How long since the last look the tenant had work on the card, as it predicted. */
static uint64_t busy_since(const struct vc_tenant *tenant, uint64_t last_ns, uint64_t now_ns)
{
    uint64_t until = earlier(tenant->finish_ns, now_ns);
    return until > last_ns ? until - last_ns : 0;
}

/* Where several tenants had work on the card, its slices went round: each lost the others' equal parts. */
static void split_overlaps(struct vc_card_plan *plan, uint64_t last_ns, uint64_t now_ns)
{
    unsigned present = 0;
    for (unsigned i = 0; i < plan->count; i++)
        present += busy_since(&plan->tenants[i], last_ns, now_ns) != 0;
    if (present < 2)
        return;
    for (unsigned i = 0; i < plan->count; i++) {
        uint64_t own = busy_since(&plan->tenants[i], last_ns, now_ns);
        for (unsigned j = 0; own != 0 && j < plan->count; j++)
            if (j != i)
                plan->tenants[i].others_gpu_ns += earlier(own, busy_since(&plan->tenants[j], last_ns, now_ns)) / present;
    }
}

static void observe(struct vc_card_plan *plan, uint64_t now_ns)
{
    unsigned busy = 0;
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        int64_t charged = charge_since_last_look(tenant);
        tenant->virtual_ns += (double)charged / share(tenant);
        tenant->lease_charged_ns += charged;
        tenant->waiting = tenant->seen.waiting_until_ns > now_ns;
        tenant->finish_ns = believed_finish(tenant, now_ns, charged);
        tenant->active = tenant->waiting || on_card(tenant, now_ns);
        busy += on_card(tenant, now_ns);
        judge_credit(tenant, now_ns);
    }
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        if (busy > on_card(tenant, now_ns))
            tenant->others_active_ns = now_ns;
    }
    if (plan->looked_ns != 0)
        split_overlaps(plan, plan->looked_ns, now_ns);
    plan->looked_ns = now_ns;
}

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

/* --- leases --- */

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

static int least_served(const struct vc_card_plan *plan, int candidate, int excluded)
{
    for (unsigned i = 0; i < plan->count; i++) {
        if ((int)i == excluded || !eligible(&plan->tenants[i]))
            continue;
        if (candidate < 0 || plan->tenants[i].virtual_ns < plan->tenants[candidate].virtual_ns)
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
}

static void grant(struct vc_card_plan *plan, int next, int previous, uint64_t now_ns)
{
    uint64_t clock = now_ns;
    if (previous >= 0) {
        /* The newcomer's work runs once the predecessor's is done. */
        clock = later(clock, plan->tenants[previous].finish_ns);
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

/* What the lease kept the card busy with, but nobody was charged for (switches, bubbles), is the holder's. */
static void end_lease(struct vc_card_plan *plan, uint64_t now_ns)
{
    struct vc_tenant *holder = &plan->tenants[plan->holder];
    if (!plan->occupancy_counts)
        return;
    uint64_t until = holder->finish_ns > now_ns ? holder->finish_ns
                     : holder->was_idle         ? later(now_ns - VC_LEASE_IDLE_NS, holder->finish_ns)
                                                : now_ns;
    if (until <= plan->lease_clock_ns)
        return;
    double occupied = (double)(until - plan->lease_clock_ns);
    double unexplained = occupied - (double)holder->lease_charged_ns;
    if (unexplained > UNEXPLAINED_PART * occupied)
        holder->virtual_ns += unexplained / share(holder);
}

static bool lease_is_over(const struct vc_card_plan *plan, uint64_t now_ns)
{
    const struct vc_tenant *holder = &plan->tenants[plan->holder];
    if (now_ns >= plan->lease_end_ns)
        return true;
    bool nearly_done = holder->finish_ns <= now_ns + VC_LEASE_LEAD_NS;
    if (nearly_done && now_ns + VC_LEASE_LEAD_NS >= plan->lease_end_ns)
        return true;
    return nearly_done && !holder->in_credit;
}

/* A returner may interrupt the holder if it has not been served more. */
static int returner(const struct vc_card_plan *plan)
{
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_tenant *tenant = &plan->tenants[i];
        if ((int)i != plan->holder && tenant->returned && eligible(tenant) &&
            tenant->virtual_ns <= plan->tenants[plan->holder].virtual_ns + 1.0)
            return (int)i;
    }
    return -1;
}

static void move_lease(struct vc_card_plan *plan, uint64_t now_ns)
{
    if (plan->holder < 0) {
        int next = least_served(plan, -1, -1);
        if (next >= 0)
            grant(plan, next, -1, now_ns);
        return;
    }
    int old = plan->holder;
    struct vc_tenant *holder = &plan->tenants[old];
    bool idle = !holder->active;
    if (!others_wait(plan, old)) {
        plan->contended = false;
        if (idle) {
            holder->was_idle = true; /* but it keeps the lease: its next burst starts at once */
        } else if (now_ns + VC_LEASE_LEAD_NS >= plan->lease_end_ns) {
            start_lease(plan, now_ns, now_ns);
        }
        return;
    }
    plan->contended = true;
    int preempting = lease_is_over(plan, now_ns) || idle ? -1 : returner(plan);
    if (idle)
        holder->was_idle = true;
    else if (preempting < 0 && !lease_is_over(plan, now_ns))
        return;
    end_lease(plan, now_ns);
    if (preempting < 0) {
        bool may_stay = holder->waiting && holder->in_credit && !idle;
        preempting = least_served(plan, may_stay ? old : -1, old);
    }
    grant(plan, preempting, old, now_ns);
}

/* --- results --- */

static void write_grants(struct vc_card_plan *plan)
{
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        bool holds = (int)i == plan->holder;
        uint64_t end = !holds ? 0 : plan->contended ? plan->lease_end_ns : UINT64_MAX;
        uint64_t sequence = holds ? plan->sequence : tenant->lease_sequence ? tenant->lease_sequence : 1;
        tenant->granted_ppm = tenant->core_limit * VC_PPM_PER_CORE;
        tenant->wake = end > tenant->lease_end_ns && tenant->waiting;
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
        if (tenant->active)
            next = earlier(next, now_ns + VC_ARBITER_TICK_NS);
        if (tenant->waiting && !tenant->in_credit)
            next = earlier(next, tenant->credit_at_ns);
    }
    if (plan->holder >= 0) {
        uint64_t finish = plan->tenants[plan->holder].finish_ns;
        if (plan->contended) {
            uint64_t lead = later(plan->lease_end_ns, finish) - VC_LEASE_LEAD_NS;
            next = earlier(next, earlier(plan->lease_end_ns, later(lead, now_ns)));
        }
        if (finish + VC_LEASE_IDLE_NS >= now_ns)
            next = earlier(next, finish + VC_LEASE_IDLE_NS + 5000);
    }
    return later(next, now_ns + 20000);
}

uint64_t vc_plan_decide(struct vc_card_plan *plan, uint64_t now_ns)
{
    observe(plan, now_ns);
    wake_returners(plan);
    move_lease(plan, now_ns);
    write_grants(plan);
    return next_look(plan, now_ns);
}

void vc_plan_remove(struct vc_card_plan *plan, unsigned index)
{
    unsigned last = plan->count - 1;
    if (plan->holder == (int)index)
        plan->holder = -1;
    else if (plan->holder == (int)last)
        plan->holder = (int)index;
    plan->tenants[index] = plan->tenants[last];
    plan->count = last;
}
