/* Who comes first, and that it takes nothing of what others are guaranteed. */
#include "arbiter_fixture.h"

/* Tenant 0 holds a contended lease from T on, 1 and 2 wait; all of 25 %. */
static void start_contended(uint32_t holder, uint32_t first, uint32_t second)
{
    start(3);
    const uint32_t priorities[] = {holder, first, second};
    for (unsigned i = 0; i < 3; i++)
        vc_tenant_prioritise(&tenants[i], priorities[i]);
    works(0, T, 0, T);
    waits(0, T);
    vc_plan_decide(&plan, T);
    works(0, T, 4 * MS, T + 4 * MS);
    CHECK(plan.holder == 0);
}

static void test_a_returner_of_high_priority_interrupts_whoever_was_served_less(void)
{
    for (uint32_t priority = VC_PRIORITY_LOW; priority <= VC_PRIORITY_HIGH; priority++) {
        start_contended(VC_PRIORITY_NORMAL, priority, VC_PRIORITY_NORMAL);
        tenants[1].virtual_ns = 1e9; /* it has had far more than its part */
        tenants[0].was_idle = tenants[1].was_idle = tenants[2].was_idle = false;
        tenants[1].returned = true;
        waits(1, T + MS);
        waits(2, T + MS);
        vc_plan_decide(&plan, T + MS);
        CHECK((plan.holder == 1) == (priority == VC_PRIORITY_HIGH));
    }
}

static void test_high_priority_waits_for_one_lease_at_most(void)
{
    start_contended(VC_PRIORITY_LOW, VC_PRIORITY_LOW, VC_PRIORITY_HIGH);
    tenants[1].was_idle = tenants[2].was_idle = false;
    tenants[1].virtual_ns = 0;
    tenants[2].virtual_ns = 1e9;
    waits(1, T + MS);
    waits(2, T + MS);
    vc_plan_decide(&plan, T + MS);
    CHECK(plan.holder == 0 && tenants[0].lease_end_ns <= T + VC_LEASE_MAX_NS); /* the lease under way may end */
    uint64_t end = tenants[0].lease_end_ns;
    for (unsigned i = 0; i < 3; i++)
        waits(i, end);
    vc_plan_decide(&plan, end);
    CHECK(plan.holder == 2);
}

static void test_a_low_returner_does_not_interrupt_a_high_holder(void)
{
    for (uint32_t priority = VC_PRIORITY_LOW; priority <= VC_PRIORITY_HIGH; priority++) {
        start_contended(priority, VC_PRIORITY_LOW, VC_PRIORITY_NORMAL);
        waits(1, T + MS);
        vc_plan_decide(&plan, T + MS); /* it comes back level with the holder */
        CHECK((plan.holder == 1) == (priority == VC_PRIORITY_LOW));
    }
}

/* A greedy tenant of high priority and two others, all of 25 %, decided every 1 ms: leases' parts of the time. */
static void test_priority_takes_nothing_from_guaranteed_shares(void)
{
    start(3);
    unsigned turns[3] = {0};
    for (unsigned i = 0; i < 3; i++)
        vc_tenant_resize(&tenants[i], i == 0 ? 25 : 30, 100);
    vc_tenant_prioritise(&tenants[0], VC_PRIORITY_HIGH);
    vc_tenant_prioritise(&tenants[1], VC_PRIORITY_LOW);
    for (unsigned i = 0; i < 10000; i++) {
        uint64_t now = T + i * MS;
        for (unsigned k = 0; k < 3; k++)
            waits(k, now);
        if (plan.holder >= 0) {
            works((unsigned)plan.holder, now, MS, now + MS / 2);
            turns[plan.holder]++;
        }
        vc_plan_decide(&plan, now);
    }
    CHECK(turns[0] >= 2500 && turns[1] >= 3000 && turns[2] >= 3000);
    CHECK_NEAR(turns[0], 10000 * 25 / 85, 150); /* and what is over is divided by request, not by priority */
}

static void test_borrowing_idle_time_does_not_cost_the_rank(void)
{
    start(2);
    vc_tenant_prioritise(&tenants[0], VC_PRIORITY_HIGH);
    for (unsigned i = 0; i < 1000; i++) { /* a second of the whole card, alone */
        waits(0, T + i * MS);
        works(0, T + i * MS, MS, T + i * MS + MS / 2);
        vc_plan_decide(&plan, T + i * MS);
    }
    CHECK(tenants[0].rank == VC_PRIORITY_HIGH);
    CHECK(tenants[0].entitled_ns <= 10 * MS); /* and idle time is not banked beyond the bucket */
    waits(1, T + 1000 * MS);
    works(0, T + 1000 * MS, 100 * MS, T + 1100 * MS);
    vc_plan_decide(&plan, T + 1000 * MS);
    CHECK(tenants[0].rank == VC_PRIORITY_NORMAL && tenants[0].entitled_ns < -85.0 * MS);
}

static void test_an_unknown_priority_is_normal(void)
{
    struct vc_tenant tenant;
    vc_tenant_init(&tenant, 30, 30);
    CHECK(tenant.priority == VC_PRIORITY_NORMAL);
    vc_tenant_prioritise(&tenant, 4000000000u);
    CHECK(tenant.priority == VC_PRIORITY_NORMAL);
    vc_tenant_prioritise(&tenant, VC_PRIORITY_HIGH);
    CHECK(tenant.priority == VC_PRIORITY_HIGH);
}

int main(void)
{
    test_a_returner_of_high_priority_interrupts_whoever_was_served_less();
    test_high_priority_waits_for_one_lease_at_most();
    test_a_low_returner_does_not_interrupt_a_high_holder();
    test_priority_takes_nothing_from_guaranteed_shares();
    test_borrowing_idle_time_does_not_cost_the_rank();
    test_an_unknown_priority_is_normal();
    return check_failures != 0;
}
