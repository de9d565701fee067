/* Whether the tenants of a card need leases at all: those whose hosts launch more slowly than the card works may launch side by side. */
#ifndef VC_ARBITER_TOGETHER_H
#define VC_ARBITER_TOGETHER_H

#include "arbiter/plan.h"

/* After every look, `elapsed_ns` after the one before: what the tenants have outstanding. */
void vc_together_look(struct vc_card_plan *plan, uint64_t now_ns, uint64_t elapsed_ns);
/* The holder's lease, that somebody waited for, ends: what part of it was `charged_ns` of `occupied_ns`? */
void vc_together_measure(struct vc_tenant *holder, uint64_t occupied_ns, int64_t charged_ns);
/* Somebody waits for the holder: would neither of them miss the other's part of the card? */
bool vc_together_begins(struct vc_card_plan *plan, uint64_t now_ns);
/* `elapsed_ns` after the last look. False: from now on one at a time again. */
bool vc_together_stays(struct vc_card_plan *plan, uint64_t now_ns, uint64_t elapsed_ns);
/* Whether this tenant is one of those that launch side by side now. */
bool vc_together_launches(const struct vc_card_plan *plan, unsigned index);

#endif
