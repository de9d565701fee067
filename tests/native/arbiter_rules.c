/* The arbiter's rules one by one, and what a lying tenant can do to the others: exact, on a clock that the test sets. */
#include <string.h>

#include "arbiter/plan.h"
#include "gate/bucket.h"
#include "gate_check.h"
#include "region/share.h"

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

/* … of which nobody says until when it lasts: the neighbour was charged all of the time in which it had half of the card. */
static void test_a_stopped_process_has_the_card_beside_others(void)
{
    for (unsigned stopped = 1; stopped <= 3; stopped += 2) {
        start(2);
        uint64_t now = T, others[2];
        tenants[0].seen.open = stopped;
        works(0, T, MS, T);
        for (; now < T + 10 * MS; now += MS) {
            works(1, now, 200 * US, now + 2 * MS);
            vc_plan_decide(&plan, now);
        }
        for (unsigned i = 0; i < 2; i++)
            others[i] = tenants[i].others_gpu_ns;
        for (; now < T + 20 * MS; now += MS) {
            works(1, now, 200 * US, now + 2 * MS);
            vc_plan_decide(&plan, now);
        }
        CHECK_NEAR(tenants[1].others_gpu_ns - others[1], 10 * MS * stopped / (stopped + 1), MS);
        CHECK_NEAR(tenants[0].others_gpu_ns - others[0], 2 * MS, MS / 2); /* what they were charged */
        others[0] = tenants[0].others_gpu_ns;
        for (; now < T + 30 * MS; now += MS) { /* launched in advance: they have no more than their slices */
            works(1, now, now == T + 20 * MS ? 9 * MS : 0, now + 2 * MS);
            vc_plan_decide(&plan, now);
            CHECK(tenants[0].others_gpu_ns - others[0] <= (now + MS - T - 20 * MS) / (stopped + 1));
        }
        CHECK(tenants[1].others_active_ns == now - MS && !tenants[0].active);
        CHECK(tenants[1].others_still_ns == now - MS && tenants[0].others_still_ns == 0);
        for (; now < T + 5000 * MS; now += MS) { /* it is charged what it has */
            works(1, now, MS, now + 2 * MS);
            tenants[0].seen.gpu_ns += MS * stopped / (stopped + 1);
            vc_plan_decide(&plan, now);
            CHECK(tenants[0].still);
        }
        for (; now < T + 8000 * MS; now += MS) {
            works(1, now, MS, now + 2 * MS);
            vc_plan_decide(&plan, now);
        }
        CHECK(!tenants[0].still); /* it was charged nothing, so it may be a lie */
    }
}

/* Eight processes that stop themselves behind 10 us of work each, and are charged what passes until they go on and charge that back: neighbours were not charged 8 of 9 parts
 * of what they had, for ever. Who has a small share, and would pay it for long, is believed less of it beforehand. */
static void test_what_a_stopped_process_is_charged_back_it_did_not_have(void)
{
    uint64_t taken[2];
    for (unsigned one = 0; one < 2; one++) {
        start(2);
        vc_tenant_resize(&tenants[0], one ? 1 : 25, one ? 1 : 25);
        tenants[0].seen.open = 8;
        works(0, T, MS, T);
        for (uint64_t now = T; now < T + 10000 * MS; now += MS) {
            uint64_t turn = (now - T) / MS % 900;
            works(0, now, turn == 450 ? 300 * MS : turn == 899 ? -300 * MS : 0, T);
            works(1, now, MS, now + 2 * MS);
            vc_plan_decide(&plan, now);
        }
        taken[one] = tenants[1].others_gpu_ns;
    }
    CHECK(taken[0] < 1300 * MS && taken[1] < 100 * MS);
}

/* Its helper lives and says that its work waits for a callback, and predicts nothing: whoever was beside such a one was charged a seventh too little. */
static void test_who_waits_for_something_else_than_the_card_has_nothing_of_it(void)
{
    start(2);
    tenants[0].seen.open = 1;
    works(0, T, 0, T);
    for (uint64_t now = T; now < T + 20 * MS; now += MS) {
        tenants[0].seen.began_ns = VC_BEHIND | (now - MS / 5);
        works(1, now, MS, now + 2 * MS);
        vc_plan_decide(&plan, now);
        CHECK(!tenants[0].still);
    }
    CHECK(tenants[1].others_gpu_ns == 0);
    for (uint64_t now = T + 20 * MS; now < T + 40 * MS; now += MS) { /* it was stopped */
        works(1, now, MS, now + 2 * MS);
        vc_plan_decide(&plan, now);
    }
    CHECK(tenants[0].still && tenants[1].others_gpu_ns > 5 * MS);
}

/* Its work has no cost yet, so nothing that it predicts says that it lasts: the neighbour was charged all of the first 3 ms. */
static void test_who_stops_behind_a_launch_of_unknown_cost_has_the_card_from_then_on(void)
{
    start(2);
    tenants[0].seen.open = 1;
    works(0, T, 0, T);
    tenants[0].seen.began_ns = VC_UNTOLD | T;
    works(1, T, 0, T);
    vc_plan_decide(&plan, T);
    for (uint64_t now = T + MS; now <= T + 3 * MS; now += MS) {
        works(1, now, MS, now + 2 * MS);
        vc_plan_decide(&plan, now);
    }
    CHECK_NEAR(tenants[1].others_gpu_ns, MS + MS / 2, 50 * US);
    uint64_t before = tenants[1].others_gpu_ns;
    tenants[0].seen.began_ns = T + 3 * MS; /* its helper lives, and saw it begin: it says until when it lasts, and is charged for that */
    works(0, T + 4 * MS, 200 * US, T + 3 * MS + 200 * US);
    works(1, T + 4 * MS, MS, T + 6 * MS);
    vc_plan_decide(&plan, T + 4 * MS);
    CHECK_NEAR(tenants[1].others_gpu_ns - before, 100 * US, 10 * US);
    tenants[0].seen.began_ns = VC_UNTOLD | (T + 40 * MS); /* a lie: of a time that has not come */
    before = tenants[1].others_gpu_ns;
    works(1, T + 5 * MS, MS, T + 7 * MS);
    vc_plan_decide(&plan, T + 5 * MS);
    CHECK(tenants[1].others_gpu_ns == before);
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
    CHECK(tenant.cores == 30 && tenant.core_limit == 30);
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

/* A burst of 50 us is done by the next look, as its tenant predicted. It was taken never to have been there, and the neighbour's kernel in which it lay for its own, however long that took. */
static void test_what_came_and_went_between_two_looks_was_there(void)
{
    start(2);
    works(0, T, MS, T + 10 * MS);
    vc_plan_decide(&plan, T);
    vc_plan_decide(&plan, T + MS);
    CHECK(tenants[0].others_active_ns == 0);
    works(1, T + MS, 50 * US, T + MS + 100 * US);
    vc_plan_decide(&plan, T + 2 * MS);
    CHECK(tenants[0].others_active_ns == T + 2 * MS);
    works(1, T + 2 * MS, -20 * US, T + MS + 100 * US); /* a refund */
    vc_plan_decide(&plan, T + 3 * MS);
    CHECK(tenants[0].others_active_ns == T + 2 * MS);
}

/* Tenant 0 waits for each of its short kernels behind slices of tenant 1, whose long one runs on: it has hardly anything of the time that it is predicted to have work there. It
 * was taken to have half of it: the other one had 65 points of 50. */
static void test_who_waits_behind_others_had_no_more_than_it_was_charged(void)
{
    start(2);
    works(0, T, 0, T + 30 * MS);
    works(1, T, 0, T + 30 * MS);
    vc_plan_decide(&plan, T);
    works(1, T, 20 * MS, T + 30 * MS);
    for (uint64_t now = T + MS; now <= T + 10 * MS; now += MS) {
        works(0, now, 10 * US, now + MS);
        vc_plan_decide(&plan, now);
    }
    CHECK(tenants[1].others_gpu_ns == 10 * 10 * US);
    CHECK(tenants[0].others_gpu_ns == 10 * MS - 10 * 10 * US);
}

/* What its helper charges while its kernel is late, and gives back when that turns out to have been short. */
static void test_what_was_charged_back_did_not_run(void)
{
    start(2);
    works(0, T, 0, T + 30 * MS);
    works(1, T, 0, T + 30 * MS);
    vc_plan_decide(&plan, T);
    works(1, T, 20 * MS, T + 30 * MS);
    uint64_t half = 0;
    for (uint64_t now = T + MS; now <= T + 20 * MS; now += 2 * MS) {
        works(0, now, 10 * US + 900 * US, now + MS);
        vc_plan_decide(&plan, now);
        works(0, now + MS, (uint64_t)-(900 * (int64_t)US), now + 2 * MS);
        vc_plan_decide(&plan, now + MS);
        half = half ? half : tenants[1].others_gpu_ns;
    }
    CHECK(half >= 500 * US && tenants[1].others_gpu_ns <= half + 10 * 10 * US + 400 * US);
}

/* Charges of long operations go by what others had, so they tell nothing of it: each has an equal part, whatever was charged, as long as any of them lasts. */
static void test_long_operations_have_equal_parts(void)
{
    start(2);
    works(0, T, 0, T + 40 * MS);
    works(1, T, 0, T + 40 * MS);
    vc_plan_decide(&plan, T);
    works(0, T, 5 * MS, T + 40 * MS);
    works(1, T, 20 * MS, T + 40 * MS);
    for (uint64_t now = T + MS; now <= T + 20 * MS; now += MS) {
        if (now > T + 12 * MS) /* it lasts for longer than was thought */
            works(0, now, MS / 2, T + 40 * MS);
        vc_plan_decide(&plan, now);
    }
    CHECK(tenants[0].others_gpu_ns == 10 * MS && tenants[1].others_gpu_ns == 10 * MS);
}

/* … until it has run: who has one now and then, and waits for short ones in between, has next to nothing meanwhile. It was taken to have had half of 150 ms behind each of 20 ms, and the
 * other one had 73 points charged 63. */
static void test_what_is_behind_a_long_operation_is_none(void)
{
    start(2);
    works(0, T, 0, T + 200 * MS);
    works(1, T, 0, T + 200 * MS);
    vc_plan_decide(&plan, T);
    works(0, T, 20 * MS, T + 200 * MS);
    works(1, T, 200 * MS, T + 200 * MS);
    for (uint64_t now = T + MS; now <= T + 100 * MS; now += MS) {
        vc_plan_decide(&plan, now);
        works(0, now, 10 * US, now + MS);
    }
    CHECK_NEAR(tenants[1].others_gpu_ns, 20 * MS + 100 * 10 * US, 2 * MS);
    CHECK_NEAR(tenants[0].others_gpu_ns, 80 * MS - 100 * 10 * US, 2 * MS);
}

/* A tenant may write that it was charged nothing: what its processes tell counts, too. */
static void test_who_hides_its_charges_is_believed_to_have_run(void)
{
    start(2);
    works(0, T, 0, T + 30 * MS);
    works(1, T, 0, T + 30 * MS);
    vc_plan_decide(&plan, T);
    works(1, T, 20 * MS, T + 30 * MS);
    for (uint64_t now = T + MS; now <= T + 10 * MS; now += MS) {
        tenants[0].seen.told_ns += 500 * US;
        vc_plan_decide(&plan, now);
    }
    CHECK(tenants[1].others_gpu_ns == 5 * MS && tenants[0].others_gpu_ns == 5 * MS);
}

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

/* Whose next operation is too long for the rest of its lease says so; once what it launched is done the lease is the next one's. */
static void test_a_holder_that_nothing_fits_any_more_gives_up_its_lease(void)
{
    for (unsigned says = 0; says < 2; says++) {
        start(2);
        waits(0, T);
        vc_plan_decide(&plan, T);
        works(0, T, 2 * MS, T + 2 * MS);
        vc_plan_decide(&plan, T);
        waits(1, T);
        tenants[0].virtual_ns = 0; /* no returner interrupts it */
        tenants[1].virtual_ns = 1e9;
        tenants[1].was_idle = false;
        waits(0, T + MS);
        tenants[0].seen.refill_ns = says ? VC_NOTHING_FITS : 0;
        uint64_t next = vc_plan_decide(&plan, T + MS);
        CHECK(plan.holder == 0);
        CHECK(!says || next <= T + 2 * MS - VC_LEASE_LEAD_NS);
        tenants[0].virtual_ns = 2e9;
        vc_plan_decide(&plan, T + 2 * MS - VC_LEASE_LEAD_NS);
        CHECK(plan.holder == (int)says);
    }
}

/* Beside a kernel that is longer than its holder's lease the next one would have a part of its own, so it has to end first; not where that is not paid for, nor for ever, nor on a
 * card that runs it to its end anyway, nor if the next one's priority is higher, nor where it may be long over, because its process was stopped lately. */
static void test_a_lease_waits_for_what_is_longer_than_it(void)
{
    enum { ENDS, UNPAID, ENDLESS, UNCUT, SHORT, HIGHER, STOPPED };
    for (unsigned run = ENDS; run <= STOPPED; run++) {
        start(2);
        vc_tenant_prioritise(&tenants[1], run == HIGHER ? VC_PRIORITY_HIGH : VC_PRIORITY_NORMAL);
        waits(0, T);
        vc_plan_decide(&plan, T);
        uint64_t ends = T + (run == ENDLESS ? 200 : run == SHORT ? 7 : 20) * MS;
        tenants[1].was_idle = false; /* it does not come back from idle */
        tenants[1].virtual_ns = 1e6;
        plan.uncut_until_ns = run == UNCUT ? T + 1000 * MS : 0;
        tenants[0].stopped_ns = run == STOPPED ? T - 500 * MS : 0;
        uint64_t until = run == ENDS ? ends - VC_LEASE_LEAD_NS : run == ENDLESS ? T + 31 * MS : T + 6 * MS, next = T;
        works(0, T, run == UNPAID ? 0 : ends - T, ends);
        for (uint64_t now = T; now < until; now = next) {
            for (unsigned i = 0; i < 2; i++)
                waits(i, now);
            next = vc_plan_decide(&plan, now);
            CHECK(plan.holder == 0 && next > now);
        }
        CHECK(next == until || run == ENDLESS);
        tenants[0].virtual_ns = 1e9; /* whatever it was charged */
        waits(1, until);
        vc_plan_decide(&plan, until);
        CHECK(plan.holder == 1 && (tenants[1].lease_clock_ns == ends || run == UNPAID));
    }
}

/* The card waits for a holder that has nothing to do for a moment while others wait: that is the holder's time. So is that in which it is handed over once more because of who comes back from
 * idle: a 5 with 10 us every 2 ms cost a 25 and a 70 beside it 17 points. Where nobody waited nothing was lost: an idle second had cost a 25
 * four seconds of its turn. */
static void test_what_a_holder_leaves_idle_while_others_wait_is_its_own(void)
{
    enum { FIRST, BEHIND, UNWANTED };
    for (unsigned run = FIRST; run <= UNWANTED; run++) {
        start(2);
        if (run == BEHIND) {
            waits(1, T - 2 * MS);
            vc_plan_decide(&plan, T - 2 * MS);
            works(1, T - 2 * MS, 4 * MS, T + 2 * MS);
            vc_plan_decide(&plan, T - MS);
        }
        for (unsigned i = 0; i < 2; i++)
            waits(i, T);
        uint64_t next = vc_plan_decide(&plan, T), returns = T + (run == UNWANTED ? 1000 * MS : 0);
        CHECK(plan.holder == 0 && plan.lease_clock_ns == T + (run == BEHIND ? 2 * MS : 0) && plan.interrupts == (run == BEHIND));
        tenants[1].returned = false; /* it does not come back from idle */
        double before = tenants[0].virtual_ns;
        works(0, T, 2 * MS, plan.lease_clock_ns + 2 * MS);
        tenants[0].seen.waiting_until_ns = tenants[1].seen.waiting_until_ns = 0;
        for (uint64_t now = T + 20 * US; plan.holder == 0 && now <= returns + 10 * MS; now = next) {
            if (now >= returns)
                waits(1, now);
            next = vc_plan_decide(&plan, now);
        }
        CHECK(plan.holder == 1);
        /* The card is handed over once more, BEHIND twice, where others' part hides the pause. */
        uint64_t idle = run == UNWANTED ? 0 : 400 * US;
        CHECK_NEAR(tenants[0].virtual_ns - before, (2 * MS + idle) * 4, 100 * US);
    }
}

/* Tenant 0's lease is over, and tenant 1 waits. Returns whether that one has to wait until what is on the card is seen to have ended. */
static bool is_waited_for(int64_t hidden)
{
    waits(0, T);
    vc_plan_decide(&plan, T);
    tenants[1].was_idle = false;
    tenants[1].virtual_ns = tenants[0].virtual_ns + 1e6;
    tenants[0].hidden_ns = hidden;
    works(0, T, 6 * MS, T + 6 * MS);
    for (unsigned i = 0; i < 2; i++)
        waits(i, T + 5800 * US);
    vc_plan_decide(&plan, T + 5800 * US);
    return plan.holder == 0;
}

/* What an end says that was waited for is waited for at others, as long as it is worth it; nothing is launched meanwhile. */
static void test_what_ends_of_leases_hide_is_waited_for(void)
{
    for (unsigned endless = 0; endless < 2; endless++) {
        start(2);
        tenants[0].stopped_ns = T - 500 * MS; /* a process of it was, and goes on */
        CHECK(is_waited_for(MS) && tenants[0].lease_end_ns == T + 5800 * US);
        tenants[1].returned = true; /* who comes back from idle then can't end that */
        tenants[1].virtual_ns = tenants[0].virtual_ns - 1;
        for (uint64_t now = T + 6 * MS; now < T + (endless ? 9800 : 7000) * US; now += 100 * US) {
            for (unsigned i = 0; i < 2; i++)
                waits(i, now);
            works(0, now, 0, now + 200 * US);
            CHECK(vc_plan_decide(&plan, now) > now && plan.holder == 0);
        }
        uint64_t now = T + (endless ? 9900 : 7150) * US;
        works(0, now, endless ? 0 : MS, endless ? now + 200 * US : T + 7 * MS);
        for (unsigned i = 0; i < 2; i++)
            waits(i, now);
        vc_plan_decide(&plan, now);
        CHECK(plan.holder == 1 && tenants[1].lease_clock_ns == (endless ? tenants[0].finish_ns : now));
        CHECK_NEAR(tenants[0].hidden_ns, (endless ? 1 : 2) * MS - 250 * US, US); /* less what the wait cost, and what predictions are off by */
    }
}

/* More often until it is known what they hide. */
static void test_ends_of_leases_are_waited_for_at_random(void)
{
    for (unsigned known = 0; known < 2; known++) {
        unsigned waited = 0;
        for (unsigned i = 0; i < 3200; i++) {
            uint64_t random = plan.random;
            start(2);
            plan.random = random;
            waited += is_waited_for(known ? -3 * (int64_t)MS : 0);
        }
        CHECK_NEAR(waited, known ? 200 : 400, 60);
    }
}

/* Longer than others' slices take nobody waits on a card that slices: where somebody does, who has begun has the card. */
static void test_waiting_longer_than_slices_shows_a_card_that_cuts_nothing(void)
{
    for (unsigned queued = 0; queued < 2; queued++) {
        start(2);
        waits(0, T);
        waits(1, T);
        vc_plan_decide(&plan, T);
        works(0, T, 20 * MS, T + 20 * MS);
        works(1, T, 20 * MS, T + 40 * MS);
        tenants[0].seen.began_ns = T;
        tenants[1].seen.began_ns = queued ? VC_NOT_BEGUN | T : T + 2 * MS;
        for (unsigned ms = 1; ms <= 5; ms++)
            vc_plan_decide(&plan, T + ms * MS);
        CHECK(plan.uncut_until_ns == 0); /* its helper may be late to see that it began */
        if (queued) {
            tenants[1].seen.began_ns = T + 5 * MS;
            vc_plan_decide(&plan, T + 5 * MS);
            CHECK(plan.uncut_until_ns > T + 6 * MS);
            tenants[1].seen.began_ns = VC_NOT_BEGUN | (T + 5 * MS);
        }
        uint64_t before = tenants[0].others_gpu_ns;
        vc_plan_decide(&plan, T + 6 * MS);
        CHECK(tenants[0].others_gpu_ns - before == (queued ? 0 : MS / 2)); /* slices: half of it */
        if (!queued)
            continue;
        before = tenants[1].others_gpu_ns;
        tenants[1].seen.began_ns = T - MS; /* an operation of before; what is queued behind it waits for the one that began last */
        vc_plan_decide(&plan, T + 8 * MS);
        CHECK(tenants[1].others_gpu_ns - before == 2 * MS);
    }
}

/* What waits for a copy or a callback may begin within anybody's lease, and is no sign of a card that cuts no kernel. */
static void test_nobodys_lease_is_its_own_while_others_work_may_begin_at_any_time(void)
{
    start(2);
    waits(0, T);
    vc_plan_decide(&plan, T);
    CHECK(plan.holder == 0 && !(tenants[0].lease_sequence & VC_LEASE_UNCLEAR));
    works(0, T, MS, T + 20 * MS);
    tenants[1].seen.began_ns = VC_NOT_BEGUN | T;
    vc_plan_decide(&plan, T + MS);
    for (unsigned ms = 2; ms <= 6; ms++) {
        tenants[1].seen.began_ns = VC_BEHIND | (T + ms * MS);
        vc_plan_decide(&plan, T + ms * MS);
        CHECK(tenants[0].lease_sequence & VC_LEASE_UNCLEAR && tenants[0].others_active_ns == T + ms * MS);
    }
    CHECK(plan.uncut_until_ns == 0 && !(tenants[1].lease_sequence & VC_LEASE_UNCLEAR));
    vc_plan_decide(&plan, T + 40 * MS); /* it says so no more */
    CHECK(!(tenants[0].lease_sequence & VC_LEASE_UNCLEAR));
    tenants[1].seen.began_ns = VC_BEHIND | (T + 80 * MS); /* … or of a time that has not come */
    vc_plan_decide(&plan, T + 41 * MS);
    CHECK(!(tenants[0].lease_sequence & VC_LEASE_UNCLEAR));
}

/* Until then nothing of the holder's is its own: kernels that held a slice of another's, launched 60 ms ago as short ones, counted as clean, so those of a steady 70 seemed to vary, and it had 65
 * points, charged 69. */
static void test_a_lease_is_its_holders_own_from_when_others_work_has_run_on(void)
{
    for (unsigned charged = 0; charged < 2; charged++) {
        start(2);
        waits(1, T);
        vc_plan_decide(&plan, T);
        works(1, T, MS, T + MS);
        waits(0, T);
        vc_plan_decide(&plan, T + MS);
        tenants[1].seen.waiting_until_ns = 0;
        vc_plan_decide(&plan, T + 10 * MS);
        CHECK(plan.holder == 0 && tenants[0].lease_clock_ns <= T + 10 * MS);
        for (unsigned ms = 11; ms <= 40; ms++) {
            works(0, T + ms * MS, MS, T + (ms + 2) * MS);
            works(1, T + ms * MS, !charged ? 0 : ms % 4 == 0 ? (uint64_t)-(int64_t)(300 * US) : 100 * US, T + (ms < 30 ? ms + 1 : 30) * MS);
            vc_plan_decide(&plan, T + ms * MS);
            CHECK(plan.holder == 0);
            if (charged)
                CHECK(tenants[0].lease_clock_ns == T + (ms < 30 ? ms : 29) * MS);
            else
                CHECK(tenants[0].lease_clock_ns <= T + 10 * MS); /* it merely says so */
        }
    }
}

/* Short ones of which each waits at the moment of a look are no long wait. */
static void test_waits_of_several_operations_do_not_add_up(void)
{
    start(2);
    waits(0, T);
    waits(1, T);
    vc_plan_decide(&plan, T);
    works(0, T, 20 * MS, T + 20 * MS);
    works(1, T, 20 * MS, T + 40 * MS);
    tenants[0].seen.began_ns = T;
    for (unsigned ms = 1; ms <= 8; ms++) {
        tenants[1].seen.began_ns = VC_NOT_BEGUN | (T + ms * MS - MS / 2);
        vc_plan_decide(&plan, T + ms * MS);
    }
    tenants[1].seen.began_ns = T + 9 * MS;
    vc_plan_decide(&plan, T + 9 * MS);
    CHECK(plan.uncut_until_ns == 0);
}

/* Between two looks one of them may begin and the next be queued and begin: what began last is not what was seen to wait. */
static void test_what_began_is_not_what_was_seen_to_wait(void)
{
    start(2);
    waits(0, T);
    waits(1, T);
    vc_plan_decide(&plan, T);
    works(0, T, 20 * MS, T + 20 * MS);
    works(1, T, 20 * MS, T + 40 * MS);
    tenants[0].seen.began_ns = T;
    tenants[1].seen.began_ns = VC_NOT_BEGUN | T;
    for (unsigned ms = 1; ms <= 4; ms++)
        vc_plan_decide(&plan, T + ms * MS);
    tenants[1].seen.began_ns = T + 5 * MS;
    vc_plan_decide(&plan, T + 5 * MS);
    CHECK(plan.uncut_until_ns == 0);
}

/* Slices go round among all that have work: one has none any more when the next one begins, and each had one. */
static void test_others_that_only_wait_may_have_a_slice_each(void)
{
    start(4);
    for (unsigned i = 0; i < 4; i++)
        waits(i, T);
    vc_plan_decide(&plan, T);
    works(3, T, 20 * MS, T + 40 * MS);
    tenants[3].seen.began_ns = VC_NOT_BEGUN | T;
    for (unsigned ms = 0; ms <= 6; ms++) {
        for (unsigned i = 0; i < 4; i++)
            waits(i, T + ms * MS);
        works(ms / 2 % 3, T + ms * MS, MS, T + (ms + 1) * MS);
        vc_plan_decide(&plan, T + ms * MS);
    }
    tenants[3].seen.began_ns = T + 7 * MS;
    vc_plan_decide(&plan, T + 7 * MS);
    CHECK(plan.uncut_until_ns == 0);
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
    test_a_stopped_process_has_the_card_beside_others();
    test_what_a_stopped_process_is_charged_back_it_did_not_have();
    test_who_waits_for_something_else_than_the_card_has_nothing_of_it();
    test_who_stops_behind_a_launch_of_unknown_cost_has_the_card_from_then_on();
    test_what_others_owe_may_be_saved_up();
    test_an_overdrawn_account_is_closed_until_it_is_paid();
    test_what_processes_tell_counts_whatever_the_file_says();
    test_a_holder_that_nothing_fits_any_more_gives_up_its_lease();
    test_a_lease_waits_for_what_is_longer_than_it();
    test_what_a_holder_leaves_idle_while_others_wait_is_its_own();
    test_what_ends_of_leases_hide_is_waited_for();
    test_ends_of_leases_are_waited_for_at_random();
    test_waiting_longer_than_slices_shows_a_card_that_cuts_nothing();
    test_nobodys_lease_is_its_own_while_others_work_may_begin_at_any_time();
    test_a_lease_is_its_holders_own_from_when_others_work_has_run_on();
    test_waits_of_several_operations_do_not_add_up();
    test_what_began_is_not_what_was_seen_to_wait();
    test_others_that_only_wait_may_have_a_slice_each();
    test_others_parts_explain_no_more_than_was_charged();
    test_a_returner_of_high_priority_interrupts_whoever_was_served_less();
    test_high_priority_waits_for_one_lease_at_most();
    test_a_low_returner_does_not_interrupt_a_high_holder();
    test_priority_takes_nothing_from_guaranteed_shares();
    test_borrowing_idle_time_does_not_cost_the_rank();
    test_an_unknown_priority_is_normal();
    test_a_waiter_gets_the_idle_card_and_keeps_it_unbounded();
    test_a_contended_lease_ends_and_goes_to_the_least_served();
    test_nothing_is_banked_while_idle();
    test_a_tenant_in_debt_is_not_eligible();
    test_an_untouched_bucket_is_full_however_long_ago();
    test_a_liar_cannot_stop_the_others();
    test_claimed_work_must_be_paid_for();
    test_a_removed_holder_leaves_the_card_free();
    test_impossible_limits_are_bounded();
    test_what_came_and_went_between_two_looks_was_there();
    test_overlapping_work_is_split();
    test_who_waits_behind_others_had_no_more_than_it_was_charged();
    test_what_was_charged_back_did_not_run();
    test_long_operations_have_equal_parts();
    test_what_is_behind_a_long_operation_is_none();
    test_who_hides_its_charges_is_believed_to_have_run();
    test_who_leaves_the_card_idle_launches_beside_others();
    test_side_by_side_in_vain_means_leases_for_a_while();
    return check_failures != 0;
}
