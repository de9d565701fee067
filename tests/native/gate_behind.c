/* Work that has something else to do first, a copy over the bus or a callback: until it begins the card is anybody's. */
#include "gate_fixture.h"

static struct vc_lane_step step;

/* A stream on which something that takes 1 ms comes before each of its operations. */
static enum vc_gate_reason launch_behind(struct vc_lane *lane, struct vc_estimate *estimate, uint64_t now)
{
    vc_lane_elsewhere(lane, false, &step);
    lane->elsewhere_ns = MS;
    vc_test_ticks = now;
    vc_lane_ask(lane, estimate, now, now, &answer, &step);
    if (answer.reason != VC_GATE_GO)
        return answer.reason;
    CHECK(step.mark_before);
    vc_lane_opened(lane, true);
    vc_lane_launched(lane, estimate, &answer, &step);
    if (!step.mark_after)
        vc_lane_pause(lane, &step);
    return VC_GATE_GO;
}

static struct vc_estimate *estimate_of(uint64_t key, uint64_t cost)
{
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(key, 1, 1));
    vc_estimate_set(estimate, cost);
    return estimate;
}

/* Three streams launch kernels of 2 us behind callbacks of 1 ms each. Their ends lie 1 ms ahead and more, one behind the other, and a thread with kernels of 1 ms got nothing on the idle card meanwhile: it had 10 of 30. */
static void test_what_waits_for_something_else_keeps_nobody_from_the_card(void)
{
    struct vc_lane lanes[3];
    struct vc_estimate *shorts = estimate_of(0x91, 2 * US);
    start(30, 30, VC_CARD_SHARED);
    usage.credit_ns = 10 * MS;
    usage.credit_updated_ns = T;
    lease(T, T + 8 * MS, T);
    for (unsigned i = 0; i < 3; i++) {
        vc_lane_init(&lanes[i], &gate);
        for (unsigned k = 0; k < 3; k++)
            launch_behind(&lanes[i], shorts, T + (i + 1) * 10 * US);
    }
    CHECK(gate.unseen != 0 && usage.predicted_finish_ns > T + MS && usage.predicted_finish_ns < T + 2 * MS); /* the arbiter knows that it is to come */
    CHECK(ask(T + 100 * US, MS) == VC_GATE_GO);
    CHECK(ask(T + 110 * US, MS) == VC_GATE_GO);
    CHECK(ask(T + 120 * US, MS) == VC_GATE_OUTSTANDING && answer.until_ns > T + 120 * US); /* of what can begin there is enough */
    CHECK(usage.predicted_finish_ns < T + 2500 * US); /* what they have fills the time of the callbacks */
}

/* The next holder's lease begins when this one ends: what would begin then is not launched. */
static void test_what_would_begin_behind_the_lease_is_not_launched(void)
{
    struct vc_lane lane;
    struct vc_estimate *estimate = estimate_of(0x92, 500 * US);
    start(30, 30, VC_CARD_SHARED);
    usage.credit_ns = 10 * MS;
    usage.credit_updated_ns = T;
    lease(T, T + 4 * MS, T);
    vc_lane_init(&lane, &gate);
    unsigned launched = 0;
    for (uint64_t now = T; now < T + 4 * MS; now += 100 * US)
        launched += launch_behind(&lane, estimate, now) == VC_GATE_GO;
    CHECK(launched == 2); /* they end at 1.5 and 3 ms */
    CHECK(gate.finish_ns > T + 2900 * US && gate.finish_ns < T + 3100 * US);
}

/* A callback that takes for ever, or a copy of which nobody knows: the card is thought to be idle. While another stream's work is there, it is not. */
static void test_who_waits_for_long_leaves_the_card_idle_unless_others_of_its_process_have_it(void)
{
    start(30, 30, VC_CARD_SHARED);
    usage.credit_ns = 10 * MS;
    usage.credit_updated_ns = T;
    lease(T, T + 8 * MS, T);
    CHECK(ask(T, 2 * MS) == VC_GATE_GO);
    vc_gate_marked(&gate, answer.allowance_ns);
    vc_gate_on_card(&gate, T + MS);
    CHECK(!vc_gate_not_begun(&gate, T + MS, true));
    CHECK(gate.finish_ns >= T + 2 * MS); /* it had launched 5 ms ahead, in others' leases */
    CHECK(vc_gate_not_begun(&gate, T + 2 * MS, true)); /* whoever waits for it looks again */
    CHECK(gate.finish_ns < T + 2 * MS);
    CHECK(!vc_gate_not_begun(&gate, T + 2200 * US, true));
}

/* What varies and waits for a callback together may take 50 ms: its thread waits until the end of some of it is seen, which no lease brings nearer. It waited for its lease, and kept the card idle for
 * all of it: a steady 70 had 66. */
static void test_who_waits_for_the_end_of_what_waits_has_no_use_for_a_lease(void)
{
    start(30, 30, VC_CARD_SHARED);
    usage.credit_ns = 10 * MS;
    usage.credit_updated_ns = T;
    lease(T, T + 8 * MS, T);
    vc_gate_enter(&gate, T, 100 * US, VC_RISK_NS, &answer);
    CHECK(answer.reason == VC_GATE_GO);
    vc_gate_marked(&gate, answer.allowance_ns);
    vc_gate_enter(&gate, T + 100 * US, 100 * US, MS, &answer);
    CHECK(answer.reason == VC_GATE_OUTSTANDING && !answer.no_lease); /* it may be on the card */
    CHECK(vc_gate_not_begun(&gate, T + 400 * US, true));
    vc_gate_enter(&gate, T + 500 * US, 100 * US, MS, &answer);
    CHECK(answer.reason == VC_GATE_OUTSTANDING && answer.no_lease);
    lease(T + 11 * MS, 0, 0);
    vc_gate_not_begun(&gate, T + 11 * MS, true);
    vc_gate_enter(&gate, T + 11 * MS, 100 * US, MS, &answer);
    CHECK(answer.reason == VC_GATE_OUTSTANDING && answer.no_lease); /* … nor for the next one */
    vc_gate_enter(&gate, T + 11 * MS, 100 * US, 0, &answer);
    CHECK(answer.reason == VC_GATE_LEASE && !answer.no_lease);
}

/* The end of what was before it was seen just now, so the card is known to be idle at once, and who would use the lease need not wait until that is long ago. */
static void test_who_has_nothing_but_what_waits_leaves_the_card_at_once(void)
{
    start(30, 30, VC_CARD_SHARED);
    usage.credit_ns = 10 * MS;
    usage.credit_updated_ns = T;
    lease(T, T + 8 * MS, T);
    vc_gate_enter(&gate, T, 2 * MS, VC_RISK_NS, &answer);
    uint64_t launched = vc_gate_marked(&gate, answer.allowance_ns);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    vc_gate_on_card(&gate, T + MS);
    vc_gate_all_wait(&gate, 2, launched); /* another mark was recorded meanwhile, or lies in another context */
    vc_gate_all_wait(&gate, 1, launched - 1); /* … or something without a mark is there */
    CHECK(!vc_gate_not_begun(&gate, T + MS, true));
    vc_gate_all_wait(&gate, 1, launched);
    CHECK(vc_gate_not_begun(&gate, T + MS, true));
    vc_gate_enter(&gate, T + MS, 100 * US, MS, &answer);
    CHECK(answer.reason == VC_GATE_OUTSTANDING && answer.no_lease);
}

/* One of several streams always waits for its callback, so something is always outstanding: what was never measured was not launched for seconds. */
static void test_what_was_never_measured_does_not_wait_for_what_waits(void)
{
    struct vc_lane lane;
    start(30, 30, VC_CARD_SHARED);
    usage.credit_ns = 10 * MS;
    usage.credit_updated_ns = T;
    lease(T, T + 8 * MS, T);
    vc_lane_init(&lane, &gate);
    CHECK(launch_behind(&lane, estimate_of(0x91, 2 * US), T) == VC_GATE_GO && gate.unseen != 0);
    CHECK(ask(T + MS, 0) == VC_GATE_OUTSTANDING); /* nobody has looked: it may be on the card */
    vc_gate_not_begun(&gate, T + 1500 * US, false);
    CHECK(ask(T + 1600 * US, 0) == VC_GATE_GO);
    CHECK(ask(T + 1700 * US, 0) == VC_GATE_OUTSTANDING); /* one at a time */
}

int main(void)
{
    test_what_waits_for_something_else_keeps_nobody_from_the_card();
    test_what_would_begin_behind_the_lease_is_not_launched();
    test_who_waits_for_long_leaves_the_card_idle_unless_others_of_its_process_have_it();
    test_who_waits_for_the_end_of_what_waits_has_no_use_for_a_lease();
    test_who_has_nothing_but_what_waits_leaves_the_card_at_once();
    test_what_was_never_measured_does_not_wait_for_what_waits();
    return check_failures != 0;
}
