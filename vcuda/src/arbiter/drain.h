/* What tenants hide at the ends of their leases: some of these, at random, are waited for until the card is idle, so nobody is beside what runs on there, and it is charged what it took. */
#ifndef VC_ARBITER_DRAIN_H
#define VC_ARBITER_DRAIN_H

#include "arbiter/plan.h"

/* The holder's lease is over: whether it lasts until what is on the card was seen to end. `next`: who waits for it, or -1. Notes what that told of the holder. */
bool vc_drain_waits(struct vc_card_plan *plan, int next, uint64_t now_ns);
/* When that should be, if it is waited for; else 0. */
uint64_t vc_drain_look(const struct vc_card_plan *plan);
/* Another lease begins, or nobody waits any more. */
void vc_drain_forget(struct vc_card_plan *plan);

#endif
