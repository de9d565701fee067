/* A plan of up to four tenants of 25 %, for the programs that test the arbiter's rules: exact, on a clock that the test sets. */
#ifndef ARBITER_FIXTURE_H
#define ARBITER_FIXTURE_H

#include <string.h>

#include "arbiter/plan.h"
#include "gate/bucket.h"
#include "gate_check.h"
#include "region/share.h"

static struct vc_tenant tenants[4];
static struct vc_card_plan plan;
static const uint64_t T = 1000 * MS;

static inline void start(unsigned count)
{
    vc_plan_init(&plan);
    plan.tenants = tenants;
    plan.count = count;
    for (unsigned i = 0; i < count; i++)
        vc_tenant_init(&tenants[i], 25, 25);
}

static inline void waits(unsigned index, uint64_t now)
{
    tenants[index].seen.waiting_until_ns = now + 20 * MS;
    tenants[index].seen.credit_ns = 10 * MS;
    tenants[index].seen.credit_updated_ns = now;
}

static inline void works(unsigned index, uint64_t now, uint64_t charged, uint64_t finish)
{
    tenants[index].seen.gpu_ns += charged;
    tenants[index].seen.predicted_finish_ns = finish;
    tenants[index].seen.credit_ns = 10 * MS;
    tenants[index].seen.credit_updated_ns = now;
}

#endif
