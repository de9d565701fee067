/* Asking the card whether it still has what a stopped process left there: when, and what is charged by the answers. */
#include "gate_fixture.h"
#include "gate/probe.h"

static struct vc_probe probe;
static struct vc_usage region_usage;

static uint64_t plan(uint64_t now)
{
    uint64_t due = vc_probe_plan(&probe, now);
    CHECK(due == probe.due_ns);
    return due;
}

static void start_standing(void)
{
    memset(&probe, 0, sizeof probe);
    probe.stands_ns = T;
}

static void test_nobody_is_asked_where_nobody_stands_still(void)
{
    memset(&probe, 0, sizeof probe);
    CHECK(vc_probe_plan(&probe, T) == UINT64_MAX && !vc_probe_holds(&probe, T, false));
    start_standing();
    CHECK(plan(T) < T + VC_PROBE_SPREAD_NS);
    CHECK(vc_probe_plan(&probe, T + VC_PROBE_STANDS_NS) == UINT64_MAX && probe.due_ns == 0);
}

static void test_the_moments_are_spread(void)
{
    uint64_t least = UINT64_MAX, most = 0;
    for (unsigned i = 0; i < 100; i++) {
        memset(&probe, 0, sizeof probe);
        probe.stands_ns = T + i * 12345;
        uint64_t wait = vc_probe_plan(&probe, probe.stands_ns) - probe.stands_ns;
        least = vc_earlier(least, wait);
        most = vc_later(most, wait);
    }
    CHECK(least < 2 * MS && most > 15 * MS);
}

static void test_a_free_card_that_has_come_answers_at_once(void)
{
    start_standing();
    uint64_t due = plan(T);
    vc_probe_ask(&probe, due, false);
    CHECK(vc_probe_answer(&probe, due + MS, false, false) == VC_PROBE_WAITS); /* for somebody's slice to end */
    CHECK(vc_probe_answer(&probe, due + 2 * MS, true, false) == VC_PROBE_ASKS_AGAIN && probe.known_ns == 0);
    uint64_t again = due + 2 * MS + 10 * US;
    vc_probe_ask(&probe, again, true);
    CHECK(vc_probe_answer(&probe, again + 5 * US, false, false) == VC_PROBE_WAITS);
    CHECK(vc_probe_answer(&probe, again + 700 * US, true, true) == VC_PROBE_FREE && probe.known_ns == again);
    CHECK(probe.due_ns >= again + VC_PROBE_LEAST_NS && probe.asked_ns == 0);
}

/* It had gone to something else meanwhile, for a slice. */
static void test_a_busy_one_does_not_unless_others_explain_it(void)
{
    start_standing();
    vc_probe_ask(&probe, T, true);
    CHECK(vc_probe_answer(&probe, T + 2 * MS, false, true) == VC_PROBE_SAYS_NOTHING && probe.known_ns == 0);
    CHECK(probe.due_ns >= T + 2 * MS + VC_PROBE_LEAST_NS && probe.due_ns < T + 2 * MS + VC_PROBE_LEAST_NS + VC_PROBE_AGAIN_NS);
    vc_probe_ask(&probe, T + 2 * MS, true);
    CHECK(vc_probe_answer(&probe, T + 4 * MS, true, false) == VC_PROBE_SAYS_NOTHING); /* or nobody looked in time */
    vc_probe_ask(&probe, T + 3 * MS, true);
    CHECK(vc_probe_answer(&probe, T + 5 * MS, false, false) == VC_PROBE_BUSY && probe.known_ns == T + 3 * MS);
    vc_probe_ask(&probe, T + 5 * MS, false); /* other tenants have it for long */
    CHECK(vc_probe_answer(&probe, T + 6 * MS + VC_PROBE_COMES_NS, false, false) == VC_PROBE_SAYS_NOTHING);
}

/* Else who always has something on the card would never be free to ask, and what is launched meanwhile would answer. */
static void test_launches_wait_for_it_but_not_for_long(void)
{
    start(100, 100, 0);
    gate.watched = true;
    vc_bucket_fill(&usage, T, 1000000, 0);
    CHECK(ask(T, MS) == VC_GATE_GO);
    vc_gate_marked(&gate, answer.allowance_ns);
    gate.probe.stands_ns = T;
    gate.probe.due_ns = T + 10 * US;
    CHECK(ask(T + 20 * US, 10 * US) == VC_GATE_OUTSTANDING);
    CHECK(ask(T + 10 * US + VC_PROBE_HOLDS_NS, 10 * US) == VC_GATE_GO);
    start(100, 100, 0);
    vc_bucket_fill(&usage, T, 1000000, 0);
    gate.probe.due_ns = T;
    CHECK(!vc_probe_holds(&gate.probe, T + US, true));
    gate.probe.asked_ns = T + US;
    CHECK(ask(T + 2 * US, 10 * US) == VC_GATE_OUTSTANDING);
    CHECK(ask(T + VC_PROBE_HOLDS_NS, 10 * US) == VC_GATE_GO);
}

static void test_whoever_has_work_or_whose_siblings_have_tells_nothing(void)
{
    static struct vc_slot slots[2];
    static uint32_t used = 2;
    start(50, 50, 0);
    CHECK(vc_gate_is_idle(&gate, T) && !vc_gate_others_explain(&gate, vc_now_ns()));
    gate.turns = (struct vc_turns){&usage, slots, &used, 0, 0, 0};
    slots[1].cards[0].predicted_finish_ns = vc_now_ns() + 100 * MS;
    CHECK(vc_gate_others_explain(&gate, vc_now_ns()));
    vc_bucket_fill(&usage, T, 500000, 0);
    CHECK(ask(T, MS) == VC_GATE_GO && !vc_gate_is_idle(&gate, T + US));
    start(50, 50, VC_CARD_SHARED); /* without an arbiter nobody knows of other tenants */
    CHECK(vc_gate_others_explain(&gate, vc_now_ns()));
}

/* Siblings had 0.0 of 50 for 5 s, and were charged 100. */
static void test_what_the_card_did_not_do_for_a_stopped_process_is_not_charged(void)
{
    start(50, 50, 0);
    memset(&region_usage, 0, sizeof region_usage);
    struct vc_slot_card *own = &region_usage.slots[0].cards[0];
    own->predicted_finish_ns = T;
    vc_abandoned_open(&region_usage.cards[0], 0);
    CHECK(vc_abandoned_known_until(&region_usage, 0, 0, 0, T + 20 * MS) == 0); /* it is being asked */
    vc_abandoned_excuse(&limits, &region_usage, 0, 0, T + 20 * MS);
    uint64_t until = vc_abandoned_known_until(&region_usage, 0, 0, T + 20 * MS, T + 30 * MS);
    CHECK(until == T + 20 * MS && vc_abandoned_take(&limits, &region_usage, 0, 0, until, false) == 0);
    until = vc_abandoned_known_until(&region_usage, 0, 0, T + 40 * MS, T + 41 * MS); /* found busy then */
    CHECK(vc_abandoned_take(&limits, &region_usage, 0, 0, until, false) == 20 * MS);
    vc_abandoned_excuse(&limits, &region_usage, 0, 0, T + 30 * MS); /* what was charged is not given back */
    CHECK(own->predicted_finish_ns == T + 40 * MS);
    until = vc_abandoned_known_until(&region_usage, 0, 0, T + 40 * MS, T + 140 * MS); /* nobody asks any more */
    CHECK(until == T + 140 * MS && vc_abandoned_take(&limits, &region_usage, 0, 0, until, false) == 100 * MS);
}

int main(void)
{
    test_nobody_is_asked_where_nobody_stands_still();
    test_the_moments_are_spread();
    test_a_free_card_that_has_come_answers_at_once();
    test_a_busy_one_does_not_unless_others_explain_it();
    test_launches_wait_for_it_but_not_for_long();
    test_whoever_has_work_or_whose_siblings_have_tells_nothing();
    test_what_the_card_did_not_do_for_a_stopped_process_is_not_charged();
    return check_failures != 0;
}
