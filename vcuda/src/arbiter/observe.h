/* Observing tenants: the first half of the rules, and what all of them ask of a tenant. */
#ifndef VC_ARBITER_OBSERVE_H
#define VC_ARBITER_OBSERVE_H

#include "arbiter/plan.h"
#include "base/clock.h"

static inline double share(const struct vc_tenant *tenant)
{
    return (double)tenant->cores / 100.0;
}

static inline bool on_card(const struct vc_tenant *tenant, uint64_t now_ns)
{
    return tenant->finish_ns + VC_LEASE_IDLE_NS > now_ns;
}

/* Turn every tenant's observation into charges, credit and a believed finish. */
void vc_plan_observe(struct vc_card_plan *plan, uint64_t now_ns);

/* Whether another tenant has work that waits for something which is not on the card, so that it may begin at any time. */
bool vc_plan_others_behind(const struct vc_card_plan *plan, unsigned index, uint64_t now_ns);

#endif
