/* How a card is told that cuts no kernel: by work that waits for longer than others' slices take. */
#include "arbiter_fixture.h"

/* Longer than others' slices take nobody waits on a card that slices: where somebody does, who has begun has the card. But a tenant may write that it waited: by that the neighbour
 * would be charged for its long kernels (63 points of 70, charged 70), so it counts between those that both say so. */
static void test_waiting_longer_than_slices_shows_a_card_that_cuts_nothing(void)
{
    enum { NEITHER, ONE, BOTH };
    for (unsigned says = NEITHER; says <= BOTH; says++) {
        start(2);
        waits(0, T);
        waits(1, T);
        vc_plan_decide(&plan, T);
        works(0, T, 20 * MS, T + 20 * MS);
        works(1, T, 20 * MS, T + 40 * MS);
        tenants[0].uncut_until_ns = says == BOTH ? T + 1000 * MS : 0;
        tenants[0].seen.began_ns = T;
        tenants[1].seen.began_ns = says != NEITHER ? VC_NOT_BEGUN | T : T + 2 * MS;
        for (unsigned ms = 1; ms <= 5; ms++)
            vc_plan_decide(&plan, T + ms * MS);
        CHECK(tenants[1].uncut_until_ns == 0); /* its helper may be late to see that it began */
        if (says != NEITHER) {
            tenants[1].seen.began_ns = T + 5 * MS;
            vc_plan_decide(&plan, T + 5 * MS);
            CHECK(tenants[1].uncut_until_ns > T + 6 * MS);
            tenants[1].seen.began_ns = VC_NOT_BEGUN | (T + 5 * MS);
        }
        uint64_t before = tenants[0].others_gpu_ns;
        vc_plan_decide(&plan, T + 6 * MS);
        CHECK(tenants[0].others_gpu_ns - before == (says == BOTH ? 0 : MS / 2)); /* slices: half of it */
        before = tenants[1].others_gpu_ns;
        tenants[1].seen.began_ns = T - MS; /* an operation of before; what is queued behind it waits for the one that began last */
        vc_plan_decide(&plan, T + 8 * MS);
        CHECK(tenants[1].others_gpu_ns - before == (says == BOTH ? 2 * MS : MS));
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
    CHECK(tenants[1].uncut_until_ns == 0);
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
    CHECK(tenants[1].uncut_until_ns == 0);
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
    CHECK(tenants[3].uncut_until_ns == 0);
}

int main(void)
{
    test_waiting_longer_than_slices_shows_a_card_that_cuts_nothing();
    test_waits_of_several_operations_do_not_add_up();
    test_what_began_is_not_what_was_seen_to_wait();
    test_others_that_only_wait_may_have_a_slice_each();
    return check_failures != 0;
}
