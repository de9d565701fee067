/* How the card was divided between tenants that had work on it since the last look; see divide.h. */
#include "arbiter/divide.h"

#include "base/clock.h"
#include "gate/bucket.h"
#include "gate/estimate.h"

/* What was charged and did not run, or ran and was charged back, is remembered so far. */
static const int64_t UNRUN_BOUND_NS = 10000000;
/* … and so far of long operations. These are charged by how long they take, which goes by what others had meanwhile: that tells nothing of what others had. */
static const int64_t LONG_BOUND_NS = 1000000000;
/* More than a holder hands over of short ones before the next look: what it may have outstanding, a permit and half an operation. */
static const int64_t LONG_AT_ONCE_NS = 3500000;
/* What lasts for longer than it was charged is charged as it passes; what is not by now is over. */
static const int64_t LONG_OVERDUE_NS = 2000000;

static void add_bounded(int64_t *sum_ns, int64_t more_ns)
{
    *sum_ns += more_ns;
    if (*sum_ns < -UNRUN_BOUND_NS)
        *sum_ns = -UNRUN_BOUND_NS;
    if (*sum_ns > UNRUN_BOUND_NS)
        *sum_ns = UNRUN_BOUND_NS;
}

void vc_plan_note_charged(struct vc_tenant *tenant, int64_t charged, uint64_t told)
{
    add_bounded(&tenant->unrun_ns, charged);
    add_bounded(&tenant->told_unrun_ns, (int64_t)told);
    tenant->is_long = tenant->is_long || charged > LONG_AT_ONCE_NS;
    if (tenant->is_long)
        tenant->long_ns += charged;
    if (tenant->long_ns > LONG_BOUND_NS)
        tenant->long_ns = LONG_BOUND_NS;
}

/* Processes that take turns have the card as one; stopped ones each have slices of their own. */
static unsigned parts_of(const struct vc_tenant *tenant)
{
    return tenant->still ? tenant->seen.open : 1;
}

static uint64_t busy_from(const struct vc_tenant *tenant, uint64_t from_ns, uint64_t now_ns)
{
    uint64_t until = tenant->still ? now_ns : vc_earlier(tenant->finish_ns, now_ns);
    return until > from_ns ? until - from_ns : 0;
}

/* How long since the last look the tenant had work on the card, as it predicted. */
static uint64_t busy_since(const struct vc_card_plan *plan, const struct vc_tenant *tenant, uint64_t now_ns)
{
    return busy_from(tenant, plan->looked_ns, now_ns);
}

/* The same where kernels run to their end, by who says so: only from when it began. While it waits for a neighbour's kernel neither has anything of the other's time. */
static uint64_t had_since(const struct vc_card_plan *plan, const struct vc_tenant *tenant, uint64_t now_ns)
{
    return tenant->uncut_until_ns > now_ns ? busy_from(tenant, vc_later(plan->looked_ns, tenant->seen.began_ns), now_ns) : 0;
}

/* Of those whoever began last runs, and whoever began before it and is not done waits behind it. */
static void split_by_turns(struct vc_card_plan *plan, uint64_t now_ns)
{
    const struct vc_tenant *runner = NULL;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_tenant *tenant = &plan->tenants[i];
        if (had_since(plan, tenant, now_ns) != 0 && (!runner || tenant->seen.began_ns > runner->seen.began_ns))
            runner = tenant;
    }
    for (unsigned i = 0; runner && i < plan->count; i++)
        if (&plan->tenants[i] != runner)
            plan->tenants[i].others_gpu_ns += vc_earlier(had_since(plan, &plan->tenants[i], now_ns), had_since(plan, runner, now_ns));
}

/* Whoever was stopped had the card where others had not: they are charged for what they launch, so that was their part, however seldom they had work there. What
 * they launch in advance is done at the pace of their slices. */
static uint64_t others_of_stopped(const struct vc_card_plan *plan, struct vc_tenant *tenant, uint64_t own_ns)
{
    unsigned others = 0;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_tenant *other = &plan->tenants[i];
        if (other == tenant)
            continue;
        tenant->beside_still_ns += other->look_charged_ns;
        others += other->still || other->active ? parts_of(other) : 0;
    }
    if (tenant->beside_still_ns > VC_BUCKET_NS)
        tenant->beside_still_ns = VC_BUCKET_NS;
    uint64_t most = own_ns * vc_later(others, 1) / (vc_later(others, 1) + parts_of(tenant));
    uint64_t part = tenant->beside_still_ns > 0 ? vc_earlier((uint64_t)tenant->beside_still_ns, most) : 0;
    tenant->beside_still_ns -= (int64_t)part;
    return part;
}

static unsigned parts_since(const struct vc_card_plan *plan, uint64_t now_ns)
{
    unsigned parts = 0;
    for (unsigned i = 0; i < plan->count; i++)
        parts += busy_since(plan, &plan->tenants[i], now_ns) != 0 ? parts_of(&plan->tenants[i]) : 0;
    return parts;
}

/* What a stopped one is believed to have had: as much as is taken off others' charges, so who is charged for it is believed for ever. */
static void note_stopped(struct vc_card_plan *plan, uint64_t now_ns)
{
    unsigned parts = parts_since(plan, now_ns);
    for (unsigned i = 0; i < plan->count; i++)
        if (plan->tenants[i].still)
            plan->tenants[i].still_ns += busy_since(plan, &plan->tenants[i], now_ns) * parts_of(&plan->tenants[i]) / (parts ? parts : 1);
}

/* What of its part a tenant is taken to have run: no more than it was charged for, where that was not for long operations. What it launched waits for others' slices, too, and is predicted to be on the card for as long. */
static uint64_t take_as_run(struct vc_tenant *tenant, uint64_t part_ns)
{
    int64_t most = tenant->unrun_ns > tenant->told_unrun_ns ? tenant->unrun_ns : tenant->told_unrun_ns;
    uint64_t ran = tenant->is_long ? part_ns : vc_earlier(part_ns, most > 0 ? (uint64_t)most : 0);
    add_bounded(&tenant->unrun_ns, -(int64_t)ran);
    add_bounded(&tenant->told_unrun_ns, -(int64_t)ran);
    if (tenant->is_long)
        tenant->long_ns -= (int64_t)ran;
    if (tenant->long_ns < -LONG_OVERDUE_NS) {
        tenant->is_long = false;
        tenant->long_ns = 0;
    }
    return ran;
}

/* Where several tenants had work on the card, its slices went round: each had an equal part, but no more than it was charged for, and the others had the rest. Where all
 * launch side by side nobody may have had it. */
static void split_overlaps(struct vc_card_plan *plan, uint64_t now_ns)
{
    unsigned parts = parts_since(plan, now_ns), still = 0;
    for (unsigned i = 0; i < plan->count; i++)
        still += plan->tenants[i].still;
    for (unsigned i = 0; i < plan->count; i++) {
        struct vc_tenant *tenant = &plan->tenants[i];
        uint64_t busy = busy_since(plan, tenant, now_ns), part = busy * parts_of(tenant) / vc_later(parts, 1);
        if (parts < 2) {
            take_as_run(tenant, busy);
            continue;
        }
        if (tenant->still)
            tenant->others_gpu_ns += others_of_stopped(plan, tenant, busy);
        uint64_t ran = still ? part : take_as_run(tenant, part), left = plan->together ? 0 : part - ran;
        for (unsigned j = 0; busy != 0 && j < plan->count; j++) {
            struct vc_tenant *other = &plan->tenants[j];
            uint64_t theirs = busy_since(plan, other, now_ns);
            if (j == i || other->still || theirs == 0 || vc_uncut_between(tenant, other, now_ns))
                continue;
            other->others_gpu_ns += vc_earlier(busy, theirs) * ran / busy;
            tenant->others_gpu_ns += vc_earlier(left, theirs) / (parts - 1);
        }
    }
}

void vc_plan_divide(struct vc_card_plan *plan, uint64_t now_ns)
{
    split_by_turns(plan, now_ns);
    split_overlaps(plan, now_ns);
    note_stopped(plan, now_ns);
}
