/* The arbiter's rules one by one, and what a lying tenant can do to the others: exact, on a clock that the test sets. */
#include <string.h>

#include "arbiter_core.h"
#include "gate_check.h"

static struct vc_tenant tenants[4];
static struct vc_card_plan plan;
static const uint64_t T = 1000 * MS;

static void start(unsigned count)
{
    vc_plan_init(&plan);
    plan.tenants = tenants;
    plan.count = count;
    for (unsigned i = 0; i < count; i++)
        vc_tenant_init(&tenants[i], 25, 25);
}

static void waits(unsigned index, uint64_t now)
{
    tenants[index].seen.waiting_until_ns = now + 20 * MS;
    tenants[index].seen.credit_ns = 10 * MS;
    tenants[index].seen.credit_updated_ns = now;
}

static void works(unsigned index, uint64_t now, uint64_t charged, uint64_t finish)
{
    tenants[index].seen.gpu_ns += charged;
    tenants[index].seen.predicted_finish_ns = finish;
    tenants[index].seen.credit_ns = 10 * MS;
    tenants[index].seen.credit_updated_ns = now;
}

static void test_a_waiter_gets_the_idle_card_and_keeps_it_unbounded(void)
{
    start(2);
    vc_plan_decide(&plan, T);
    CHECK(tenants[0].lease_end_ns == 0 && tenants[0].lease_sequence != 0);
    waits(0, T);
    vc_plan_decide(&plan, T);
    CHECK(plan.holder == 0 && tenants[0].lease_end_ns == UINT64_MAX && tenants[0].wake);
    CHECK(tenants[1].lease_end_ns == 0 && !tenants[1].wake);
    CHECK(vc_plan_decide(&plan, T + MS) >= T + 2 * MS); /* nothing to hurry for */
    tenants[0].seen.waiting_until_ns = 0;
    vc_plan_decide(&plan, T + 100 * MS);
    CHECK(plan.holder == 0 && tenants[0].lease_end_ns == UINT64_MAX); /* idle, but nobody wants it */
    waits(1, T + 100 * MS);
    vc_plan_decide(&plan, T + 100 * MS);
    CHECK(plan.holder == 1 && tenants[0].lease_end_ns == 0);
}

static void test_a_contended_lease_ends_and_goes_to_the_least_served(void)
{
    start(3);
    waits(0, T);
    vc_plan_decide(&plan, T);
    works(0, T, 2 * MS, T + 2 * MS);
    waits(1, T + MS);
    waits(2, T + MS);
    vc_plan_decide(&plan, T + MS);
    CHECK(plan.holder != 0); /* returners that were served no more than the holder */
    int second = plan.holder;
    CHECK(tenants[second].lease_end_ns == tenants[second].lease_clock_ns + 6 * MS); /* 25 % of 24 ms */
    CHECK(tenants[second].lease_clock_ns == T + 2 * MS); /* behind what the first left on the card */
    works((unsigned)second, T + 8 * MS, 6 * MS, T + 8 * MS);
    for (unsigned i = 0; i < 3; i++)
        waits(i, T + 8 * MS);
    vc_plan_decide(&plan, T + 8 * MS);
    int third = plan.holder;
    CHECK(third != second);
    works((unsigned)third, T + 14 * MS, 6 * MS, T + 14 * MS);
    for (unsigned i = 0; i < 3; i++)
        waits(i, T + 14 * MS);
    vc_plan_decide(&plan, T + 14 * MS);
    CHECK(plan.holder != second && plan.holder != third); /* the only one that was not charged 6 ms since */
}

static void test_nothing_is_banked_while_idle(void)
{
    start(2);
    waits(0, T);
    vc_plan_decide(&plan, T);
    for (unsigned i = 1; i <= 100; i++) {
        uint64_t now = T + i * 10 * MS;
        works(0, now, 10 * MS, now + MS);
        waits(0, now);
        vc_plan_decide(&plan, now);
    }
    uint64_t now = T + 1001 * MS;
    waits(1, now);
    vc_plan_decide(&plan, now);
    CHECK(plan.holder == 1);
    CHECK(tenants[1].virtual_ns >= tenants[0].virtual_ns - 1.0); /* not a second of arrears */
}

static void test_a_tenant_in_debt_is_not_eligible(void)
{
    start(2);
    waits(0, T);
    tenants[0].seen.credit_ns = -(int64_t)(5 * MS);
    uint64_t next = vc_plan_decide(&plan, T);
    CHECK(plan.holder == -1);
    CHECK(next <= T + 20 * MS);
    tenants[0].seen.refill_ns = 1 * MS; /* 6 ms at 25 %: 24 ms */
    vc_plan_decide(&plan, T + 19 * MS);
    CHECK(plan.holder == -1);
    tenants[0].seen.waiting_until_ns = T + 100 * MS;
    vc_plan_decide(&plan, T + 25 * MS);
    CHECK(plan.holder == 0);
}

static void test_an_untouched_bucket_is_full_however_long_ago(void)
{
    const uint64_t now = UINT64_C(73786976294839); /* times 250,000 ppm: just beyond 64 bits */
    start(1);
    waits(0, now);
    tenants[0].seen.credit_ns = 0;
    tenants[0].seen.credit_updated_ns = 0;
    vc_plan_decide(&plan, now);
    CHECK(plan.holder == 0);
}

static void test_a_liar_cannot_stop_the_others(void)
{
    start(2);
    for (unsigned lie = 0; lie < 3; lie++) {
        start(2);
        memset(&tenants[0].seen, lie == 0 ? 0xff : lie == 1 ? 0x7f : 0x80, sizeof tenants[0].seen);
        unsigned turns = 0;
        for (unsigned i = 0; i < 5000; i++) {
            uint64_t now = T + i * MS;
            tenants[0].seen.gpu_ns ^= UINT64_C(0x8000000000000000); /* runs back and forth */
            waits(1, now);
            uint64_t next = vc_plan_decide(&plan, now);
            CHECK(next > now && next <= now + 20 * MS);
            turns += plan.holder == 1;
            CHECK(tenants[1].lease_clock_ns <= now + 2000 * MS);
        }
        CHECK(turns > 1000);
    }
}

static void test_claimed_work_must_be_paid_for(void)
{
    start(2);
    works(0, T, 0, T);
    waits(0, T);
    vc_plan_decide(&plan, T);
    works(0, T + MS, 0, T + 900 * MS); /* "my kernel still takes 0.9 s", charged nothing */
    waits(1, T + MS);
    vc_plan_decide(&plan, T + MS);
    CHECK(plan.holder == 1 && tenants[1].lease_clock_ns <= T + 3 * MS);
    start(2);
    works(0, T, 0, T);
    waits(0, T);
    vc_plan_decide(&plan, T);
    works(0, T + MS, 900 * MS, T + 901 * MS); /* the same, and charged for it */
    waits(1, T + MS);
    vc_plan_decide(&plan, T + MS);
    CHECK(plan.holder == 1 && tenants[1].lease_clock_ns == T + 901 * MS);
}

static void test_a_removed_holder_leaves_the_card_free(void)
{
    start(3);
    waits(0, T);
    vc_plan_decide(&plan, T);
    waits(2, T + MS);
    works(0, T, 0, T + 50 * MS);
    vc_plan_remove(&plan, 0);
    CHECK(plan.count == 2 && plan.holder == -1);
    vc_plan_decide(&plan, T + MS);
    CHECK(plan.holder == 0 && tenants[0].seen.waiting_until_ns != 0); /* the one that moved into its place */
    vc_plan_remove(&plan, 1);
    CHECK(plan.holder == 0);
}

static void test_impossible_limits_are_bounded(void)
{
    struct vc_tenant tenant;
    vc_tenant_init(&tenant, 0, 0);
    CHECK(tenant.cores == 1 && tenant.core_limit == 1);
    vc_tenant_init(&tenant, 30, 4000000000u);
    CHECK(tenant.cores == 30 && tenant.core_limit == 100);
    vc_tenant_init(&tenant, 4000000000u, 7);
    CHECK(tenant.cores == 100 && tenant.core_limit == 100);
}

static void test_overlapping_work_is_split(void)
{
    start(2);
    works(0, T, 0, T + 100 * MS);
    works(1, T, 0, T + 100 * MS);
    vc_plan_decide(&plan, T);
    vc_plan_decide(&plan, T + 10 * MS);
    CHECK(tenants[0].others_gpu_ns == 5 * MS && tenants[1].others_gpu_ns == 5 * MS);
    CHECK(tenants[0].others_active_ns == T + 10 * MS);
    tenants[1].seen.predicted_finish_ns = T + 10 * MS;
    vc_plan_decide(&plan, T + 20 * MS);
    CHECK(tenants[0].others_gpu_ns == 5 * MS);
}

int main(void)
{
    test_a_waiter_gets_the_idle_card_and_keeps_it_unbounded();
    test_a_contended_lease_ends_and_goes_to_the_least_served();
    test_nothing_is_banked_while_idle();
    test_a_tenant_in_debt_is_not_eligible();
    test_an_untouched_bucket_is_full_however_long_ago();
    test_a_liar_cannot_stop_the_others();
    test_claimed_work_must_be_paid_for();
    test_a_removed_holder_leaves_the_card_free();
    test_impossible_limits_are_bounded();
    test_overlapping_work_is_split();
    return check_failures != 0;
}
