/* Tenants whose hosts don't fill the card launch side by side: exclusive leases would leave it idle (rule 17 of docs/compute.md).
 *
 * Nobody gets less than leases would give it: a lease is a part of the time, of which such a tenant uses a part. Who lags behind that
 * has the card alone until it has caught up; who is another program now, or was never measured, ends it for all.
 */
#include "arbiter/together.h"

#include "arbiter/observe.h"

/* So much outstanding says that the card, not the host, is what a tenant waits for. Its permit is a part of it. */
static const uint64_t DEEP_NS = 600000;
/* Leases in a row without, before it is believed; and the least that a lease must have lasted to tell. */
static const unsigned SHALLOW_LEASES = 2;
static const uint64_t TELLING_NS = 2000000;
static const double TELLING_PART = 0.02;
/* With more to do together than this they would only be in each other's way. */
static const double MOST_TOGETHER = 1.5;
/* So much less than leases would have given it, and it has the card alone for a while. */
static const double LAG_NS = 2e6;
/* With nobody beside it for so long, a tenant has the lease. */
static const uint64_t ALONE_NS = 10000000;
/* Who uses so much more than of a lease, over so long, is measured anew. */
static const uint64_t PERIOD_NS = 50000000;
static const double GREW = 1.25, GREW_BY = 0.05;
/* What a card gives several at best, how much less is in vain, and for how long there are leases then. */
static const double MOST_OF_A_CARD = 0.9, IN_VAIN_PART = 0.6;
static const uint64_t APART_NS = UINT64_C(5000000000);
/* Programs change: each one's part of a lease is measured anew so often. */
static const uint64_t MEASURE_NS = UINT64_C(2000000000);

static bool known(const struct vc_tenant *tenant)
{
    return tenant->shallow >= SHALLOW_LEASES;
}

bool vc_together_launches(const struct vc_card_plan *plan, unsigned index)
{
    return known(&plan->tenants[index]) && (plan->favoured < 0 || plan->favoured == (int)index);
}

void vc_together_look(struct vc_card_plan *plan, uint64_t now_ns, uint64_t elapsed_ns)
{
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        /* Before that its predecessor's work runs. */
        bool piles_up = (int)i == plan->holder && tenant->finish_ns > vc_later(now_ns, plan->lease_clock_ns) + DEEP_NS;
        bool long_ones = tenant->look_charged_ns > (int64_t)(elapsed_ns + DEEP_NS);
        if (!plan->together && (piles_up || long_ones)) { /* beside others everybody's work piles up while theirs runs */
            tenant->deep = true;
            tenant->shallow = 0;
        }
        tenant->period_charged_ns += tenant->look_charged_ns;
        tenant->period_looks += tenant->active;
    }
    plan->period_looks++;
}

void vc_together_measure(struct vc_tenant *holder, uint64_t occupied_ns, int64_t charged_ns)
{
    if (holder->parted) { /* what it had launched beside others is settled in this one */
        holder->parted = false;
        return;
    }
    double part = (double)charged_ns / (double)occupied_ns;
    if (occupied_ns < TELLING_NS || part < TELLING_PART) /* what it does may not even have a cost yet */
        return;
    holder->fill = holder->fill == 0 ? part : (holder->fill + part) / 2;
    if (!holder->deep)
        holder->shallow++;
}

static void new_period(struct vc_card_plan *plan, uint64_t now_ns)
{
    plan->period_ns = now_ns;
    plan->period_looks = 0;
    for (unsigned i = 0; i < plan->count; i++) {
        plan->tenants[i].period_charged_ns = 0;
        plan->tenants[i].period_looks = 0;
    }
}

bool vc_together_begins(struct vc_card_plan *plan, uint64_t now_ns)
{
    unsigned active = 0;
    double sum = 0;
    if (now_ns < plan->apart_until_ns)
        return false;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_tenant *tenant = &plan->tenants[i];
        if (!tenant->active)
            continue;
        if (!known(tenant))
            return false;
        active++;
        sum += tenant->fill;
    }
    if (active < 2 || sum > MOST_TOGETHER)
        return false;
    plan->together_ns = plan->beside_ns = now_ns;
    plan->favoured = -1;
    for (unsigned i = 0; i < plan->count; i++)
        plan->tenants[i].lag_ns = 0;
    new_period(plan, now_ns);
    return true;
}

/* Who uses much more than it did of a lease is another program now. */
static bool grew(const struct vc_tenant *tenant, uint64_t lasted_ns)
{
    return (double)tenant->period_charged_ns > (tenant->fill * GREW + GREW_BY) * (double)lasted_ns;
}

/* Side by side they were charged much less than each used of its leases: either nobody gained, or somebody's work is charged too little there. */
static bool in_vain(const struct vc_card_plan *plan, uint64_t lasted_ns)
{
    double wanted = 0, got = 0;
    unsigned busy = 0;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_tenant *tenant = &plan->tenants[i];
        double limit = (double)tenant->core_limit / 100;
        got += (double)tenant->period_charged_ns / (double)lasted_ns;
        if (10 * tenant->period_looks < 9 * plan->period_looks)
            continue;
        wanted += tenant->fill < limit ? tenant->fill : limit;
        busy++;
    }
    return busy > 1 && got < IN_VAIN_PART * (wanted < MOST_OF_A_CARD ? wanted : MOST_OF_A_CARD);
}

/* Who lags most behind what leases would have given it has the card alone until it does not any more. */
static void favour(struct vc_card_plan *plan, uint64_t elapsed_ns)
{
    int most = -1;
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        tenant->lag_ns += share(tenant) * tenant->fill * (double)elapsed_ns - (double)tenant->look_charged_ns;
        double most_ahead = tenant->active && tenant->in_credit ? -LAG_NS : 0, most_behind = tenant->active ? 5 * LAG_NS : 0;
        tenant->lag_ns = tenant->lag_ns < most_ahead ? most_ahead : tenant->lag_ns > most_behind ? most_behind : tenant->lag_ns;
        if (tenant->lag_ns > LAG_NS && (most < 0 || tenant->lag_ns > plan->tenants[most].lag_ns))
            most = (int)i;
    }
    if (plan->favoured < 0 || plan->tenants[plan->favoured].lag_ns <= 0)
        plan->favoured = most;
}

bool vc_together_stays(struct vc_card_plan *plan, uint64_t now_ns, uint64_t elapsed_ns)
{
    unsigned active = 0;
    for (unsigned i = 0; i < plan->count; i++) {
        active += plan->tenants[i].active;
        if (plan->tenants[i].active && !known(&plan->tenants[i]))
            return false;
    }
    plan->beside_ns = active > 1 ? now_ns : plan->beside_ns;
    if (now_ns > plan->beside_ns + ALONE_NS) /* then what it does can be measured */
        return false;
    favour(plan, elapsed_ns);
    bool anew = now_ns >= plan->together_ns + MEASURE_NS;
    uint64_t lasted = now_ns - plan->period_ns;
    if (lasted >= PERIOD_NS) {
        for (unsigned i = 0; i < plan->count; i++)
            anew = anew || grew(&plan->tenants[i], lasted);
        if (in_vain(plan, lasted)) {
            plan->apart_until_ns = now_ns + APART_NS;
            anew = true;
        }
        new_period(plan, now_ns);
    }
    if (!anew)
        return true;
    for (unsigned i = 0; i < plan->count; i++)
        if (known(&plan->tenants[i]))
            plan->tenants[i].shallow = SHALLOW_LEASES - 1;
    return false;
}
