/* The gate's rules one by one: what is let through, what waits for what, what is told. */
#include "gate_fixture.h"

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
    CHECK(answer.refill_ns == 400 * US);
    CHECK_NEAR(answer.until_ns - T, 8 * MS, 10); /* 2.4 ms at 30 % */
    CHECK(ask(T + 7 * MS, 100 * US) == VC_GATE_CREDIT);
    CHECK(ask(T + 8 * MS + 10, 100 * US) == VC_GATE_GO);
}

/* Each may suddenly take a thousand times as long: 20 of a kernel of 50 us were launched at once, whatever the limit, and paid for over ten times as long. */
static void test_a_chunk_is_what_flows_in_for_a_while_or_some_operations(void)
{
    static const struct {
        uint32_t cores, flags;
        uint64_t cost_ns;
        int64_t chunk_ns;
    } cases[] = {{10, 0, 5 * US, 150 * US}, {10, 0, 50 * US, 200 * US}, {50, 0, 50 * US, 500 * US}, {90, 0, 2 * MS, MS}, {10, VC_CARD_SHARED, 5 * US, MS}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        start(cases[i].cores, cases[i].cores, cases[i].flags);
        if (cases[i].flags)
            lease(T, UINT64_MAX, T);
        CHECK(ask(T, 12 * MS) == VC_GATE_GO);
        CHECK(ask(T, cases[i].cost_ns) == VC_GATE_CREDIT);
        CHECK(answer.refill_ns == cases[i].chunk_ns);
    }
}

/* At its limit a container has nothing to lose by waiting until what should have been done is seen to be. */
static void test_who_is_at_its_limit_launches_nothing_behind_what_is_overdue(void)
{
    start(50, 50, 0);
    limits.arbiter_heartbeat_ns = T + 100 * MS;
    CHECK(ask(T, 9 * MS) == VC_GATE_GO);
    uint64_t launched = vc_gate_marked(&gate, answer.allowance_ns), done = T + 9 * MS + 4 * US + answer.allowance_ns;
    CHECK(ask(done + 150 * US, 100 * US) == VC_GATE_GO);
    CHECK(ask(done + 500 * US, 100 * US) == VC_GATE_OUTSTANDING);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 9 * MS, .estimate_ns = 9 * MS, .launched_ns = launched, .operations = 1, .measurable = true};
    vc_gate_seen(&gate, done + 500 * US, &interval);
    CHECK(ask(done + 500 * US, 100 * US) == VC_GATE_GO);
    start(50, 50, 0); /* with credit it may go on for a millisecond */
    limits.arbiter_heartbeat_ns = T + 100 * MS;
    CHECK(ask(T, 1 * MS) == VC_GATE_GO);
    vc_gate_marked(&gate, answer.allowance_ns);
    done = T + MS + 4 * US + answer.allowance_ns;
    vc_gate_overdue(&gate, done + 100 * US, done, true);
    CHECK(ask(done + 500 * US, 100 * US) == VC_GATE_GO);
    CHECK(ask(done + 1100 * US, 100 * US) == VC_GATE_OUTSTANDING);
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

/* Threads that always have something on the card would never leave the next one's first launch a moment alone. */
static void test_others_are_held_for_one_unknown_but_not_for_good(void)
{
    start(90, 90, 0);
    CHECK(ask(T, MS) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    struct vc_interval first = {.from_ns = T, .to_ns = T + MS, .estimate_ns = MS, .launched_ns = vc_gate_marked(&gate, 0), .operations = 1, .measurable = true};
    CHECK(ask(T + 10 * US, 0) == VC_GATE_OUTSTANDING);
    CHECK(ask(T + 20 * US, 100 * US) == VC_GATE_OUTSTANDING);
    vc_gate_seen(&gate, T + MS, &first);
    CHECK(ask(T + MS, 100 * US) == VC_GATE_OUTSTANDING);
    CHECK(ask(T + MS, 0) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    struct vc_interval second = {.from_ns = T + MS, .to_ns = T + MS + 20 * US, .launched_ns = vc_gate_marked(&gate, 0), .operations = 1, .measurable = true, .unknown = true};
    vc_gate_seen(&gate, T + MS + 50 * US, &second);
    CHECK(ask(T + MS + 100 * US, 100 * US) == VC_GATE_OUTSTANDING); /* another one may follow */
    CHECK(ask(T + MS + 150 * US, 0) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    struct vc_interval third = {.from_ns = T + MS + 150 * US, .to_ns = T + MS + 170 * US, .launched_ns = vc_gate_marked(&gate, 0), .operations = 1, .measurable = true, .unknown = true};
    vc_gate_seen(&gate, T + MS + 200 * US, &third);
    CHECK(ask(T + 20 * MS, 100 * US) == VC_GATE_GO);
    vc_gate_fold(&gate, answer.allowance_ns, 0);
    vc_gate_marked(&gate, 0);
    CHECK(ask(T + 20 * MS + 10 * US, 0) == VC_GATE_OUTSTANDING);
    CHECK(ask(T + 20 * MS + 20 * US, 100 * US) == VC_GATE_OUTSTANDING);
    CHECK(ask(T + 71 * MS, 0) == VC_GATE_OUTSTANDING); /* what is there may wait for those who are held, or never end */
    CHECK(ask(T + 72 * MS, 100 * US) == VC_GATE_GO);
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

/* While a copy of 500 us is under way its thread asks the gate again and again, and marks what it launches: each time the copy was predicted to be to come, so that the card had work for
 * 6 ms by what was predicted, and none. */
static void test_what_comes_first_takes_its_time_once(void)
{
    start(90, 90, 0);
    struct vc_lane lane;
    struct vc_lane_step step;
    struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x55, 1, 1));
    uint64_t now = T + 500 * MS;
    vc_lane_init(&lane, &gate);
    vc_estimate_set(estimate, 100 * US);
    vc_lane_elsewhere(&lane, true, &step);
    lane.elsewhere_ns = 500 * US;
    for (unsigned i = 0; i < 4; i++) {
        vc_lane_ask(&lane, estimate, now, now, &answer, &step);
        CHECK(answer.reason == VC_GATE_GO && step.mark_before);
        vc_lane_opened(&lane, true);
        vc_lane_launched(&lane, estimate, &answer, &step);
        vc_lane_pause(&lane, &step);
    }
    CHECK_NEAR(gate.finish_ns, now + 900 * US, 50 * US);
    CHECK_NEAR(lane.finish_ns, now + 900 * US, 50 * US);
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

int main(void)
{
    test_what_is_told_is_what_can_have_been_done();
    test_who_can_not_tell_has_the_share_of_one_of_many();
    test_whom_the_arbiter_closed_nothing_passes_whatever_its_credit();
    test_who_needs_a_gate();
    test_the_rate_is_the_guaranteed_one_unless_a_living_arbiter_grants_more();
    test_limits_that_make_no_sense_give_the_guaranteed_share();
    test_debt_shuts_the_gate_until_a_chunk_is_there();
    test_a_chunk_is_what_flows_in_for_a_while_or_some_operations();
    test_who_is_at_its_limit_launches_nothing_behind_what_is_overdue();
    test_what_was_launched_before_anybody_asked_is_charged_at_once_and_closes_the_gate();
    test_one_unknown_operation_at_a_time_but_no_dead_lock();
    test_others_are_held_for_one_unknown_but_not_for_good();
    test_what_others_paid_for_does_not_make_an_operation_free();
    test_no_more_is_marked_one_by_one_than_marks_are_kept_for();
    test_what_nobody_looks_at_is_charged_as_time_passes();
    test_a_permit_is_paid_for_and_the_rest_comes_back();
    test_what_is_given_back_was_not_seen();
    test_the_difference_to_the_estimate_is_settled();
    test_few_pass_until_an_estimate_is_proven_or_when_it_is_refuted();
    test_a_host_that_launches_slowly_asks_for_permits_not_for_launches();
    test_what_is_not_the_cards_work_is_no_part_of_what_is_charged();
    test_what_waits_behind_something_else_begins_when_its_mark_is_reached();
    test_what_comes_first_takes_its_time_once();
    return check_failures != 0;
}
