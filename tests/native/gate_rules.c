/* The gate's rules one by one: what is let through, what waits for what, what is settled. */
#include <string.h>

#include "gate/bucket.h"
#include "gate/gate.h"
#include "gate/lane.h"
#include "gate/sample.h"
#include "gate_check.h"
#include "region/abandoned.h"

static struct vc_limits limits;
static struct vc_card_usage usage;
static struct vc_slot_card slot;
static struct vc_gate gate;
static struct vc_gate_answer answer;
static bool opened;
static const uint64_t T = 1000 * MS;
extern uint64_t vc_test_ticks;

static void start(uint32_t cores, uint32_t core_limit, uint32_t flags)
{
    memset(&limits, 0, sizeof limits);
    memset(&usage, 0, sizeof usage);
    memset(&slot, 0, sizeof slot);
    limits.cards[0].cores = cores;
    limits.cards[0].core_limit = core_limit;
    limits.cards[0].flags = flags;
    vc_gate_init(&gate, &limits, &limits.cards[0], &usage, &slot);
}

static void lease(uint64_t now, uint64_t end, uint64_t clock)
{
    limits.arbiter_heartbeat_ns = now;
    limits.cards[0].granted_ppm = limits.cards[0].core_limit * 10000;
    limits.cards[0].lease_sequence = 7;
    limits.cards[0].lease_end_ns = end;
    limits.cards[0].lease_clock_ns = clock;
}

static enum vc_gate_reason ask(uint64_t now, uint64_t cost)
{
    vc_gate_enter(&gate, now, cost, 0, &answer);
    return answer.reason;
}

static void test_who_needs_a_gate(void)
{
    start(100, 100, 0);
    CHECK(!vc_gate_needed(gate.limit));
    start(30, 100, 0);
    CHECK(!vc_gate_needed(gate.limit));
    start(30, 100, VC_CARD_SHARED);
    CHECK(vc_gate_needed(gate.limit));
    start(30, 50, 0);
    CHECK(vc_gate_needed(gate.limit));
    start(100, 50, VC_CARD_WHOLE | VC_CARD_SHARED);
    CHECK(!vc_gate_needed(gate.limit));
}

static void test_the_rate_is_the_guaranteed_one_unless_a_living_arbiter_grants_more(void)
{
    start(30, 50, 0);
    CHECK(vc_gate_policy(&gate, T).rate_ppm == 300000);
    lease(T, UINT64_MAX, 0);
    CHECK(vc_gate_policy(&gate, T + 49 * MS).rate_ppm == 500000);
    CHECK(vc_gate_policy(&gate, T + 51 * MS).rate_ppm == 300000);
    limits.cards[0].granted_ppm = 4000000;
    CHECK(vc_gate_policy(&gate, T).rate_ppm == 500000);
    limits.cards[0].granted_ppm = 1;
    CHECK(vc_gate_policy(&gate, T).rate_ppm == 300000);
    limits.cards[0].granted_ppm = 500000;
    gate.alone = true;
    CHECK(vc_gate_policy(&gate, T).rate_ppm == 300000);
    start(0, 4000, 0); /* an impossible file */
    CHECK(vc_gate_policy(&gate, T).rate_ppm == 10000);
}

static void test_limits_that_make_no_sense_give_the_guaranteed_share(void)
{
    static const uint32_t limits_of[][3] = {{30, 20, 1}, {30, 4000, 1}, {30, 50, 3}, {0, 0, 1}, {101, 101, 1}};
    static const uint32_t rates[] = {300000, 300000, 300000, 10000, 1000000};
    for (unsigned i = 0; i < 5; i++) {
        start(limits_of[i][0], limits_of[i][1], VC_CARD_SHARED);
        limits.cards[0].priority = limits_of[i][2];
        lease(T, UINT64_MAX, 0);
        limits.cards[0].granted_ppm = 1000000;
        CHECK(vc_gate_policy(&gate, T).impossible && vc_gate_policy(&gate, T).rate_ppm == rates[i]);
        CHECK(vc_share_granted_ppm(&limits, &limits.cards[0], T) == rates[i]);
        ask(T, 100 * US);
        CHECK(answer.impossible);
        limits.sequence = 1; /* being changed just now */
        CHECK(!vc_gate_policy(&gate, T).impossible);
    }
    start(30, 50, VC_CARD_SHARED);
    CHECK(!vc_gate_policy(&gate, T).impossible);
    start(30, 4000, 0);
    CHECK(vc_gate_needed(gate.limit)); /* not a whole card */
}

static void test_debt_shuts_the_gate_until_a_chunk_is_there(void)
{
    start(30, 30, 0);
    CHECK(ask(T, 12 * MS) == VC_GATE_GO); /* the bucket is full: one operation may overrun it */
    CHECK(answer.closing);
    CHECK(usage.credit_ns == -(int64_t)(2 * MS));
    CHECK(usage.gpu_ns == 12 * MS && slot.gpu_ns == 12 * MS);
    CHECK(ask(T, 100 * US) == VC_GATE_CREDIT);
    CHECK(answer.refill_ns == 1 * MS);
    CHECK_NEAR(answer.until_ns - T, 10 * MS, 10); /* 3 ms at 30 % */
    CHECK(ask(T + 9 * MS, 100 * US) == VC_GATE_CREDIT);
    CHECK(ask(T + 10 * MS + 10, 100 * US) == VC_GATE_GO);
}

static void test_what_was_launched_before_anybody_asked_is_charged_at_once_and_closes_the_gate(void)
{
    struct vc_lane lane;
    struct vc_lane_step step;
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x54, 1, 1));
    start(10, 10, 0);
    vc_lane_init(&lane, &gate);
    vc_estimate_set(estimate, 20 * MS);
    CHECK(ask(T, 12 * MS) == VC_GATE_GO);
    for (unsigned i = 1; i <= 2; i++) {
        uint64_t at = T + i * 30 * MS;
        vc_lane_launched_unasked(&lane, estimate, at, at + 10 * US, &answer, &step);
        CHECK(usage.gpu_ns == 12 * MS + i * 20 * MS && answer.allowance_ns == 0);
        CHECK(step.mark_after && step.interval.loose && step.interval.from_ns == at && step.interval.estimate_ns == 20 * MS);
        CHECK(ask(at + 25 * MS, 20 * MS) == VC_GATE_CREDIT);
    }
    /* It ran for 5 ms; or not at all, when it turns out to have been captured. */
    step.interval.to_ns = T + 65 * MS;
    vc_gate_seen(&gate, T + 66 * MS, &step.interval);
    CHECK_NEAR(usage.gpu_ns, 12 * MS + 25 * MS, US);
}

static void test_one_unknown_operation_at_a_time_but_no_dead_lock(void)
{
    start(30, 30, 0);
    CHECK(ask(T, 0) == VC_GATE_GO);
    vc_gate_marked(&gate, answer.allowance_ns);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    CHECK(ask(T + MS, 0) == VC_GATE_OUTSTANDING);
    CHECK(ask(T + 60 * MS, 0) == VC_GATE_OUTSTANDING);
    vc_gate_rest(&gate, T + 100 * MS, &opened);          /* the helper looked */
    CHECK(ask(T + 110 * MS, 0) == VC_GATE_GO); /* it may be what the first one waits for */
    CHECK(ask(T + 111 * MS, 0) == VC_GATE_OUTSTANDING);
}

static void test_no_more_is_marked_one_by_one_than_marks_are_kept_for(void)
{
    start(30, 30, 0);
    unsigned launched = 0;
    while (launched < 1000 && ask(T + launched * US, 5 * US) == VC_GATE_GO) {
        vc_gate_fold(&gate, answer.allowance_ns, 0);
        vc_gate_marked(&gate, 0);
        launched++;
    }
    CHECK(launched == VC_UNSEEN_MARKS && answer.reason == VC_GATE_OUTSTANDING);
    struct vc_interval first = {.from_ns = T, .to_ns = T + 5 * US, .estimate_ns = 5 * US, .launched_ns = 5 * US, .operations = 1, .measurable = true};
    vc_gate_seen(&gate, T + 300 * US, &first);
    CHECK(ask(T + 300 * US, 5 * US) == VC_GATE_GO);
}

static void test_what_nobody_looks_at_is_charged_as_time_passes(void)
{
    start(30, 30, 0);
    CHECK(ask(T, 0) == VC_GATE_GO);
    vc_gate_marked(&gate, answer.allowance_ns);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    uint64_t charged = usage.gpu_ns, predicted = gate.finish_ns;
    CHECK(ask(T + 90 * MS, 0) != VC_GATE_CREDIT && usage.gpu_ns == charged); /* somebody may look yet */
    CHECK(ask(predicted + 150 * MS, 0) == VC_GATE_CREDIT);
    CHECK(usage.gpu_ns == charged + 150 * MS && gate.unwatched_ns == 150 * MS);
    CHECK(vc_gate_tell(&gate, predicted + 150 * MS) == charged);
    /* The whole process stood still: its work had ended long before. No account keeps what is given back, nor does it tell that. */
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 5 * MS, .unknown = true, .measurable = true, .operations = 1};
    vc_gate_seen(&gate, predicted + 150 * MS, &interval);
    CHECK(usage.gpu_ns == charged + 5 * MS && gate.own.taken_ns == (int64_t)(charged + 5 * MS));
    CHECK(vc_gate_tell(&gate, predicted + 160 * MS) == charged + 5 * MS);
}

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

/* Ten operations of 500 us at once, as a request that comes from idle: how many go before one has to wait. */
/* When its lease has ended it may be the next one's at any moment. */
static void test_nothing_long_begins_behind_a_lease(void)
{
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 4 * MS, T);
    CHECK(ask(T + 5 * MS, 20 * MS) == VC_GATE_LEASE && answer.refill_ns == VC_NOTHING_FITS);
    CHECK(ask(T + 3 * MS, 20 * MS) == VC_GATE_GO); /* nothing would ever fit */
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 4 * MS, T);
    CHECK(ask(T + 5 * MS, 1 * MS) == VC_GATE_GO); /* the card is not idle while the arbiter is late */
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

static void test_a_permit_is_paid_for_and_the_rest_comes_back(void)
{
    start(30, 30, 0);
    CHECK(ask(T, 10 * US) == VC_GATE_GO);
    CHECK(answer.allowance_ns == 1 * MS);
    CHECK(usage.credit_ns == (int64_t)(10 * MS - 1010 * US));
    vc_gate_fold(&gate, answer.allowance_ns, 400 * US);
    CHECK(usage.credit_ns == (int64_t)(10 * MS - 410 * US));
    CHECK(usage.gpu_ns == 410 * US);
    vc_gate_undo(&gate, 10 * US, 0);
    CHECK(usage.gpu_ns == 400 * US);
}

/* A kernel behind a callback kept everybody at the gate: what one thread gave back was counted as seen before, so more was seen than launched. */
static void test_what_is_given_back_was_not_seen(void)
{
    start(30, 30, 0);
    CHECK(ask(T, 100 * US) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    vc_gate_marked(&gate, 0);
    CHECK(ask(T, 10 * US) == VC_GATE_GO);
    struct vc_interval interval = {.estimate_ns = 10 * US, .launched_ns = vc_gate_marked(&gate, 0)};
    vc_gate_seen(&gate, T + 10 * US, &interval);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    CHECK(ask(T + 20 * US, 10 * US) == VC_GATE_GO);
    CHECK(gate.launched_ns - gate.seen_ns <= 10 * US + answer.allowance_ns);
}

static void test_the_difference_to_the_estimate_is_settled(void)
{
    start(30, 30, 0);
    CHECK(ask(T, 3 * MS) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 5 * MS, .estimate_ns = 3 * MS, .operations = 1, .measurable = true};
    interval.launched_ns = vc_gate_marked(&gate, 0);
    struct vc_settlement settlement = vc_gate_seen(&gate, T + 5 * MS, &interval);
    CHECK(settlement.charged_ns == 5 * MS && settlement.evidence == VC_EVIDENCE_CLEAN);
    CHECK(usage.gpu_ns == 5 * MS && usage.credit_ns == (int64_t)(5 * MS));
    CHECK(gate.finish_ns == T + 5 * MS && gate.unseen == 0);
}

/* Eight threads whose first kernels ran side by side had 92 of 50: the last to be measured had nothing of the time for itself, so it was taken to cost nothing. */
static void test_what_others_paid_for_does_not_make_an_operation_free(void)
{
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x50, 1, 1));
    struct vc_learner learner = {.estimate = estimate};
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 80 * US, .unknown = true, .measurable = true, .joined = true};
    struct vc_settlement nothing = {.evidence = VC_EVIDENCE_UPPER_BOUND};
    vc_lane_learn(&learner, 1, &interval, &nothing);
    CHECK(vc_estimate_cost(estimate) == 80 * US);
    interval.to_ns = T + 400 * US; /* what is known since is not forgotten */
    vc_lane_learn(&learner, 1, &interval, &nothing);
    CHECK(vc_estimate_cost(estimate) == 80 * US);
}

/* How many of an operation the lane launches at once, a launch taking 4 us, while nothing is seen to end. */
static unsigned launches_unseen(struct vc_lane *lane, struct vc_estimate *estimate, uint64_t now, uint64_t until)
{
    unsigned launched = 0;
    uint64_t expected = UINT64_MAX; /* the first end mark */
    for (; now < until; now += 4000) {
        struct vc_lane_step step;
        vc_test_ticks = now;
        if (expected < now)
            vc_gate_overdue(&gate, now, expected, true);
        if (!vc_lane_pass(lane, estimate)) {
            vc_lane_ask(lane, estimate, now, now, &answer, &step);
            if (answer.reason != VC_GATE_GO)
                continue;
            if (step.mark_before)
                vc_lane_opened(lane, true);
            vc_lane_launched(lane, estimate, &answer, &step);
            if (step.mark_after && expected == UINT64_MAX)
                expected = gate.finish_ns;
        }
        launched++;
    }
    return launched;
}

/* A kernel is measured with a small argument and then launched with a large one: what was seen once is no proof. */
static void test_few_pass_until_an_estimate_is_proven_or_when_it_is_refuted(void)
{
    start(90, 90, 0);
    struct vc_lane lane;
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x51, 1, 1));
    vc_ticks_of_ns(0, T - 10 * MS, T - 10 * MS);
    vc_lane_init(&lane, &gate);
    vc_estimate_set(estimate, 3000);
    CHECK(launches_unseen(&lane, estimate, T, T + 20 * MS) <= 11);
    for (unsigned i = 0; i < VC_PROVEN_TIMES; i++)
        vc_estimate_learn(estimate, 3000, 3000, 3000, VC_EVIDENCE_CLEAN);
    start(90, 90, 0);
    vc_lane_init(&lane, &gate);
    unsigned launched = launches_unseen(&lane, estimate, T + 100 * MS, T + 120 * MS);
    CHECK(launched > 100 && launched < 1000); /* within 1 ms one is marked, and 1 ms later that is overdue */
}

/* The stream is idle between any two launches, and nothing is measured: asking each time would cost the host what the launches take. */
static void test_a_host_that_launches_slowly_asks_for_permits_not_for_launches(void)
{
    start(90, 90, 0);
    struct vc_lane lane;
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x52, 1, 1));
    vc_lane_init(&lane, &gate);
    vc_estimate_set(estimate, 5 * US);
    for (unsigned i = 0; i < VC_PROVEN_TIMES; i++)
        vc_estimate_learn(estimate, 5 * US, 5 * US, 5 * US, VC_EVIDENCE_CLEAN);
    unsigned asked = 0;
    for (uint64_t now = T + 200 * MS; now < T + 220 * MS; now += 40 * US) {
        struct vc_lane_step step;
        vc_test_ticks = now;
        if (vc_lane_pass(&lane, estimate))
            continue;
        asked++;
        vc_lane_ask(&lane, estimate, now, now, &answer, &step);
        CHECK(answer.reason == VC_GATE_GO);
        if (step.mark_before)
            vc_lane_opened(&lane, true);
        vc_lane_launched(&lane, estimate, &answer, &step);
        if (step.mark_after) {
            step.interval.from_ns = now;
            step.interval.to_ns = now + 5 * US;
            vc_gate_seen(&gate, now + 10 * US, &step.interval);
        }
    }
    CHECK(asked >= 15 && asked < 60); /* of 500: one for each millisecond, some more around a measurement */
}

/* What the lane launches on a stream that does something else for 400 us before each kernel of 100 us, with the marks that it asks for; `told`: it is told of
 * that. Returns what is charged for it. */
static uint64_t charged_behind_something_else(bool told)
{
    enum { ROUNDS = 20 };
    struct vc_lane lane;
    struct vc_lane_step step, steps[2 * ROUNDS];
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x53, 1, 1));
    uint64_t now = T + 300 * MS, card = now, opened = 0;
    unsigned ends = 0;
    start(90, 90, 0);
    vc_lane_init(&lane, &gate);
    vc_estimate_set(estimate, 100 * US);
    for (unsigned i = 0; i < VC_PROVEN_TIMES; i++)
        vc_estimate_learn(estimate, 100 * US, 100 * US, 100 * US, VC_EVIDENCE_CLEAN);
    for (unsigned i = 0; i < ROUNDS; i++, now += 10 * US) {
        if (told && vc_lane_elsewhere(&lane, false, &step)) {
            step.interval.from_ns = step.interval.loose ? step.interval.from_ns : opened;
            step.interval.to_ns = card;
            steps[ends++] = step;
        }
        card += 400 * US;
        vc_test_ticks = now;
        vc_lane_ask(&lane, estimate, now, now, &answer, &step);
        CHECK(answer.reason == VC_GATE_GO && (!told || step.mark_before));
        if (step.mark_before) {
            opened = card;
            vc_lane_opened(&lane, true);
        }
        vc_lane_launched(&lane, estimate, &answer, &step);
        card += 100 * US;
        if (step.mark_after) {
            step.interval.from_ns = step.interval.loose ? step.interval.from_ns : opened;
            step.interval.to_ns = opened = card;
            steps[ends++] = step;
        }
    }
    for (unsigned i = 0; i < ends; i++)
        vc_gate_seen(&gate, card, &steps[i].interval);
    vc_lane_fold(&lane);
    return usage.gpu_ns;
}

static void test_what_is_not_the_cards_work_is_no_part_of_what_is_charged(void)
{
    CHECK(charged_behind_something_else(false) > 5 * MS);
    CHECK_NEAR(charged_behind_something_else(true), 2 * MS, 100 * US);
}

/* Where all should have been done nobody can tell from when on the card is idle, if what came first may take any time. */
static void test_what_waits_behind_something_else_begins_when_its_mark_is_reached(void)
{
    start(90, 90, 0);
    struct vc_lane lane;
    struct vc_lane_step step;
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x54, 1, 1));
    uint64_t now = T + 400 * MS;
    vc_lane_init(&lane, &gate);
    vc_estimate_set(estimate, 600 * US);
    vc_lane_elsewhere(&lane, true, &step);
    vc_lane_ask(&lane, estimate, now, now, &answer, &step);
    CHECK(step.mark_before && !vc_lane_has_unmarked(&lane));
    vc_lane_opened(&lane, true);
    vc_lane_launched(&lane, estimate, &answer, &step);
    uint64_t marked = gate.unseen;
    if (!step.mark_after)
        CHECK(vc_lane_elsewhere(&lane, false, &step) && gate.unseen == marked + 1);
    CHECK(!vc_lane_has_unmarked(&lane));
    uint64_t finish = gate.finish_ns;
    vc_gate_not_begun(&gate, now + MS, false);
    CHECK(gate.finish_ns == finish);
    vc_gate_not_begun(&gate, now + 100 * MS, false); /* it stands still for nobody, and is not thought to be busy */
    CHECK(gate.finish_ns > now + 90 * MS && gate.finish_ns < now + 100 * MS);
    /* Who waited for the card, and for what came before, did not have the card for so long. */
    vc_lane_elsewhere(&lane, true, &step);
    uint64_t before = usage.gpu_ns;
    lane.unmarked_since_ns = now;
    vc_lane_waited(&lane, now, now + 50 * MS, true);
    CHECK(usage.gpu_ns == before);
    lane.unmarked_since_ns = now;
    vc_lane_waited(&lane, now, now + 50 * MS, false); /* what it waited for another thread may have put on its stream, or it was another's */
    CHECK(usage.gpu_ns == before);
    lane.unmarked_since_ns = now;
    vc_lane_waited(&lane, now, now + 50 * MS, true);
    CHECK(usage.gpu_ns > before + 40 * MS);
}

/* Others' slices lie as densely in what another stream's interval has paid for already, and were taken off there. */
static void test_others_parts_are_taken_off_once(void)
{
    for (unsigned streams = 1; streams <= 8; streams++) {
        struct vc_busy busy = {0};
        uint64_t charged = 0;
        for (unsigned i = 0; i < streams; i++) {
            struct vc_interval interval = {.from_ns = T, .to_ns = T + (10 + i) * MS, .estimate_ns = 20 * US, .others_gpu_ns = (10 + i) * MS / 2, .risk_ns = 2 * MS,
                                           .operations = 1, .measurable = true};
            charged += vc_interval_settle(&busy, &interval, true, false).charged_ns;
        }
        CHECK(charged > (9 + streams) * MS / 2 - 100 * US && charged < (9 + streams) * MS / 2 + 100 * US);
    }
}

/* 0.5 ms, or 1.9 at a lease's end, by its argument: less than four times, so its mean was charged for what ran on into others' leases (42 points of 30). */
static void test_what_surely_varies_by_less_is_measured_too(void)
{
    static const struct {
        uint64_t shorter, longer;
        enum vc_evidence evidence;
        bool varies;
    } cases[] = {
        {500 * US, 1900 * US, VC_EVIDENCE_CLEAN, true},         {500 * US, 1500 * US, VC_EVIDENCE_CLEAN, true},
        {500 * US, 1200 * US, VC_EVIDENCE_CLEAN, false},        {500 * US, 1900 * US, VC_EVIDENCE_LONG_OVERLAP, false},
        {500 * US, 1900 * US, VC_EVIDENCE_UPPER_BOUND, false},  {150 * US, 450 * US, VC_EVIDENCE_CLEAN, false},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x7000 + i, 1, 1));
        vc_estimate_set(estimate, cases[i].shorter);
        for (unsigned n = 0; n < 10; n++)
            vc_estimate_learn(estimate, cases[i].shorter, cases[i].shorter, cases[i].shorter, VC_EVIDENCE_CLEAN);
        CHECK(vc_estimate_risk(estimate) == 0);
        vc_estimate_learn(estimate, cases[i].shorter, cases[i].longer, cases[i].shorter, cases[i].evidence);
        CHECK((vc_estimate_risk(estimate) != 0) == cases[i].varies);
    }
}

/* A cost that varies is none where others' slices are inside: that was a way to be charged 64 of 1,417 ms. Where they need not be inside each interval, and it comes near enough to the mean, that is charged. */
static void test_what_varies_is_charged_by_its_time(void)
{
    for (unsigned each = 0; each < 4; each++) {
        bool behind = each & 1, beside = each & 2;
        struct vc_busy busy = {0};
        struct vc_interval interval = {.from_ns = T, .to_ns = T + 2 * MS, .estimate_ns = 300 * US, .others_gpu_ns = MS, .risk_ns = 2 * MS,
                                       .operations = 1, .measurable = true, .behind = behind}, near = interval, steady = interval;
        near.from_ns = steady.from_ns = T + 10 * MS;
        near.to_ns = steady.to_ns = T + 12 * MS;
        near.estimate_ns = 800 * US;
        interval.estimate_ns = 50 * US;
        steady.risk_ns = 0;
        CHECK(vc_interval_settle(&busy, &interval, true, beside).charged_ns == MS);
        struct vc_busy apart = {0};
        CHECK(vc_interval_settle(&busy, &near, true, beside).charged_ns == (each ? MS : 800 * US));
        CHECK(vc_interval_settle(&apart, &steady, true, beside).charged_ns == 300 * US);
    }
    /* Within a lease of one's own, while others' work may begin: a proven 20 us that takes 1.9 ms was none of theirs, a few of theirs may be. */
    for (unsigned ms = 0; ms < 2; ms++) {
        struct vc_busy busy = {0};
        struct vc_interval interval = {.from_ns = T, .to_ns = T + 1900 * US, .estimate_ns = ms ? MS : 20 * US, .operations = 1, .measurable = true, .unclear = true};
        struct vc_settlement settlement = vc_interval_settle(&busy, &interval, true, true);
        CHECK(settlement.charged_ns == (ms ? MS : 1900 * US));
        CHECK(settlement.evidence == (ms ? VC_EVIDENCE_UPPER_BOUND : VC_EVIDENCE_LONG_OVERLAP));
    }
}

/* Marked long after its end, when its thread sleeps: it pays for what it is thought to cost and covers no more, or another stream would have the rest for nothing. */
static void test_a_pause_behind_work_covers_nothing(void)
{
    for (unsigned later = 0; later < 2; later++) {
        struct vc_busy busy = {0};
        struct vc_interval paused = {.from_ns = T, .to_ns = T + 1400 * US, .estimate_ns = 800 * US, .operations = 16, .measurable = true, .host_bound = true,
                                     .paused = true, .joined = true};
        struct vc_interval other = {.from_ns = T + 600 * US, .to_ns = T + 1400 * US, .estimate_ns = 800 * US, .operations = 16, .measurable = true, .joined = true};
        uint64_t charged = later ? 0 : vc_interval_settle(&busy, &paused, false, false).charged_ns;
        charged += vc_interval_settle(&busy, &other, false, false).charged_ns;
        charged += later ? vc_interval_settle(&busy, &paused, false, false).charged_ns : 0;
        CHECK(charged == 1400 * US);
    }
}

/* What siblings are charged when they launch may run before or behind it: kernels of 20 ms in turns had 60 of 50. */
static void test_what_siblings_launched_takes_nothing_from_what_was_learnt(void)
{
    static const struct {
        uint64_t lasted, siblings, charged, risk;
    } cases[] = {{20 * MS, 12 * MS, 20 * MS, 0}, {40 * MS, 20 * MS, 20 * MS, 0}, {40 * MS, 30 * MS, 20 * MS, 0}, {60 * MS, 30 * MS, 30 * MS, 0}, {16 * MS, 12 * MS, 16 * MS, 0},
                 {20 * MS, 12 * MS, 20 * MS, 100 * MS}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vc_busy busy = {0};
        struct vc_interval interval = {.from_ns = T, .to_ns = T + cases[i].lasted, .estimate_ns = 20 * MS, .others_gpu_ns = cases[i].siblings, .risk_ns = cases[i].risk,
                                       .operations = 1, .measurable = true, .siblings = true};
        CHECK(vc_interval_settle(&busy, &interval, true, false).charged_ns == cases[i].charged);
    }
}

/* A stream's kernel ends while another's is being launched: the 15 us until then were covered by the launch, which did not pay for them (48 threads had 52.6 of 50). */
static void test_a_launch_that_takes_long_does_not_cover_anothers_work(void)
{
    for (int progress = 0; progress < 2; progress++) {
        struct vc_interval other = {.from_ns = T - 85 * US, .to_ns = T + 15 * US, .estimate_ns = 100 * US, .measurable = true, .operations = 1};
        struct vc_interval launch = {.from_ns = T, .to_ns = T + 115 * US, .slack_ns = 15 * US, .estimate_ns = 100 * US, .measurable = true, .operations = 1};
        start(50, 50, 0);
        usage.gpu_ns = 0;
        if (progress) {
            vc_gate_progress(&gate, T + 110 * US, &launch);
            launch.from_ns = T; /* is placed anew once its end is known … */
            launch.slack_ns = 15 * US;
        }
        vc_gate_seen(&gate, T + MS, &launch);
        vc_gate_seen(&gate, T + MS, &other);
        CHECK((int64_t)usage.gpu_ns == 0); /* … and both took what they were thought to, which was charged before */
    }
}

static void test_overlapped_work_is_charged_fairly(void)
{
    start(30, 30, VC_CARD_SHARED);
    lease(T, T + 8 * MS, T);
    limits.cards[0].others_active_ns = T + 5 * MS;
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 3 * MS, .estimate_ns = 1 * MS, .operations = 1, .measurable = true,
                                   .sequence = 6};
    struct vc_settlement settlement = vc_gate_seen(&gate, T + 5 * MS, &interval);
    CHECK(settlement.charged_ns == 1 * MS && settlement.evidence == VC_EVIDENCE_UPPER_BOUND); /* short: its estimate */
    interval = (struct vc_interval){.from_ns = T + 3 * MS, .to_ns = T + 13 * MS, .estimate_ns = 6 * MS, .operations = 1,
                                    .measurable = true, .sequence = 6, .others_gpu_ns = 4 * MS};
    limits.cards[0].others_active_ns = T + 12 * MS;
    settlement = vc_gate_seen(&gate, T + 13 * MS, &interval);
    CHECK(settlement.charged_ns == 6 * MS && settlement.evidence == VC_EVIDENCE_LONG_OVERLAP); /* long: less the others' part */
    interval = (struct vc_interval){.from_ns = T + 13 * MS, .to_ns = T + 16 * MS, .estimate_ns = 1 * MS, .operations = 1,
                                    .measurable = true, .sequence = 7};
    limits.cards[0].others_active_ns = T + 16 * MS;
    settlement = vc_gate_seen(&gate, T + 16 * MS, &interval);
    CHECK(settlement.charged_ns == 3 * MS && settlement.evidence == VC_EVIDENCE_CLEAN); /* all within our own lease */
}

static void test_other_processes_of_the_container_count_as_others(void)
{
    start(30, 30, 0);
    struct vc_gate other;
    struct vc_slot_card other_slot = {0};
    vc_gate_init(&other, &limits, &limits.cards[0], &usage, &other_slot);
    struct vc_gate_others before = vc_gate_others(&gate), own = vc_gate_others(&other), after;
    vc_gate_enter(&other, T, 3 * MS, 0, &answer);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    after = vc_gate_others(&gate);
    CHECK(vc_gate_others_ns(&gate, T, &before, &after) == 3 * MS);
    CHECK(vc_gate_others_ns(&gate, T, &after, &before) == 0); /* a refund */
    after = vc_gate_others(&other);
    CHECK(vc_gate_others_ns(&other, T, &own, &after) == 0);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 9 * MS, .estimate_ns = 5 * MS, .operations = 1, .measurable = true,
                                   .others_gpu_ns = 3 * MS};
    CHECK(vc_gate_seen(&gate, T + 9 * MS, &interval).charged_ns == 6 * MS);
    interval = (struct vc_interval){.from_ns = T + 9 * MS, .to_ns = T + 13 * MS, .estimate_ns = 1 * MS, .operations = 1,
                                    .measurable = true, .others_gpu_ns = 3 * MS};
    CHECK(vc_gate_seen(&gate, T + 13 * MS, &interval).charged_ns == 1 * MS);
    /* What is not proven is charged what is left of the wall time, whatever its estimate says. */
    interval = (struct vc_interval){.from_ns = T + 13 * MS, .to_ns = T + 15 * MS, .estimate_ns = US, .operations = 1, .risk_ns = VC_UNPROVEN_NS,
                                    .measurable = true, .others_gpu_ns = 1 * MS};
    CHECK(vc_gate_seen(&gate, T + 15 * MS, &interval).charged_ns == 1 * MS);
}

static void test_streams_side_by_side_pay_common_time_once(void)
{
    start(30, 30, 0);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 4 * MS, .estimate_ns = 2 * MS, .operations = 1, .measurable = true};
    CHECK(vc_gate_seen(&gate, T + 4 * MS, &interval).charged_ns == 4 * MS);
    interval = (struct vc_interval){.from_ns = T + 2 * MS, .to_ns = T + 6 * MS, .estimate_ns = 2 * MS, .operations = 1, .measurable = true};
    CHECK(vc_gate_seen(&gate, T + 6 * MS, &interval).charged_ns == 2 * MS);
    /* Nobody knows when work without a mark before it began: it takes no more than its estimate from what runs beside it. */
    interval = (struct vc_interval){.from_ns = T + 6 * MS, .to_ns = T + 7 * MS, .estimate_ns = MS / 10, .operations = 1, .loose = true,
                                    .measurable = true};
    CHECK(vc_gate_seen(&gate, T + 7 * MS, &interval).charged_ns == MS / 10);
    interval = (struct vc_interval){.from_ns = T + 6 * MS, .to_ns = T + 7 * MS, .estimate_ns = MS, .operations = 1, .measurable = true};
    CHECK(vc_gate_seen(&gate, T + 7 * MS, &interval).charged_ns == MS - MS / 10);
}

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

static void test_a_call_that_is_held_up_hides_nothing_of_what_it_launched(void)
{
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 5 * MS, .slack_ns = 3 * MS, .unknown = true, .measurable = true, .operations = 1};
    start(50, 50, 0);
    CHECK(ask(T, 0) == VC_GATE_GO);
    CHECK(vc_gate_seen(&gate, T + 6 * MS, &interval).charged_ns == 5 * MS);
}

/* … on a card that may cut no kernel: what it waits for is not the work of its own before it. */
static void test_work_waits_since_its_own_before_it_ended(void)
{
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 3 * MS, .estimate_ns = MS, .measurable = true, .operations = 1};
    start(50, 50, 0);
    CHECK(ask(T, MS) == VC_GATE_GO);
    vc_gate_waits(&gate, T + MS);
    CHECK(usage.began_ns == (VC_NOT_BEGUN | (T + MS)));
    vc_gate_seen(&gate, T + 4 * MS, &interval);
    vc_gate_waits(&gate, T + MS);
    CHECK(usage.began_ns == (VC_NOT_BEGUN | (T + 3 * MS)));
}

/* Two processes of a container; `one` has launched something of unknown cost. */
static struct vc_usage region_usage;
static struct vc_gate one, other;

static uint64_t settle_for(uint64_t now, bool gone)
{
    uint64_t due = vc_abandoned_take(&limits, &region_usage, 0, 0, now, gone);
    vc_gate_owe(&other, due, gone ? due : 0);
    return due;
}

static void start_two(void)
{
    struct vc_gate *gates[] = {&one, &other};
    start(50, 50, 0);
    memset(&region_usage, 0, sizeof region_usage);
    for (uint32_t i = 0; i < 2; i++) {
        vc_gate_init(gates[i], &limits, &limits.cards[0], &region_usage.cards[0], &region_usage.slots[i].cards[0]);
        gates[i]->turns = (struct vc_turns){&region_usage.cards[0], region_usage.slots, &region_usage.slot_high_water, 0, i, 0};
        gates[i]->paid = &region_usage.paid[0];
        gates[i]->watched = true;
    }
    vc_bucket_fill(one.usage, T, 500000, 0);
    vc_gate_enter(&one, T, 0, 0, &answer);
    CHECK(answer.reason == VC_GATE_GO && answer.opened);
    vc_gate_marked(&one, answer.allowance_ns);
    vc_gate_fold(&one, answer.allowance_ns, 0);
}

static void test_what_a_stopped_process_has_on_the_card_is_charged_and_settled_when_it_runs_again(void)
{
    start_two();
    uint64_t before = one.usage->gpu_ns;
    CHECK_NEAR(settle_for(T + 50 * MS, false), 50 * MS, 10 * US);
    CHECK(settle_for(T + 50 * MS, false) == 0); /* once */
    CHECK_NEAR(settle_for(T + 80 * MS, false), 30 * MS, 10 * US);
    CHECK_NEAR(one.usage->gpu_ns - before, 80 * MS, 10 * US);
    /* It ran for 20 ms, as its marks tell when somebody looks. */
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 20 * MS, .unknown = true, .measurable = true, .operations = 1};
    vc_gate_seen(&one, T + 100 * MS, &interval);
    CHECK_NEAR(one.usage->gpu_ns - before, 20 * MS, 10 * US);
    CHECK(!vc_abandoned_is_open(one.usage, 0));
    CHECK(settle_for(T + 200 * MS, false) == 0);
}

/* Or whoever is let run for a moment at a time pays a fifth of what it had. */
static void test_what_siblings_are_charged_for_a_stopped_process_is_not_theirs(void)
{
    start_two();
    struct vc_gate_others before = vc_gate_others(&one), after;
    settle_for(T + 50 * MS, false);
    after = vc_gate_others(&one);
    CHECK(vc_gate_others_ns(&one, T + 50 * MS, &before, &after) == 0);
    vc_gate_enter(&other, T + 200 * MS, 3 * MS, 0, &answer);
    CHECK(answer.reason == VC_GATE_GO);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    after = vc_gate_others(&one);
    CHECK(vc_gate_others_ns(&one, T + 200 * MS, &before, &after) == 3 * MS);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 50 * MS, .unknown = true, .measurable = true, .operations = 1};
    vc_gate_seen(&one, T + 200 * MS, &interval);
    after = vc_gate_others(&one);
    CHECK(vc_gate_others_ns(&one, T + 200 * MS, &before, &after) == 3 * MS);
}

/* Nor what they were charged after its work had ended, which it could not see. */
static void test_who_sees_late_that_its_work_ended_has_siblings_parts_by_the_time(void)
{
    struct vc_gate_others from = {MS, 5 * MS}, now = {2 * MS, 25 * MS};
    struct vc_gate_others at = vc_others_at(&from, T, &now, T + 50 * MS, T + 5 * MS);
    CHECK(at.siblings_ns == 7 * MS && at.tenants_ns == MS + MS / 10);
    at = vc_others_at(&from, T, &now, T + 10 * MS, T + 5 * MS); /* others' parts ended with what was predicted */
    CHECK(at.siblings_ns == 15 * MS && at.tenants_ns == 2 * MS);
    at = vc_others_at(&from, T, &now, T + 7 * MS, T + 5 * MS); /* as late as a helper may be */
    CHECK(at.siblings_ns == 25 * MS);
    at = vc_others_at(&now, T, &from, T + 50 * MS, T + 5 * MS); /* a refund */
    CHECK(at.siblings_ns == 5 * MS && at.tenants_ns == MS);
}

static void test_nobody_waits_for_ever_for_a_stopped_process(void)
{
    start_two();
    uint64_t due = 0;
    for (unsigned i = 1; i <= 1000; i++)
        due += settle_for(T + i * 10 * MS, false);
    CHECK(due == VC_ABANDONED_MOST_NS);
}

static void test_what_a_dead_process_had_on_the_card_is_charged_until_it_was_last_alive(void)
{
    start_two();
    limits.arbiter_heartbeat_ns = T + 300 * MS;
    limits.cards[0].alive_ns = T + 30 * MS;
    CHECK_NEAR(settle_for(T + 300 * MS, true), 30 * MS, 10 * US);
    CHECK(!vc_abandoned_is_open(one.usage, 0) && settle_for(T + 300 * MS, true) == 0);
    start_two(); /* without an arbiter nobody knows */
    limits.arbiter_heartbeat_ns = 0;
    CHECK_NEAR(settle_for(T + 5000 * MS, true), VC_ABANDONED_UNKNOWN_NS, 10 * US);
}

/* The arbiter tells of each process when it ended; siblings live on. */
static void test_a_dead_process_is_not_charged_for_as_long_as_its_siblings_live(void)
{
    start_two();
    limits.arbiter_heartbeat_ns = limits.cards[0].alive_ns = T + 300 * MS;
    region_usage.slots[0].claimed_ns = T - MS;
    limits.ended_ns[0] = T + 5 * MS;
    CHECK_NEAR(settle_for(T + 300 * MS, true), 5 * MS, 10 * US);
    start_two();
    limits.arbiter_heartbeat_ns = limits.cards[0].alive_ns = T + 300 * MS;
    region_usage.slots[0].claimed_ns = T - MS;
    limits.ended_ns[0] = T - 2 * MS; /* that was the one before it in its slot */
    CHECK_NEAR(settle_for(T + 300 * MS, true), 300 * MS, 10 * US);
}

/* They had the card in turns: three that were stopped side by side were charged 26.6 of the 10 that they had. */
static void test_what_several_left_at_the_same_time_is_charged_once(void)
{
    start_two();
    vc_gate_enter(&other, T + 5 * MS, 0, 0, &answer);
    CHECK(answer.reason == VC_GATE_GO && answer.opened);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    CHECK_NEAR(settle_for(T + 50 * MS, false), 50 * MS, 10 * US);
    CHECK(vc_abandoned_take(&limits, &region_usage, 0, 1, T + 50 * MS, false) == 0);
    CHECK_NEAR(vc_abandoned_take(&limits, &region_usage, 0, 1, T + 60 * MS, false), 10 * MS, 10 * US);
    CHECK_NEAR(settle_for(T + 65 * MS, false), 5 * MS, 10 * US);
    start_two(); /* what began earlier is found later */
    vc_gate_enter(&other, T + 20 * MS, 0, 0, &answer);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    CHECK_NEAR(vc_abandoned_take(&limits, &region_usage, 0, 1, T + 40 * MS, false), 20 * MS, 10 * US);
    CHECK_NEAR(settle_for(T + 50 * MS, false), 30 * MS, 10 * US);
    start_two(); /* … and long after that: nothing in common */
    CHECK_NEAR(settle_for(T + 10 * MS, false), 10 * MS, 10 * US);
    vc_gate_enter(&other, T + 100 * MS, 0, 0, &answer);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    CHECK_NEAR(vc_abandoned_take(&limits, &region_usage, 0, 1, T + 120 * MS, false), 20 * MS, 10 * US);
}

static uint64_t left_by_one(uint64_t ended, uint64_t now)
{
    limits.arbiter_heartbeat_ns = now;
    region_usage.slots[0].claimed_ns = T - MS;
    limits.ended_ns[0] = ended;
    return settle_for(now, true);
}

/* It is known late of who ended, and others had begun behind it by then: children that end 1.5 ms after a launch were charged 50 for 40. */
static void test_what_others_were_charged_before_the_latest_is_not_forgotten(void)
{
    start_two();
    vc_abandoned_cover(other.paid, T + MS, T + 5 * MS);
    for (unsigned i = 1; i <= 10; i++)
        vc_abandoned_cover(other.paid, T + i * 10 * MS, T + i * 10 * MS + MS);
    CHECK_NEAR(left_by_one(T + 6 * MS, T + 120 * MS), 2 * MS, 10 * US);
    CHECK(vc_abandoned_cover(other.paid, T + 10 * US, T + 6 * MS) == 0);
    CHECK(vc_abandoned_cover(other.paid, T + 8 * MS, T + 32 * MS) == 21 * MS);
}

/* What it was predicted to take from its helper's latest look on nobody had paid. */
static void test_who_ends_between_two_looks_leaves_what_passed_since_the_first(void)
{
    start_two();
    vc_gate_progress(&one, T + 2 * MS, &(struct vc_interval){.from_ns = T, .unknown = true});
    vc_gate_overdue(&one, T + 2 * MS, T, true);
    CHECK_NEAR(left_by_one(T + 2 * MS + 150 * US, T + 20 * MS), 150 * US, US);
    start_two();
    vc_gate_progress(&one, T + 2 * MS, &(struct vc_interval){.from_ns = T, .unknown = true});
    vc_gate_overdue(&one, T + 2 * MS, T, true);
    vc_gate_overdue(&one, T + 2 * MS + 50 * US, T, true);
    CHECK_NEAR(left_by_one(T + 3 * MS, T + 20 * MS), 950 * US, US);
}

/* They had it before. */
static void test_what_the_dead_left_is_no_part_of_what_lives(void)
{
    start_two();
    struct vc_gate_others before = vc_gate_others(&other), after;
    CHECK_NEAR(left_by_one(T + 5 * MS, T + 50 * MS), 5 * MS, 10 * US);
    after = vc_gate_others(&other);
    CHECK(vc_gate_others_ns(&other, T + 50 * MS, &before, &after) == 0);
}

/* Its thread was held up between the gate and the driver, and the helper found nothing under way. */
static void test_who_launches_long_after_it_was_let_in_has_work_on_the_card(void)
{
    start_two();
    vc_gate_enter(&other, T, 0, 0, &answer);
    CHECK(answer.reason == VC_GATE_GO && answer.opened);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    vc_gate_rest(&other, T + 10 * MS, &opened);
    CHECK(!opened && !vc_abandoned_is_open(other.usage, 1));
    vc_gate_marked(&other, 0);
    vc_gate_rest(&other, T + 11 * MS, &opened);
    CHECK(opened && vc_abandoned_is_open(other.usage, 1));
    CHECK(vc_abandoned_take(&limits, &region_usage, 0, 1, T + 30 * MS, false) != 0);
}

/* Its helper knew that it was overdue, and not since when it ran: what passed was nobody's (61 of 50). */
static void test_who_ends_before_what_is_overdue_was_charged_leaves_that(void)
{
    start_two();
    vc_gate_enter(&other, T, MS, 0, &answer);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    vc_gate_marked(&other, 0);
    uint64_t expected = other.finish_ns;
    for (uint64_t now = expected + 100 * US; now <= expected + MS; now += 100 * US)
        vc_gate_overdue(&other, now, expected, false);
    CHECK(other.usage->predicted_finish_ns > expected + MS);
    CHECK_NEAR(vc_abandoned_take(&limits, &region_usage, 0, 1, expected + 20 * MS, false), 20 * MS, US);
    start_two();
    vc_gate_enter(&other, T, MS, 0, &answer);
    vc_gate_fold(&other, answer.allowance_ns, 0);
    vc_gate_marked(&other, 0);
    vc_gate_overdue(&other, expected + 10 * US, expected, false);
    vc_gate_progress(&other, expected + 2 * MS, &(struct vc_interval){.from_ns = T, .estimate_ns = MS, .loose = true}); /* from now on */
    vc_gate_overdue(&other, expected + 2 * MS, expected, true);
    CHECK(region_usage.slots[1].cards[0].predicted_finish_ns > expected + 2 * MS);
}

/* It takes a while to end, and has nothing on the card meanwhile. */
static void test_who_waited_for_its_work_leaves_none(void)
{
    start_two();
    vc_gate_idle(&one, T + MS); /* but what was not known was not charged yet */
    CHECK_NEAR(settle_for(T + 20 * MS, false), 20 * MS, 10 * US);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + MS, .unknown = true, .measurable = true, .operations = 1};
    vc_gate_seen(&one, T + 20 * MS, &interval);
    vc_gate_enter(&one, T + 30 * MS, MS, 0, &answer);
    CHECK(answer.reason == VC_GATE_GO);
    vc_gate_marked(&one, answer.allowance_ns);
    vc_gate_fold(&one, answer.allowance_ns, 0);
    vc_gate_idle(&one, T + 32 * MS);
    CHECK(settle_for(T + 45 * MS, false) == 0 && settle_for(T + 50 * MS, true) == 0);
    vc_gate_overruns(&one, T + 60 * MS, &(struct vc_interval){.from_ns = T + 59 * MS}); /* it has after all: another thread's */
    vc_abandoned_open(one.usage, 0);
    CHECK(settle_for(T + 80 * MS, false) > 19 * MS);
}

static void test_others_part_of_abandoned_work_is_not_the_containers(void)
{
    start_two(); /* it ended long before somebody looks, while a sibling goes on */
    limits.arbiter_heartbeat_ns = limits.cards[0].alive_ns = T + 100 * MS;
    region_usage.slots[0].claimed_ns = T - MS;
    limits.ended_ns[0] = T + 20 * MS;
    vc_abandoned_open(other.usage, 1);
    limits.cards[0].others_gpu_ns += 50 * MS;
    CHECK_NEAR(settle_for(T + 100 * MS, true), 10 * MS, 10 * US);
    start_two();
    limits.cards[0].others_gpu_ns += 20 * MS;
    CHECK_NEAR(settle_for(T + 50 * MS, false), 30 * MS, 10 * US);
    limits.cards[0].others_gpu_ns += 1000 * MS; /* more than there was time */
    CHECK_NEAR(settle_for(T + 100 * MS, false), 10 * MS, 10 * US);
}

static void test_a_process_that_rests_has_nothing_on_the_card(void)
{
    start_two();
    CHECK(vc_gate_rest(&one, T + 50 * MS, &opened) == UINT64_MAX && vc_abandoned_is_open(one.usage, 0)); /* its mark was not seen */
    struct vc_interval interval = {.from_ns = T, .to_ns = T + MS, .unknown = true, .measurable = true, .operations = 1};
    vc_gate_seen(&one, T + MS, &interval);
    CHECK(vc_abandoned_is_open(one.usage, 0));
    CHECK(vc_gate_rest(&one, T + 2 * MS, &opened) > T + 2 * MS && vc_abandoned_is_open(one.usage, 0));
    CHECK(vc_gate_rest(&one, T + 4 * MS, &opened) == UINT64_MAX && !vc_abandoned_is_open(one.usage, 0));
}

static void test_whom_the_arbiter_closed_nothing_passes_whatever_its_credit(void)
{
    start(50, 50, 0);
    usage.credit_ns = INT64_MAX;
    limits.arbiter_heartbeat_ns = T;
    limits.cards[0].closed_until_ns = T + 5 * MS;
    CHECK(ask(T, 100 * US) == VC_GATE_CREDIT && answer.until_ns == T + 5 * MS);
    CHECK(ask(T + 5 * MS, 100 * US) == VC_GATE_GO);
    limits.cards[0].closed_until_ns = UINT64_MAX;
    CHECK(ask(T + 6 * MS, 100 * US) == VC_GATE_CREDIT);
    CHECK(ask(T + VC_HEARTBEAT_LIMIT_NS, 100 * US) == VC_GATE_GO); /* one that is dead is not obeyed */
}

/* An estimate of a second that turns out to be a millisecond was never told; what lasts is told as it lasts. */
static void test_what_is_told_is_what_can_have_been_done(void)
{
    start(50, 50, 0);
    usage.credit_ns = 10 * MS;
    CHECK(vc_gate_tell(&gate, T) == 0);
    CHECK(ask(T, 1000 * MS) == VC_GATE_GO);
    CHECK(vc_gate_tell(&gate, T + MS) == MS);
    vc_gate_marked(&gate, 0);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 2 * MS, .estimate_ns = 1000 * MS, .launched_ns = gate.launched_ns, .measurable = true, .operations = 1};
    vc_gate_seen(&gate, T + 2 * MS, &interval);
    CHECK(vc_gate_tell(&gate, T + 2 * MS) == 2 * MS);
    CHECK(vc_gate_tell(&gate, T + 500 * MS) == 2 * MS); /* nothing was done */
    gate.own = (struct vc_own){.taken_ns = 2 * MS};
    usage.credit_ns = 10 * MS;
    CHECK(ask(T + 1000 * MS, 100 * MS) == VC_GATE_GO);
    CHECK(vc_gate_tell(&gate, T + 1010 * MS) == 12 * MS); /* the pause before it is none of its time */
    CHECK(vc_gate_tell(&gate, T + 1100 * MS) == 102 * MS);
    CHECK(vc_gate_tell(&gate, T + 1200 * MS) == 102 * MS);
}

static void test_who_can_not_tell_has_the_share_of_one_of_many(void)
{
    start(50, 50, 0);
    usage.credit_ns = 10 * MS;
    gate.untold = true;
    CHECK(ask(T, 31 * MS) == VC_GATE_GO);
    usage.credit_ns = 10 * MS;
    CHECK(ask(T + 200 * MS, 100 * US) == VC_GATE_CREDIT && answer.until_ns > T + 250 * MS);
    CHECK(ask(T + 260 * MS, 100 * US) == VC_GATE_GO); /* a millisecond of it at 50 % takes 2 ms, and there may be 128 */
}

static uint64_t charged(const struct vc_mark_times *from, uint64_t reached_ns, uint64_t until_ns, uint64_t uncertain_ns)
{
    struct vc_busy busy = {0};
    struct vc_interval interval = {.to_ns = until_ns, .estimate_ns = 200 * US, .operations = 1, .measurable = true};
    vc_interval_begin(&interval, from, reached_ns, until_ns, uncertain_ns);
    return vc_interval_settle(&busy, &interval, false, false).charged_ns;
}

static void test_no_work_begins_before_it_is_handed_over(void)
{
    struct vc_mark_times held_up = {.recording_ns = T, .recorded_ns = T + 3 * MS, .begins_ns = T + 3 * MS};
    CHECK(charged(&held_up, T, T + 3 * MS + 210 * US, 0) == 210 * US); /* within the record of its mark */
    CHECK(charged(&held_up, T, T + 3 * MS + 210 * US, 10 * US) == 220 * US); /* the clocks may be apart */
    CHECK(charged(&held_up, T, T + 3 * MS + 210 * US, 5 * MS) == 3 * MS + 210 * US);
    struct vc_mark_times behind = {.recording_ns = T, .recorded_ns = T, .begins_ns = T + 3 * MS};
    CHECK(charged(&behind, T + MS, T + 3 * MS + 210 * US, 0) == 210 * US); /* since what came before had ended */
    CHECK(charged(&behind, T + 4 * MS, T + 7 * MS, 0) == 3 * MS); /* that was still under way */
    /* Its mark was reached behind a short one before, and the call took 18 us: 4.5 us were done, not 1.8. */
    struct vc_mark_times just_behind = {.recording_ns = T, .recorded_ns = T + 300, .begins_ns = T + 4300, .stuck_ns = 14 * US};
    for (uint64_t reached = T; reached <= T + 9 * US; reached += 3 * US)
        CHECK_NEAR(charged(&just_behind, reached, T + 22800, 0), 4500, 300);
}

/* A call that took long, behind which nothing was left to be done: it may have been held up when it had handed its work over, or have waited for it. */
static void test_work_that_was_done_within_its_call_is_not_taken_to_be_short(void)
{
    struct vc_mark_times from = {.recording_ns = T, .recorded_ns = T + 300, .begins_ns = T + 4300, .stuck_ns = 14 * US};
    struct vc_mark_times to = {.recording_ns = T + 19 * US, .recorded_ns = T + 20 * US, .reached_ns = T + 19500};
    struct vc_busy busy = {0};
    struct vc_interval interval = {.estimate_ns = 10 * US, .operations = 1, .measurable = true};
    vc_interval_begin(&interval, &from, T, to.reached_ns, 0);
    vc_interval_end(&interval, &to);
    CHECK(vc_interval_settle(&busy, &interval, false, false).charged_ns == 10 * US);
}

/* A process whose card works `busy` of each 1000 us, of which `charged` are charged: what samples have added to that after so many seconds. */
static uint64_t added(unsigned busy, unsigned charged, unsigned seconds, uint64_t others, bool clear)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T, due = 0, others_ns = 0;
    int64_t account = 0;
    while (now < T + seconds * 1000 * MS) {
        dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
        uint64_t passed = MS / 2 + dice % MS;
        now += passed;
        account += (int64_t)(passed * charged / 1000);
        others_ns += passed * others / 1000;
        struct vc_sample sample = {.now_ns = now, .charged_ns = account, .tenants_ns = others_ns, .rate_ppm = charged * 1000, .busy = (dice >> 32) % 1000 < busy, .clear = clear};
        uint64_t more = vc_samples_add(&samples, NULL, &sample);
        due += more;
        if (more != 0) { /* all is marked then, and charged */
            CHECK(samples.all_until_ns > now);
            account += (int64_t)(samples.all_until_ns - now) * busy / 1000;
            now = samples.all_until_ns;
        }
    }
    return due;
}

static void test_samples_find_what_is_not_charged_and_nothing_else(void)
{
    for (unsigned busy = 50; busy <= 1000; busy += 50) {
        CHECK(added(busy, busy, 60, 0, true) == 0);
        CHECK(added(busy, busy / 2, 60, busy / 2, true) == 0); /* others had half of it */
    }
    CHECK(added(800, 10, 60, 0, false) == 0); /* others may have had it */
    uint64_t due = added(800, 10, 2, 0, true);
    CHECK(due > 20 * MS && due < 60 * MS); /* before all was marked, for 2 s */
    due = added(800, 10, 60, 0, true); /* twice as long each time: 2, 4, 8, 16, 32 s */
    CHECK(due > 100 * MS && due < 300 * MS);
    CHECK(added(130, 100, 60, 0, true) > 0);
}

/* Each launch of 10 us of work is `way` ns on its way to the card, one every 25 us. */
static unsigned times_marked(uint64_t way, unsigned seconds)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T;
    unsigned times = 0;
    while (now < T + seconds * 1000 * MS) {
        dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
        now += MS / 2 + dice % MS;
        struct vc_sample sample = {.now_ns = now, .charged_ns = (int64_t)(now * 10 / 25), .launches = now / (25 * US), .rate_ppm = 500000, .clear = true};
        sample.busy = (dice >> 32) % (25 * US) < 10 * US + way;
        times += vc_samples_add(&samples, NULL, &sample) != 0;
    }
    return times;
}

static void test_samples_learn_how_long_launches_are_on_their_way(void)
{
    CHECK(times_marked(0, 60) == 0 && times_marked(4200, 60) == 0);
    CHECK(times_marked(10 * US, 60) == 0 && times_marked(14 * US, 60) == 0); /* whoever launches so much is measured before */
}

/* A launch every 10 us is charged 1 us, and hides `hidden` ns where it is not marked: what of a minute is charged to nobody, after its first second. */
static int64_t hidden_by_launches(uint64_t hidden)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T;
    int64_t account = 0, had = 0;
    vc_samples_mark_until(&samples, T, T + 250 * MS);
    while (now < T + 60000 * MS) {
        dice ^= dice << 13, dice ^= dice >> 7, dice ^= dice << 17;
        uint64_t passed = MS / 2 + dice % MS, each = 1 * US + hidden;
        now += passed;
        uint64_t marked = now < samples.all_until_ns ? each : 1 * US;
        had += now < T + 1000 * MS ? 0 : (int64_t)(passed / (10 * US) * (each - marked));
        account += (int64_t)(passed * marked / (10 * US));
        struct vc_sample sample = {.now_ns = now, .charged_ns = account, .launches = now / (10 * US), .rate_ppm = 100000, .clear = true};
        sample.busy = (dice >> 32) % (10 * US) < each;
        had -= (int64_t)vc_samples_add(&samples, NULL, &sample);
    }
    return had;
}

static void test_little_is_hidden_in_the_way_of_many_launches_to_the_card(void)
{
    CHECK(hidden_by_launches(4 * US) < 59 * 10 * (int64_t)MS); /* a point */
    CHECK(hidden_by_launches(1 * US) < 59 * 10 * (int64_t)MS);
    CHECK(hidden_by_launches(0) > -100 * (int64_t)MS);
}

static uint64_t throw(uint64_t *dice)
{
    *dice ^= *dice << 13, *dice ^= *dice >> 7, *dice ^= *dice << 17;
    return *dice;
}

/* Nobody looks in the pauses, and the first look is at once behind a launch. */
static void test_requests_with_long_pauses_between_are_not_seen_twice(void)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T;
    int64_t account = 0;
    for (unsigned request = 0; request < 1000; request++, now += 30 * MS) {
        uint64_t from = now, next = now + throw(&dice) % MS;
        for (; next < from + 25 * MS; next += MS / 2 + throw(&dice) % MS) {
            uint64_t done = vc_earlier(next - from, 5 * MS);
            struct vc_sample sample = {.now_ns = next, .charged_ns = account + (int64_t)done, .rate_ppm = 100000, .busy = done < 5 * MS, .clear = true};
            CHECK(vc_samples_add(&samples, NULL, &sample) == 0);
        }
        vc_samples_pause(&samples);
        account += 5 * MS;
        now = from + 25 * MS;
    }
}

/* Processes of one container, each of which has the card half of the time and is charged `charged` of 1000 us, for `lives` ms; what samples add in 10 s. */
static uint64_t added_to_container(uint64_t charged, uint64_t lives)
{
    uint64_t dice = 88172645463325252u, due = 0;
    int64_t container = 0;
    for (uint64_t born = T; born < T + 10000 * MS && due == 0; born += lives * MS) {
        struct vc_samples samples = {0};
        for (uint64_t now = born; now < born + lives * MS && due == 0; now += MS / 2 + throw(&dice) % MS) {
            struct vc_sample sample = {.now_ns = now, .charged_ns = (int64_t)((now - born) * charged / 1000), .rate_ppm = 500000, .busy = throw(&dice) >> 32 & 1, .clear = true};
            due += vc_samples_add(&samples, &container, &sample);
        }
    }
    return due;
}

static void test_what_processes_that_end_soon_were_not_charged_adds_up(void)
{
    CHECK(added_to_container(500, 80) == 0);
    CHECK(added_to_container(10, 80) > 100 * MS);
}

/* Two processes with work on the card all the time, of which each is charged `charged` of 1000 us and says that it is there: what samples add to one in 20 s. */
static uint64_t added_beside(uint64_t charged, uint64_t told)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, due = 0;
    int64_t container = 0;
    for (uint64_t now = T; now < T + 20000 * MS && due == 0; now += MS / 2 + throw(&dice) % MS) {
        struct vc_sample sample = {
            .now_ns = now, .charged_ns = (int64_t)((now - T) * charged / 1000), .siblings_ns = (now - T) * told / 1000, .siblings = 1,
            .rate_ppm = 500000, .busy = true, .clear = true};
        due += vc_samples_add(&samples, &container, &sample);
    }
    return due;
}

static void test_processes_that_have_the_card_at_the_same_time_are_seen_once(void)
{
    CHECK(added_beside(500, 500) == 0);
    CHECK(added_beside(500, 420) == 0); /* what is told is behind */
    CHECK(added_beside(10, 10) > 0);
    CHECK(added_beside(500, 10) > 0); /* what the sibling says without having it */
}

static void test_what_samples_find_is_charged_and_then_all_is_marked(void)
{
    start(10, 10, 0);
    uint64_t now = T;
    for (unsigned i = 0; i < 200 && gate.all_until_ns == 0; i++, now += 2 * MS) {
        limits.arbiter_heartbeat_ns = now;
        vc_gate_sampled(&gate, now, true);
    }
    CHECK(gate.all_until_ns > now && (int64_t)usage.gpu_ns > (int64_t)(40 * MS) && gate.own.taken_ns > (int64_t)(40 * MS));
    start(10, 10, VC_CARD_SHARED); /* or was stopped, and waits for nothing: a steady 70 beside such was charged 68 for 62 */
    for (now = T; now < T + 400 * MS; now += 2 * MS) {
        lease(now, UINT64_MAX, 0);
        limits.cards[0].others_still_ns = now - 4 * MS;
        vc_gate_sampled(&gate, now, true);
    }
    CHECK(gate.all_until_ns == 0 && usage.gpu_ns == 0);
    ask(now, 0);
    CHECK(usage.began_ns == (VC_UNTOLD | now));
    vc_gate_began(&gate, now + MS);
    CHECK(usage.began_ns == now + MS);
}

/* While others wait, `busy` of 16 samples find the card busy and `predicted` of 16 thought so: when all is marked, in ms, and never by what is charged; 0: never. */
static uint64_t marked_after(unsigned busy, unsigned predicted, uint64_t lease_end_ns, uint64_t flags, uint64_t others)
{
    start(10, 10, VC_CARD_SHARED);
    uint64_t now = T;
    for (unsigned i = 0; i < 400 && gate.all_until_ns == 0; i++, now += MS) {
        lease(now, lease_end_ns ? now + lease_end_ns : 0, now - MS / 2);
        limits.cards[0].lease_sequence = 7 | flags;
        gate.finish_ns = i * 7 % 16 < predicted ? now + MS : 0;
        limits.cards[0].others_gpu_ns += others;
        vc_gate_sampled(&gate, now, i * 7 % 16 < busy);
    }
    CHECK(usage.gpu_ns == 0);
    return gate.all_until_ns ? (now - T) / MS : 0;
}

static void test_what_is_busy_in_its_lease_when_nobody_thought_so_is_marked(void)
{
    CHECK(marked_after(8, 8, MS, 0, 0) == 0 && marked_after(8, 9, MS, 0, 0) == 0);
    uint64_t all = marked_after(16, 0, MS, 0, 0), half = marked_after(10, 2, MS, 0, 0);
    CHECK(all > 5 && all < 20 && half > all && half < 40);
    CHECK(marked_after(16, 0, 0, 0, 0) == 0);                     /* somebody else's lease: what is busy may wait for that one */
    CHECK(marked_after(16, 0, MS, VC_LEASE_UNCLEAR, 0) == 0);     /* … or it may begin at any time */
    CHECK(marked_after(16, 8, MS, VC_LEASE_TOGETHER, MS / 2) == 0); /* side by side others explain as much as they had */
    CHECK(marked_after(16, 2, MS, VC_LEASE_TOGETHER, MS / 8) != 0);
}

int main(void)
{
    test_samples_find_what_is_not_charged_and_nothing_else();
    test_samples_learn_how_long_launches_are_on_their_way();
    test_little_is_hidden_in_the_way_of_many_launches_to_the_card();
    test_requests_with_long_pauses_between_are_not_seen_twice();
    test_what_processes_that_end_soon_were_not_charged_adds_up();
    test_processes_that_have_the_card_at_the_same_time_are_seen_once();
    test_what_samples_find_is_charged_and_then_all_is_marked();
    test_what_is_busy_in_its_lease_when_nobody_thought_so_is_marked();
    test_work_that_was_done_within_its_call_is_not_taken_to_be_short();
    test_what_is_told_is_what_can_have_been_done();
    test_who_can_not_tell_has_the_share_of_one_of_many();
    test_whom_the_arbiter_closed_nothing_passes_whatever_its_credit();
    test_a_call_that_is_held_up_hides_nothing_of_what_it_launched();
    test_work_waits_since_its_own_before_it_ended();
    test_what_a_stopped_process_has_on_the_card_is_charged_and_settled_when_it_runs_again();
    test_what_siblings_are_charged_for_a_stopped_process_is_not_theirs();
    test_who_sees_late_that_its_work_ended_has_siblings_parts_by_the_time();
    test_nobody_waits_for_ever_for_a_stopped_process();
    test_what_a_dead_process_had_on_the_card_is_charged_until_it_was_last_alive();
    test_others_part_of_abandoned_work_is_not_the_containers();
    test_a_dead_process_is_not_charged_for_as_long_as_its_siblings_live();
    test_what_several_left_at_the_same_time_is_charged_once();
    test_who_ends_before_what_is_overdue_was_charged_leaves_that();
    test_what_others_were_charged_before_the_latest_is_not_forgotten();
    test_who_ends_between_two_looks_leaves_what_passed_since_the_first();
    test_what_the_dead_left_is_no_part_of_what_lives();
    test_who_launches_long_after_it_was_let_in_has_work_on_the_card();
    test_who_waited_for_its_work_leaves_none();
    test_a_process_that_rests_has_nothing_on_the_card();
    test_who_needs_a_gate();
    test_the_rate_is_the_guaranteed_one_unless_a_living_arbiter_grants_more();
    test_limits_that_make_no_sense_give_the_guaranteed_share();
    test_debt_shuts_the_gate_until_a_chunk_is_there();
    test_what_was_launched_before_anybody_asked_is_charged_at_once_and_closes_the_gate();
    test_one_unknown_operation_at_a_time_but_no_dead_lock();
    test_what_others_paid_for_does_not_make_an_operation_free();
    test_no_more_is_marked_one_by_one_than_marks_are_kept_for();
    test_what_nobody_looks_at_is_charged_as_time_passes();
    test_only_the_holder_of_the_lease_passes();
    test_the_holder_fits_its_work_into_the_lease();
    test_nothing_long_begins_behind_a_lease();
    test_what_is_longer_than_a_lease_begins_when_the_one_before_it_has_ended();
    test_a_request_from_idle_never_sleeps_while_nobody_waits();
    test_a_new_holder_counts_from_its_predecessors_end();
    test_a_permit_is_paid_for_and_the_rest_comes_back();
    test_what_is_given_back_was_not_seen();
    test_the_difference_to_the_estimate_is_settled();
    test_no_work_begins_before_it_is_handed_over();
    test_few_pass_until_an_estimate_is_proven_or_when_it_is_refuted();
    test_a_host_that_launches_slowly_asks_for_permits_not_for_launches();
    test_what_is_not_the_cards_work_is_no_part_of_what_is_charged();
    test_what_waits_behind_something_else_begins_when_its_mark_is_reached();
    test_others_parts_are_taken_off_once();
    test_what_varies_is_charged_by_its_time();
    test_what_surely_varies_by_less_is_measured_too();
    test_what_siblings_launched_takes_nothing_from_what_was_learnt();
    test_a_pause_behind_work_covers_nothing();
    test_a_launch_that_takes_long_does_not_cover_anothers_work();
    test_overlapped_work_is_charged_fairly();
    test_other_processes_of_the_container_count_as_others();
    test_streams_side_by_side_pay_common_time_once();
    test_turns_go_to_the_least_served_of_those_that_wait();
    test_a_process_that_was_idle_comes_back_level();
    test_a_turn_is_never_held_for_good();
    test_a_turn_ends_early_if_nothing_more_fits();
    test_siblings_wait_at_the_gate();
    return check_failures != 0;
}
