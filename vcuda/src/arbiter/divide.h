/* How the card was divided between tenants that had work on it: the clocks of what others had, by predicted finishes and charges. */
#ifndef VC_ARBITER_DIVIDE_H
#define VC_ARBITER_DIVIDE_H

#include "arbiter/plan.h"

/* It was charged, and told, so much since the last look. */
void vc_plan_note_charged(struct vc_tenant *tenant, int64_t charged, uint64_t told);

/* Advance the tenants' clocks (others_gpu_ns, still_ns) from the last look to now. */
void vc_plan_divide(struct vc_card_plan *plan, uint64_t now_ns);

#endif
