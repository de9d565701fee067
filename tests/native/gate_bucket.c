/* The bucket of GPU time and the estimates: exact, on a clock that the test sets. */
#include <string.h>

#include "gate/bucket.h"
#include "gate/estimate.h"
#include "gate/busy.h"
#include "gate_check.h"

static void test_fills_at_the_rate_and_not_beyond_the_bucket(void)
{
    struct vc_card_usage usage = {.credit_updated_ns = 1000 * MS};
    CHECK(vc_bucket_fill(&usage, 1001 * MS, 300000, 0) == (int64_t)(300 * US));
    CHECK(vc_bucket_fill(&usage, 1002 * MS, 500000, 0) == (int64_t)(800 * US));
    CHECK(vc_bucket_fill(&usage, 9000 * MS, 300000, 0) == VC_BUCKET_NS);
}

static void test_holds_more_as_long_as_others_owe(void)
{
    struct vc_card_usage usage = {.credit_updated_ns = 1000 * MS};
    struct vc_own own = {.filled_ns = 1000 * MS};
    CHECK(vc_bucket_fill(&usage, 9000 * MS, 300000, 50 * MS) == (int64_t)(60 * MS));
    CHECK(vc_bucket_take(&usage, -5, 50 * MS) == (int64_t)(60 * MS));
    CHECK(vc_own_fill(&own, 9000 * MS, 300000, 50 * MS) == 0 && own.spent_ns == -(int64_t)(50 * MS));
    CHECK(vc_bucket_fill(&usage, 9001 * MS, 300000, 20 * MS) == (int64_t)(30 * MS)); /* they have paid */
    CHECK(vc_own_fill(&own, 9001 * MS, 300000, 20 * MS) == 0 && own.spent_ns == -(int64_t)(20 * MS));
}

static void test_loses_no_fraction_over_many_fills(void)
{
    struct vc_card_usage usage = {.credit_updated_ns = 1000 * MS, .credit_ns = -(int64_t)(100 * MS)};
    uint64_t now = 1000 * MS;
    for (int i = 0; i < 1000000; i++) {
        now += 7;
        vc_bucket_fill(&usage, now, 50000, 0);
    }
    CHECK_NEAR(usage.credit_ns + (int64_t)(100 * MS), 7 * MS * 0.05, 20);
}

static void test_debt_carries_and_tells_when_it_is_paid(void)
{
    struct vc_card_usage usage = {.credit_updated_ns = 1000 * MS};
    int64_t credit = vc_bucket_take(&usage, 3 * MS, 0);
    CHECK(credit == -(int64_t)(3 * MS));
    CHECK(vc_bucket_wait_ns(credit, 0, 300000) == 10 * MS);
    CHECK(vc_bucket_fill(&usage, 1010 * MS, 300000, 0) == 0);
    CHECK(vc_bucket_wait_ns(5, 5, 300000) == 0);
}

static void test_survives_a_damaged_file(void)
{
    struct vc_card_usage usage;
    memset(&usage, 0xff, sizeof usage);
    usage.credit_ns = INT64_MIN;
    vc_bucket_fill(&usage, 1000 * MS, 300000, 0);
    CHECK(usage.credit_updated_ns == 1000 * MS);
    CHECK(vc_bucket_take(&usage, INT64_MIN, 0) >= -VC_CHARGE_LIMIT_NS);
    CHECK(vc_bucket_fill(&usage, 1001 * MS, 0, 0) >= -VC_CHARGE_LIMIT_NS);
    usage.credit_ns = INT64_MAX;
    CHECK(vc_bucket_take(&usage, -5, 0) == VC_BUCKET_NS);
    usage.credit_updated_ns = 0;
    CHECK(vc_bucket_fill(&usage, UINT64_MAX / 2, 1000000, 0) == VC_BUCKET_NS);
}

static void test_estimates_follow_the_evidence(void)
{
    struct vc_estimate *cost = vc_estimate_find(vc_estimate_function_key(0x1000, 64, 256));
    CHECK(vc_estimate_cost(cost) == 0);
    vc_estimate_learn(cost, 100, 500, 100, VC_EVIDENCE_CLEAN); /* nothing to correct yet */
    CHECK(vc_estimate_cost(cost) == 0);
    vc_estimate_set(cost, 1000);
    vc_estimate_learn(cost, 1000, 2000, 1000, VC_EVIDENCE_CLEAN);
    CHECK(vc_estimate_cost(cost) == 1150);
    vc_estimate_reset(cost);
    vc_estimate_set(cost, 1000);
    for (unsigned i = 1; i < VC_PROVEN_TIMES; i++) { /* what was seen once may depend on an argument */
        CHECK(vc_estimate_pass(cost) == 0 && vc_estimate_risk(cost) == VC_UNPROVEN_NS);
        vc_estimate_learn(cost, 1000, 1000, 1000, VC_EVIDENCE_CLEAN);
    }
    CHECK(vc_estimate_pass(cost) == 1000 && vc_estimate_risk(cost) == 0);
    vc_estimate_unprove(cost); /* a graph was updated: what it costs now may be something else, but it does not run alone */
    CHECK(vc_estimate_cost(cost) == 1000 && vc_estimate_pass(cost) == 0 && vc_estimate_risk(cost) == VC_UNPROVEN_NS);
    vc_estimate_reset(cost);
    vc_estimate_set(cost, 1000000);
    vc_estimate_unprove(cost);
    CHECK(vc_estimate_pass(cost) == 1000000 && vc_estimate_risk(cost) == 0);
    vc_estimate_reset(cost);
    vc_estimate_set(cost, 500);
    for (unsigned i = 0; i < 20; i++) /* beside others that much longer may be theirs: it proves nothing */
        vc_estimate_learn(cost, 500, 2000000, 500, VC_EVIDENCE_UPPER_BOUND);
    CHECK(vc_estimate_pass(cost) == 0);
    vc_estimate_reset(cost);
    vc_estimate_set(cost, 1000);
    for (unsigned i = 1; i < VC_PROVEN_TIMES; i++)
        vc_estimate_learn(cost, 1000, 1000, 1000, VC_EVIDENCE_CLEAN);
    vc_estimate_learn(cost, 1000, 1000000, 1000, VC_EVIDENCE_CLEAN); /* a factor of 1,000 is followed, not bounded */
    CHECK(vc_estimate_cost(cost) == 150850);
    CHECK(vc_estimate_pass(cost) == 0 && vc_estimate_risk(cost) == 1000000); /* and from now on each is measured */
    vc_estimate_set(cost, 1000);
    vc_estimate_learn(cost, 1000, 3000, 1000, VC_EVIDENCE_UPPER_BOUND);
    CHECK(vc_estimate_cost(cost) == 1020);
    vc_estimate_set(cost, 1000);
    vc_estimate_learn(cost, 1000, 500, 1000, VC_EVIDENCE_UPPER_BOUND); /* a smaller wall time is always the better bound */
    CHECK(vc_estimate_cost(cost) == 925);
    for (int i = 0; i < 300; i++) /* launched while it was still thought to cost 24 us: all say 10 us, and 10 us it becomes */
        vc_estimate_learn(cost, 24000, 10000, 24000, VC_EVIDENCE_CLEAN);
    CHECK_NEAR(vc_estimate_cost(cost), 10000, 50);
    vc_estimate_reset(cost);
    CHECK(vc_estimate_cost(cost) == 0);
}

static void test_estimates_know_functions_and_sizes_apart(void)
{
    CHECK(vc_estimate_function_key(0x1000, 64, 256) == vc_estimate_function_key(0x1000, 66, 256));
    CHECK(vc_estimate_function_key(0x1000, 64, 256) != vc_estimate_function_key(0x1000, 80, 256));
    CHECK(vc_estimate_function_key(0x1000, 64, 256) != vc_estimate_function_key(0x1000, 128, 256));
    CHECK(vc_estimate_function_key(0x1000, 64, 256) != vc_estimate_function_key(0x1000, 64, 1024));
    CHECK(vc_estimate_function_key(0x1000, 64, 256) != vc_estimate_function_key(0x2000, 64, 256));
    CHECK(vc_estimate_find(7) == vc_estimate_find(7) && vc_estimate_find(7) != vc_estimate_find(8));
    for (uint64_t key = 1; key < 100000; key++) /* full: still answers */
        CHECK(vc_estimate_find(key * 2654435761u + 1) != NULL);
}

static void test_overlapping_intervals_are_paid_once(void)
{
    struct vc_busy busy = {0};
    CHECK(vc_busy_add(&busy, 100, 200) == 100);
    CHECK(vc_busy_add(&busy, 150, 250) == 50);
    CHECK(vc_busy_add(&busy, 120, 180) == 0);
    CHECK(vc_busy_add(&busy, 400, 500) == 100);
    CHECK(vc_busy_add(&busy, 50, 600) == 50 + 150 + 100);
    CHECK(vc_busy_add(&busy, 0, 1000) == 50 + 400);
    for (uint64_t i = 0; i < 100; i++)
        CHECK(vc_busy_add(&busy, 2000 + 10 * i, 2005 + 10 * i) == 5);
    CHECK(vc_busy_add(&busy, 2990, 3000) == 5);
    CHECK(busy.count <= VC_BUSY_SEGMENTS);
    CHECK(vc_busy_add(&busy, 2000, 2005) == 5); /* forgotten */
    CHECK(vc_busy_add(&busy, 10, 5) == 0);
}

static void test_what_is_not_covered_is_found(void)
{
    struct vc_busy busy = {0};
    uint64_t until;
    CHECK(vc_busy_fresh(&busy, 0, 100, 30, &until) == 100 && until == 30);
    vc_busy_add(&busy, 20, 40);
    vc_busy_add(&busy, 60, 70);
    CHECK(vc_busy_fresh(&busy, 0, 100, 30, &until) == 70 && until == 50);
    CHECK(vc_busy_fresh(&busy, 30, 65, 20, &until) == 20 && until == 60);
    CHECK(vc_busy_fresh(&busy, 30, 65, 50, &until) == 20 && until == 65);
    CHECK(vc_busy_fresh(&busy, 20, 40, 10, &until) == 0 && until == 40);
    CHECK(vc_busy_fresh(&busy, 80, 100, 0, &until) == 20 && until == 80);
}

int main(void)
{
    test_fills_at_the_rate_and_not_beyond_the_bucket();
    test_holds_more_as_long_as_others_owe();
    test_loses_no_fraction_over_many_fills();
    test_debt_carries_and_tells_when_it_is_paid();
    test_survives_a_damaged_file();
    test_estimates_follow_the_evidence();
    test_estimates_know_functions_and_sizes_apart();
    test_overlapping_intervals_are_paid_once();
    test_what_is_not_covered_is_found();
    return check_failures != 0;
}
