/* Turns of one container's processes within its lease. */
#include "gate_fixture.h"

/* Processes of one container: who gets the turn when all ask. */
static struct vc_slot slots[VC_MAX_SLOTS];
static uint32_t slots_used;
static uint64_t asked[VC_MAX_SLOTS];

/* `lease_end` UINT64_MAX: a lease since long ago; else one of 7 ms. */
static struct vc_turn take(uint32_t own, uint64_t now, uint64_t lease_end)
{
    struct vc_turns turns = {&usage, slots, &slots_used, 0, own, asked[own]};
    struct vc_turn turn = vc_turn_take(&turns, now, lease_end == UINT64_MAX ? 0 : lease_end - 7 * MS, lease_end);
    asked[own] = turns.asked_ns;
    return turn;
}

static void start_turns(uint32_t processes)
{
    start(30, 30, VC_CARD_SHARED);
    memset(slots, 0, sizeof slots);
    memset(asked, 0, sizeof asked);
    slots_used = processes;
}

/* The process uses its turn until then. */
static void uses(uint32_t slot, uint64_t ns, uint64_t finish)
{
    slots[slot].cards[0].served_ns += ns;
    slots[slot].cards[0].predicted_finish_ns = finish;
}

static void test_turns_go_to_the_least_served_of_those_that_wait(void)
{
    start_turns(3);
    CHECK(take(0, T, T + 7 * MS).mine);
    uses(0, 7 * MS, T + 7 * MS);
    struct vc_turn refused = take(1, T + MS, T + 7 * MS);
    CHECK(!refused.mine && refused.end_ns >= T + 7 * MS - 1024 && refused.end_ns <= T + 7 * MS);
    for (unsigned i = 0; i < 3; i++)
        slots[i].cards[0].waiting_until_ns = T + 100 * MS;
    CHECK(take(0, T + 6 * MS, T + 7 * MS).mine && take(0, T + 6 * MS, T + 7 * MS).siblings_wait);
    slots[1].cards[0].served_ns = 0;
    slots[2].cards[0].served_ns = 3 * MS;
    asked[1] = asked[2] = T;
    refused = take(2, T + 7 * MS, T + 14 * MS);
    CHECK(!refused.mine && refused.call_next); /* slot 1 is next, and should be told */
    CHECK(!take(0, T + 7 * MS, T + 14 * MS).mine);
    CHECK(take(1, T + 7 * MS, T + 14 * MS).mine);
    uses(1, 1 * MS, T + 14 * MS); /* it did not get far: it will be next again */
    CHECK(!take(2, T + 14 * MS, T + 21 * MS).mine);
    CHECK(take(1, T + 14 * MS, T + 21 * MS).mine);
    uses(1, 6 * MS, T + 21 * MS);
    CHECK(!take(1, T + 21 * MS, T + 28 * MS).mine);
    CHECK(take(2, T + 21 * MS, T + 28 * MS).mine);
}

static void test_a_process_that_was_idle_comes_back_level(void)
{
    start_turns(2);
    CHECK(take(0, T, UINT64_MAX).mine);
    uses(0, 5000 * MS, T + 5000 * MS);
    CHECK(!take(1, T + MS, UINT64_MAX).mine);
    CHECK(slots[1].cards[0].served_ns == 5000 * MS); /* not five seconds of arrears */
}

static void test_a_turn_is_never_held_for_good(void)
{
    start_turns(2);
    CHECK(take(0, T, UINT64_MAX).mine);
    CHECK(take(0, T + 100 * MS, UINT64_MAX).mine); /* alone: renewed */
    CHECK(!take(1, T + 100 * MS + 100 * US, UINT64_MAX).mine);
    CHECK(take(1, T + 100 * MS + 300 * US, UINT64_MAX).mine); /* nothing on the card for 0.2 ms: given up */
    uses(1, MS, T + 5000 * MS); /* work that does not end: it may wait for a sibling's */
    slots[1].cards[0].waiting_until_ns = T + 5000 * MS;
    CHECK(!take(0, T + 110 * MS, UINT64_MAX).mine);
    CHECK(take(0, T + 118 * MS, UINT64_MAX).mine);
    start_turns(2);
    CHECK(take(0, T, UINT64_MAX).mine);
    slots[0].cards[0].waiting_until_ns = T + 5000 * MS; /* killed while it waited */
    CHECK(take(1, T + 9 * MS, UINT64_MAX).mine);
    uses(1, 8 * MS, T + 17 * MS);
    CHECK(!take(1, T + 17 * MS + 10 * US, UINT64_MAX).mine); /* the dead one is next … */
    CHECK(take(1, T + 18 * MS, UINT64_MAX).mine);             /* … for half a millisecond */
    usage.turn = UINT64_MAX; /* a damaged file */
    CHECK(take(1, T + 20 * MS, UINT64_MAX).mine);
}

static void test_a_turn_ends_early_if_nothing_more_fits(void)
{
    start_turns(2);
    struct vc_turns turns = {&usage, slots, &slots_used, 0, 0, 0};
    CHECK(take(0, T, UINT64_MAX).mine);
    slots[0].cards[0].predicted_finish_ns = T + 6 * MS;
    slots[0].cards[0].waiting_until_ns = T + 100 * MS;
    CHECK(!take(1, T + 6 * MS, UINT64_MAX).mine);
    CHECK(vc_turn_shorten(&turns, T + 5 * MS, T + 6 * MS));
    CHECK(take(1, T + 6 * MS, UINT64_MAX).mine);
    CHECK(!vc_turn_shorten(&turns, T + 6 * MS, T + 7 * MS)); /* not ours any more */
}

static void test_siblings_wait_at_the_gate(void)
{
    start_turns(2);
    lease(T, UINT64_MAX, 0);
    struct vc_gate sibling;
    vc_gate_init(&sibling, &limits, &limits.cards[0], &usage, &slots[1].cards[0]);
    sibling.turns = (struct vc_turns){&usage, slots, &slots_used, 0, 1, 0};
    gate.slot = &slots[0].cards[0];
    gate.turns = (struct vc_turns){&usage, slots, &slots_used, 0, 0, 0};
    CHECK(ask(T, MS) == VC_GATE_GO);
    vc_gate_enter(&sibling, T, MS, 0, &answer);
    CHECK(answer.reason == VC_GATE_TURN);
    lease(T, 0, 0);
    vc_gate_enter(&sibling, T, MS, 0, &answer);
    CHECK(answer.reason == VC_GATE_LEASE); /* no lease, no turn */
    limits.arbiter_heartbeat_ns = 0;
    vc_gate_enter(&sibling, T, MS, 0, &answer);
    CHECK(answer.reason == VC_GATE_GO); /* without an arbiter all run within the bucket */
}

/* Two processes each come for 50 us every 10 ms and wait for that once. */
static void test_who_comes_for_a_moment_hands_on_what_it_holds(void)
{
    start_turns(2);
    gate.slot = &slots[0].cards[0];
    gate.turns = (struct vc_turns){&usage, slots, &slots_used, 0, 0, 0};
    uint64_t now = T;
    for (unsigned visit = 0; visit <= VC_VISITS; visit++, now += 10 * MS) {
        lease(now, now + 3 * MS, now);
        CHECK(ask(now, 50 * US) == VC_GATE_GO && usage.refill_ns == 0);
        enum vc_gate_heir heir = vc_gate_leave(&gate, now + 100 * US);
        CHECK(heir == (visit == VC_VISITS ? VC_HEIR_ARBITER : VC_HEIR_NONE)); /* once it is known to */
        CHECK((usage.refill_ns == VC_HAS_LEFT) == (visit == VC_VISITS) && (visit != VC_VISITS || gate.finish_ns <= now + 100 * US));
    }
    for (unsigned waits = 0; waits < 2; waits++, now += 10 * MS) {
        lease(now, now + 3 * MS, now);
        CHECK(ask(now, 50 * US) == VC_GATE_GO && usage.refill_ns == 0);
        slots[1].cards[0].waiting_until_ns = waits ? now + 20 * MS : 0;
        slots[1].cards[0].predicted_finish_ns = now + 300 * US; /* left there from before */
        CHECK(vc_gate_leave(&gate, now + 100 * US) == (waits ? VC_HEIR_SIBLING : VC_HEIR_NONE) && usage.refill_ns == 0);
        CHECK(!waits || take(1, now + 130 * US, now + 3 * MS).mine); /* not 0.2 ms after all that its permit lets it launch */
    }
    slots[1].cards[0].waiting_until_ns = slots[1].cards[0].predicted_finish_ns = 0;
    lease(now, UINT64_MAX, now);
    CHECK(ask(now, 50 * US) == VC_GATE_GO && vc_gate_leave(&gate, now + 100 * US) == VC_HEIR_NONE); /* nobody wants it */
    now += 10 * MS;
    lease(now, now + 3 * MS, now);
    CHECK(ask(now, 50 * US) == VC_GATE_GO && vc_gate_leave(&gate, now + 100 * US) == VC_HEIR_ARBITER);
    CHECK(ask(now + 200 * US, 50 * US) == VC_GATE_GO && vc_gate_leave(&gate, now + 300 * US) == VC_HEIR_NONE); /* it went on */
}

/* The first of two processes has the least, and the gate is its own, within a lease of 7 ms. */
static void start_as_the_least_served(void)
{
    start_turns(2);
    usage.credit_ns = 10 * MS;
    usage.credit_updated_ns = T;
    lease(T, T + 7 * MS, T);
    limits.cards[0].lease_start_ns = T;
    gate.slot = &slots[0].cards[0];
    gate.turns = (struct vc_turns){&usage, slots, &slots_used, 0, 0, 0};
    slots[1].cards[0].served_ns = 5000 * MS;
}

/* A data loader: copies over the bus, and a kernel of 2 us behind each. It waits most of its turn for its copies, and it is always the one that was served least: a sibling that trains had 0.5 of 30. */
static void test_who_waits_for_a_copy_leaves_the_turn_to_its_siblings(void)
{
    struct vc_lane lane;
    struct vc_lane_step step;
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0xa1, 1, 1));
    start_as_the_least_served();
    vc_estimate_set(estimate, 2 * US);
    slots[1].cards[0].waiting_until_ns = T + 100 * MS;
    asked[1] = T;
    vc_lane_init(&lane, &gate);
    vc_lane_elsewhere(&lane, true, &step);
    lane.elsewhere_ns = 1500 * US;
    vc_lane_ask(&lane, estimate, T, T, &answer, &step);
    CHECK(answer.reason == VC_GATE_GO && answer.call_next); /* the sibling is to look */
    CHECK(slots[0].cards[0].predicted_finish_ns > T + 1500 * US);
    CHECK(take(1, T + 30 * US, T + 7 * MS).mine);
}

/* What does not fit into the rest of the lease waits for the next one: a sibling's work may fit. */
static void test_what_does_not_fit_into_the_lease_leaves_the_rest_to_siblings(void)
{
    start_as_the_least_served();
    asked[1] = T;
    CHECK(ask(T, 500 * US) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    slots[1].cards[0].waiting_until_ns = T + 100 * MS;
    CHECK(ask(T + 100 * US, 14 * MS) == VC_GATE_TURN && answer.no_turn && answer.call_next);
    CHECK(!take(1, T + 200 * US, T + 7 * MS).mine && take(1, T + 500 * US, T + 7 * MS).mine);
}

int main(void)
{
    test_turns_go_to_the_least_served_of_those_that_wait();
    test_a_process_that_was_idle_comes_back_level();
    test_a_turn_is_never_held_for_good();
    test_a_turn_ends_early_if_nothing_more_fits();
    test_siblings_wait_at_the_gate();
    test_who_comes_for_a_moment_hands_on_what_it_holds();
    test_who_waits_for_a_copy_leaves_the_turn_to_its_siblings();
    test_what_does_not_fit_into_the_lease_leaves_the_rest_to_siblings();
    return check_failures != 0;
}
