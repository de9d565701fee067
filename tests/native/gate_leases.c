/* Leases: who passes while whose is running, and what fits into it. */
#include "gate_fixture.h"

static void test_only_the_holder_of_the_lease_passes(void)
{
    start(30, 30, VC_CARD_SHARED);
    lease(T, 0, 0);
    CHECK(ask(T, 100 * US) == VC_GATE_LEASE);
    CHECK(answer.until_ns <= T + VC_RECHECK_NS);
    lease(T, UINT64_MAX, 0);
    CHECK(ask(T, 100 * US) == VC_GATE_GO);
    lease(T, 0, 0);
    CHECK(ask(T + 60 * MS, 100 * US) == VC_GATE_GO); /* the arbiter is dead */
}

static void test_the_holder_fits_its_work_into_the_lease(void)
{
    start(90, 90, VC_CARD_SHARED);
    lease(T, T + 5 * MS, T);
    CHECK(ask(T, 1 * MS) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    CHECK(ask(T, 1 * MS) == VC_GATE_GO); /* outstanding 1, half of the next: within 2 ms */
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    CHECK(ask(T, 1 * MS) == VC_GATE_OUTSTANDING);
    CHECK_NEAR(answer.until_ns, T + 1 * MS, 10 * US);
    CHECK(ask(T + 4 * MS, 1 * MS) == VC_GATE_GO); /* nothing outstanding: half of it would still fit */
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    CHECK(ask(T + 4 * MS, 1 * MS) == VC_GATE_LEASE);
}

/* When its lease has ended it may be the next one's at any moment. */
static void test_nothing_begins_behind_a_lease(void)
{
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 4 * MS, T);
    CHECK(ask(T + 5 * MS, 20 * MS) == VC_GATE_LEASE && answer.refill_ns == VC_NOTHING_FITS);
    CHECK(ask(T + 3 * MS, 20 * MS) == VC_GATE_GO); /* nothing would ever fit */
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 4 * MS, T);
    CHECK(ask(T + 5 * MS, 1 * MS) == VC_GATE_LEASE); /* the arbiter may be waiting until the card is idle */
}

/* Who gets the next lease, too, waits for the end of what it launched in the last one, not for a grant that nobody gives: for 7.6 ms of every 60 the card was idle. */
static void test_what_is_longer_than_a_lease_begins_when_the_one_before_it_has_ended(void)
{
    start(70, 70, VC_CARD_SHARED);
    lease(T, T + 8 * MS, T);
    limits.cards[0].lease_start_ns = T;
    CHECK(ask(T, 20 * MS) == VC_GATE_GO);
    vc_gate_marked(&gate, 0);
    usage.credit_ns = 10 * MS;
    CHECK(ask(T + MS, 20 * MS) == VC_GATE_LEASE && answer.refill_ns == VC_NOTHING_FITS); /* it has used this one */
    usage.credit_ns = 10 * MS;
    lease(T + 19 * MS, T + 28 * MS, T);
    limits.cards[0].lease_start_ns = T + 19 * MS;
    CHECK(ask(T + 19 * MS, 20 * MS) == VC_GATE_OUTSTANDING);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 20 * MS, .estimate_ns = 20 * MS, .launched_ns = gate.launched_ns, .operations = 1, .measurable = true};
    vc_gate_seen(&gate, T + 20 * MS, &interval);
    usage.credit_ns = 10 * MS;
    CHECK(ask(T + 20 * MS, 20 * MS) == VC_GATE_GO);
}

/* Ten operations of 500 us at once, as a request that comes from idle: how many go before one has to wait. */
static unsigned burst(uint64_t at, uint64_t lease_end)
{
    lease(at, lease_end, at);
    for (unsigned i = 0; i < 10; i++) {
        if (ask(at + i * 5 * US, 500 * US) != VC_GATE_GO)
            return i;
        vc_gate_fold(&gate, answer.allowance_ns, 0);
    }
    return 10;
}

static void test_a_request_from_idle_never_sleeps_while_nobody_waits(void)
{
    start(30, 30, VC_CARD_SHARED);
    CHECK(burst(T, UINT64_MAX) == 10);
    CHECK(burst(T + 2 * MS, UINT64_MAX) == 2); /* 3 ms are outstanding still: 6 in all, then the ordinary rule */
    start(30, 30, VC_CARD_SHARED);
    CHECK(burst(T, T + 8 * MS) == 4); /* somebody waits: 2 ms */
    start(100, 100, VC_CARD_SHARED);
    burst(T, UINT64_MAX);
    for (unsigned i = 1; i < 20; i++) /* never idle again: the ordinary rule for good */
        CHECK(ask(T + i * MS, 1 * MS) == VC_GATE_GO || gate.finish_ns <= T + i * MS + 6 * MS);
    CHECK(burst(T + 20 * MS, UINT64_MAX) <= 4);
}

static void test_a_new_holder_counts_from_its_predecessors_end(void)
{
    start(90, 90, VC_CARD_SHARED);
    lease(T, T + 8 * MS, T + 1500 * US);
    CHECK(ask(T, 500 * US) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    CHECK(gate.finish_ns == T + 2 * MS);
    CHECK(usage.predicted_finish_ns == T + 2 * MS);
}

/* What takes no time of the card, as the record of an event, has it turn to its context all the same: in others' leases that is theirs. */
static void test_what_has_the_card_turn_to_it_comes_within_a_lease(void)
{
    start(30, 30, VC_CARD_SHARED);
    CHECK(vc_gate_comes(&gate, T)); /* no arbiter */
    lease(T, 0, 0);
    CHECK(!vc_gate_comes(&gate, T));
    CHECK(vc_gate_comes(&gate, T + 60 * MS)); /* the arbiter is dead */
    lease(T, UINT64_MAX, 0);
    CHECK(vc_gate_comes(&gate, T));
    lease(T, T + 4 * MS, T);
    CHECK(vc_gate_comes(&gate, T + 3800 * US));
    CHECK(!vc_gate_comes(&gate, T + 3950 * US)); /* the card would turn to it behind the lease */
    usage.predicted_finish_ns = T + 3 * MS;
    CHECK(vc_gate_comes(&gate, T + 1 * MS));
    usage.predicted_finish_ns = T + 20 * MS; /* a slice of other work of the container comes first */
    CHECK(vc_gate_comes(&gate, T + 1 * MS));
    CHECK(!vc_gate_comes(&gate, T + 2 * MS));
    lease(T, T + 4 * MS, T);
    limits.cards[0].lease_sequence |= VC_LEASE_TOGETHER;
    CHECK(vc_gate_comes(&gate, T + 5 * MS));
}

static void test_such_turns_of_the_card_are_known_to_last(void)
{
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 4 * MS, T);
    unsigned turns = 0;
    while (turns < 100 && vc_gate_comes(&gate, T)) {
        vc_gate_came(&gate, T, true, false);
        turns++;
    }
    CHECK(turns >= 38 && turns <= 40); /* as many as the card gets around to before the lease ends */
    CHECK_NEAR(usage.predicted_finish_ns, T + 4 * MS, 200 * US);
    CHECK(usage.gpu_ns == (turns - 4) * 100 * US); /* a few mark work */
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 4 * MS, T);
    vc_gate_came(&gate, T, false, false);
    vc_gate_came(&gate, T, false, false); /* around work */
    CHECK(usage.predicted_finish_ns == 0);
    for (unsigned i = 0; i < 100; i++)
        vc_gate_came(&gate, T, false, false);
    CHECK(usage.predicted_finish_ns > T && usage.gpu_ns == 0);
}

static void come(unsigned times, bool behind)
{
    for (unsigned i = 0; i < times; i++)
        vc_gate_came(&gate, T, true, behind);
}

static void test_such_turns_are_charged_once(void)
{
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 4 * MS, T);
    come(4, true); /* around work, as anybody's who waits for a copy */
    CHECK(usage.gpu_ns == 0);
    come(1, true); /* in whoever's lease, and there and back */
    CHECK(usage.gpu_ns == 200 * US && usage.predicted_finish_ns == 0);
    CHECK(ask(T, 100 * US) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    vc_gate_marked(&gate, 0);
    uint64_t charged = usage.gpu_ns;
    come(4, true); /* work was launched since */
    CHECK(usage.gpu_ns == charged);
    come(1, false); /* within the interval */
    CHECK(usage.gpu_ns == charged);
    come(1, true);
    CHECK(usage.gpu_ns == charged + 200 * US);
    start(30, 30, VC_CARD_SHARED); /* nobody else has the card */
    come(10, false);
    CHECK(usage.gpu_ns == 0);
}

int main(void)
{
    test_only_the_holder_of_the_lease_passes();
    test_the_holder_fits_its_work_into_the_lease();
    test_nothing_begins_behind_a_lease();
    test_what_is_longer_than_a_lease_begins_when_the_one_before_it_has_ended();
    test_a_request_from_idle_never_sleeps_while_nobody_waits();
    test_a_new_holder_counts_from_its_predecessors_end();
    test_what_has_the_card_turn_to_it_comes_within_a_lease();
    test_such_turns_of_the_card_are_known_to_last();
    test_such_turns_are_charged_once();
    return check_failures != 0;
}
