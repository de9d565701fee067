/* When tenants launch side by side, and when no longer. */
#include "arbiter_fixture.h"

/* Two that use 40 % of their leases, a look every 0.5 ms; returns when they launch side by side, or 0. */
static uint64_t until_side_by_side(uint64_t from)
{
    for (uint64_t now = from; now < from + 200 * MS; now += MS / 2) {
        for (unsigned i = 0; i < 2; i++) {
            bool holds = tenants[i].lease_end_ns != 0;
            works(i, now, holds ? MS / 5 : 0, holds ? now + MS / 10 : 0);
            waits(i, now);
        }
        vc_plan_decide(&plan, now);
        if (plan.together)
            return now;
    }
    return 0;
}

static void test_who_leaves_the_card_idle_launches_beside_others(void)
{
    start(3);
    uint64_t now = until_side_by_side(T);
    CHECK(now != 0 && now < T + 100 * MS);
    for (unsigned i = 0; i < 2; i++) {
        CHECK(tenants[i].lease_sequence & VC_LEASE_TOGETHER);
        CHECK(tenants[i].lease_end_ns > now + 4 * MS && tenants[i].lease_end_ns <= now + 8 * MS);
    }
    CHECK(tenants[2].lease_end_ns == 0);
    double before = tenants[0].virtual_ns;
    for (unsigned look = 0; look < 20; look++) { /* one gets nothing: then it has the card alone */
        now += MS / 2;
        works(0, now, MS / 2, now + MS);
        works(1, now, 0, now + MS);
        waits(1, now);
        vc_plan_decide(&plan, now);
    }
    CHECK(plan.together && tenants[1].lease_end_ns != 0);
    CHECK(tenants[0].virtual_ns == before); /* what the other could not have used is not held against it */
    for (unsigned look = 0; look < 60 && tenants[0].lease_end_ns != 0; look++) {
        now += MS / 2;
        works(0, now, MS / 2, now + MS);
        works(1, now, 0, now + MS);
        waits(1, now);
        vc_plan_decide(&plan, now);
    }
    CHECK(plan.together && tenants[0].lease_end_ns == 0 && tenants[1].lease_end_ns != 0);
    CHECK(plan.favoured == 1);
    struct vc_card_plan kept = plan;
    struct vc_tenant all[4];
    memcpy(all, tenants, sizeof all);
    vc_plan_remove(&plan, 1); /* another one has its place now */
    CHECK(plan.favoured < 0);
    memcpy(tenants, all, sizeof all);
    plan = kept;
    waits(2, now); /* nobody knows what this one does */
    vc_plan_decide(&plan, now + MS / 2);
    CHECK(!plan.together && !(tenants[plan.holder].lease_sequence & VC_LEASE_TOGETHER));
}

static void test_side_by_side_in_vain_means_leases_for_a_while(void)
{
    start(2);
    uint64_t now = until_side_by_side(T);
    for (unsigned look = 0; look < 220 && plan.together; look++) {
        now += MS / 2;
        for (unsigned i = 0; i < 2; i++) /* both have work on the card all the time, and are charged nearly nothing */
            works(i, now, MS / 50, now + MS);
        vc_plan_decide(&plan, now);
    }
    CHECK(!plan.together && plan.apart_until_ns > now + 4000 * MS);
    CHECK(until_side_by_side(now + MS) == 0);
}

int main(void)
{
    test_who_leaves_the_card_idle_launches_beside_others();
    test_side_by_side_in_vain_means_leases_for_a_while();
    return check_failures != 0;
}
