/* What the arbiter books for each tenant whatever it writes, and what a lying one can do to the others. */
#include "arbiter_fixture.h"

static void test_a_liar_cannot_stop_the_others(void)
{
    start(2);
    for (unsigned lie = 0; lie < 3; lie++) {
        start(2);
        memset(&tenants[0].seen, lie == 0 ? 0xff : lie == 1 ? 0x7f : 0x80, sizeof tenants[0].seen);
        tenants[0].seen.hides = lie == 0; /* never read from the file: true or false, and nothing else */
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

static void test_impossible_limits_are_bounded(void)
{
    struct vc_tenant tenant;
    vc_tenant_init(&tenant, 0, 0);
    CHECK(tenant.cores == 1 && tenant.core_limit == 1);
    vc_tenant_init(&tenant, 30, 4000000000u);
    CHECK(tenant.cores == 30 && tenant.core_limit == 30);
    vc_tenant_init(&tenant, 4000000000u, 7);
    CHECK(tenant.cores == 100 && tenant.core_limit == 100);
}

/* Occupying the card without a charge costs the rank, whatever work it says that it had there beside others'. */
static void test_others_parts_explain_no_more_than_was_charged(void)
{
    double ranks[2];
    for (unsigned lies = 0; lies < 2; lies++) {
        start(2);
        for (unsigned ms = 0; ms <= 7; ms++) {
            for (unsigned i = 0; i < 2; i++) {
                waits(i, T + ms * MS);
                tenants[i].seen.predicted_finish_ns = T + (ms + 2) * MS;
            }
            tenants[0].seen.gpu_ns += lies ? 0 : MS / 2;
            tenants[1].seen.gpu_ns += MS / 2;
            vc_plan_decide(&plan, T + ms * MS);
        }
        CHECK(plan.sequence > 1); /* the first lease, of the first, has ended */
        ranks[lies] = tenants[0].virtual_ns;
    }
    CHECK(ranks[1] >= ranks[0]);
}

/* What one has taken beyond its limit it pays by standing still, and who had less meanwhile may save that up: no more than that, and not while idle. */
static void test_what_others_owe_may_be_saved_up(void)
{
    start(3);
    for (unsigned i = 0; i < 2; i++)
        waits(i, T);
    vc_plan_decide(&plan, T);
    CHECK(tenants[0].saved_ns == 0 && tenants[1].saved_ns == 0);
    works(0, T + MS, 110 * MS, T + 2 * MS);
    waits(1, T + MS);
    vc_plan_decide(&plan, T + MS);
    CHECK_NEAR(tenants[1].saved_ns, 100 * MS - MS / 4, MS / 100);
    CHECK(tenants[0].saved_ns == 0 && tenants[2].saved_ns == 0); /* who owes it; and who wants nothing */
    tenants[1].seen.credit_ns = 60 * MS;
    for (unsigned ms = 2; ms <= 200; ms++) {
        waits(0, T + ms * MS);
        tenants[1].seen.waiting_until_ns = T + (ms + 20) * MS;
        vc_plan_decide(&plan, T + ms * MS);
    }
    CHECK_NEAR(tenants[1].saved_ns, 50 * MS, MS / 100); /* the rest is paid */
    CHECK_NEAR(tenants[1].account_ns, 60 * MS, MS);
    tenants[1].seen.waiting_until_ns = 0; /* a look between two operations: a steady 70 lost 0.35 s that it had saved up, at one of 2,000 */
    waits(0, T + 201 * MS);
    vc_plan_decide(&plan, T + 201 * MS);
    CHECK(!tenants[1].active);
    tenants[1].seen.waiting_until_ns = T + 220 * MS;
    vc_plan_decide(&plan, T + 202 * MS);
    CHECK_NEAR(tenants[1].saved_ns, 50 * MS, MS);
    CHECK_NEAR(tenants[1].account_ns, 60 * MS, MS);
    waits(0, T + 300 * MS);
    tenants[1].seen.waiting_until_ns = 0;
    works(0, T + 300 * MS, 400 * MS, T + 301 * MS);
    vc_plan_decide(&plan, T + 300 * MS);
    CHECK(tenants[1].saved_ns <= 50 * MS);
    waits(1, T + 301 * MS);
    works(0, T + 301 * MS, 8000 * MS, T + 302 * MS);
    vc_plan_decide(&plan, T + 301 * MS);
    CHECK(tenants[1].saved_ns == VC_SAVED_NS);
}

/* Whatever credit its file shows: what was charged, and the limit, say when it may go on. */
static void test_an_overdrawn_account_is_closed_until_it_is_paid(void)
{
    start(2);
    waits(0, T);
    vc_plan_decide(&plan, T);
    CHECK(plan.holder == 0 && tenants[0].closed_until_ns == 0);
    works(0, T + MS, 100 * MS, T + 101 * MS);
    vc_plan_decide(&plan, T + MS);
    CHECK_NEAR(tenants[0].closed_until_ns, T + MS + (100 - 10 - 20) * 4 * MS, 5 * MS);
    waits(1, T + 110 * MS);
    waits(0, T + 110 * MS);
    vc_plan_decide(&plan, T + 110 * MS);
    CHECK(plan.holder == 1 && !tenants[0].in_credit && tenants[0].credit_at_ns == tenants[0].closed_until_ns);
    tenants[0].seen.gpu_ns -= 60 * MS; /* it took less than was thought */
    vc_plan_decide(&plan, T + 111 * MS);
    CHECK(tenants[0].closed_until_ns == 0 && tenants[0].in_credit);
    works(0, T + 112 * MS, 5000 * MS, T + 113 * MS);
    vc_plan_decide(&plan, T + 112 * MS);
    CHECK(tenants[0].closed_until_ns > T + 19000 * MS && tenants[1].closed_until_ns == 0);
    CHECK(vc_plan_decide(&plan, T + 25000 * MS) && tenants[0].closed_until_ns == 0);
}

/* Its processes write into the file that they were charged nothing, but what they lock can't be written. */
static void test_what_processes_tell_counts_whatever_the_file_says(void)
{
    start(2);
    tenants[0].seen.told_ns = 5000 * MS; /* before this arbiter was */
    waits(0, T);
    vc_plan_decide(&plan, T);
    CHECK(plan.holder == 0 && tenants[0].closed_until_ns == 0);
    works(0, T + MS, 0, T + MS);
    tenants[0].seen.told_ns += 120 * MS; /* an honest one is stopped by its bucket long before */
    vc_plan_decide(&plan, T + MS);
    CHECK(tenants[0].closed_until_ns == 0);
    tenants[0].seen.told_ns += 100 * MS;
    vc_plan_decide(&plan, T + 2 * MS);
    CHECK_NEAR(tenants[0].closed_until_ns, T + 2 * MS + (220 - 100 - 20) * 4 * MS, 5 * MS);
    CHECK(vc_plan_decide(&plan, T + 410 * MS) && tenants[0].closed_until_ns == 0 && tenants[1].closed_until_ns == 0);
}

int main(void)
{
    test_a_liar_cannot_stop_the_others();
    test_claimed_work_must_be_paid_for();
    test_impossible_limits_are_bounded();
    test_others_parts_explain_no_more_than_was_charged();
    test_what_others_owe_may_be_saved_up();
    test_an_overdrawn_account_is_closed_until_it_is_paid();
    test_what_processes_tell_counts_whatever_the_file_says();
    return check_failures != 0;
}
