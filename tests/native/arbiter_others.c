/* What each tenant is taken to have had of the card while several work there, and whose own a lease is. */
#include "arbiter_fixture.h"

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
    CHECK(tenants[1].uncut_until_ns == 0 && !(tenants[1].lease_sequence & VC_LEASE_UNCLEAR));
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

int main(void)
{
    test_a_stopped_process_has_the_card_beside_others();
    test_what_a_stopped_process_is_charged_back_it_did_not_have();
    test_who_waits_for_something_else_than_the_card_has_nothing_of_it();
    test_who_stops_behind_a_launch_of_unknown_cost_has_the_card_from_then_on();
    test_overlapping_work_is_split();
    test_what_came_and_went_between_two_looks_was_there();
    test_who_waits_behind_others_had_no_more_than_it_was_charged();
    test_what_was_charged_back_did_not_run();
    test_long_operations_have_equal_parts();
    test_what_is_behind_a_long_operation_is_none();
    test_who_hides_its_charges_is_believed_to_have_run();
    test_nobodys_lease_is_its_own_while_others_work_may_begin_at_any_time();
    test_a_lease_is_its_holders_own_from_when_others_work_has_run_on();
    return check_failures != 0;
}
