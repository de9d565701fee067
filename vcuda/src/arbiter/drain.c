/* At random ends of leases, and what these tell: see drain.h. */
#include "arbiter/drain.h"

#include "base/clock.h"

/* At the end of one lease in so many, which nobody can foresee, what is on the card is let end before the next holder begins: so it is seen how long it took, with nobody beside. More often
 * until a second or so of such ends told nothing. */
enum { DRAIN_EACH = 16, DRAIN_EACH_AT_FIRST = 8 };
/* A helper sees within so long that an end comes later than was predicted, and says so; nobody waits longer than the second for it. */
static const uint64_t DRAINED_NS = 150000, DRAIN_MOST_NS = 4000000;
/* So far off predictions are for the card's and the host's sake; and what waiting for an end costs is wasted where less is hidden at it. */
static const int64_t ON_TIME_NS = 50000, DRAIN_COST_NS = 200000;
/* What a tenant is thought to hide at the ends of its leases lies between these; below the first it is known to be honest. */
static const int64_t KNOWN_NS = -2000000, LEAST_HIDDEN_NS = -10000000, MOST_HIDDEN_NS = 100000000;

static uint64_t next_random(struct vc_card_plan *plan)
{
    uint64_t value = plan->random += UINT64_C(0x9e3779b97f4a7c15);
    value = (value ^ value >> 30) * UINT64_C(0xbf58476d1ce4e5b9);
    value = (value ^ value >> 27) * UINT64_C(0x94d049bb133111eb);
    return value ^ value >> 31;
}

static int64_t drain_each(const struct vc_tenant *holder)
{
    return holder->hidden_ns > KNOWN_NS ? DRAIN_EACH_AT_FIRST : DRAIN_EACH;
}

/* What runs on beyond a lease's end was charged its estimate, and how long it took beside the next holder is a guess. So some ends are waited for, and what these say of the others is waited for,
 * as long as it is more than that costs. */
static void drained(struct vc_card_plan *plan)
{
    struct vc_tenant *holder = &plan->tenants[plan->holder];
    int64_t later = holder->lease_charged_ns - plan->over_charged_ns, most = (int64_t)DRAIN_MOST_NS;
    later = (later > most ? most : later < -most ? -most : later) - ON_TIME_NS;
    holder->hidden_ns += plan->drains_by_chance ? later * drain_each(holder) : later - DRAIN_COST_NS;
    if (holder->hidden_ns > MOST_HIDDEN_NS)
        holder->hidden_ns = MOST_HIDDEN_NS;
    if (holder->hidden_ns < LEAST_HIDDEN_NS)
        holder->hidden_ns = LEAST_HIDDEN_NS;
}

bool vc_drain_waits(struct vc_card_plan *plan, int next, uint64_t now_ns)
{
    const struct vc_tenant *holder = &plan->tenants[plan->holder];
    if (!plan->over) {
        plan->over = true;
        plan->over_ns = now_ns;
        plan->drains_by_chance = holder->hidden_ns <= 0;
        plan->drains = !plan->drains_by_chance || next_random(plan) % (uint64_t)drain_each(holder) == 0;
        plan->over_charged_ns = holder->lease_charged_ns;
        if (plan->drains) /* nothing is launched any more */
            plan->lease_end_ns = vc_earlier(plan->lease_end_ns, now_ns);
    }
    /* Who was stopped lately is waited for, though nobody waits for its long work to end: else a child that stops for a moment in each second would let the others hide what they like. */
    if (!plan->drains || holder->still || next < 0 || vc_uncut_between(holder, &plan->tenants[next], now_ns) || plan->tenants[next].rank > holder->rank)
        return false;
    if (now_ns < plan->over_ns + DRAIN_MOST_NS && now_ns < holder->finish_ns + DRAINED_NS)
        return true;
    drained(plan);
    return false;
}

uint64_t vc_drain_look(const struct vc_card_plan *plan)
{
    return plan->over && plan->drains ? plan->tenants[plan->holder].finish_ns + DRAINED_NS : 0;
}

void vc_drain_forget(struct vc_card_plan *plan)
{
    plan->over = plan->drains = false;
}
