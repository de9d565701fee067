/* What stopped, dead and resting processes have on the card, and who pays for it. */
#include "gate_fixture.h"
#include "gate/lane.h"

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
    at = vc_others_at(&from, T, &now, T + 6 * MS, T + 5 * MS); /* as late as a helper may be */
    CHECK_NEAR(at.siblings_ns, 5 * MS + 20 * MS * 5 / 6, US);
    CHECK(at.tenants_ns == 2 * MS);
    at = vc_others_at(&now, T, &from, T + 50 * MS, T + 5 * MS); /* a refund */
    CHECK(at.siblings_ns == 5 * MS && at.tenants_ns == MS);
}

/* What a process was seen late to have had is charged at once, but ran before: two that hid 10 ms, stood still for 13 and hid again took that off each other, and had 90 points of 50, charged 46. */
static void test_what_is_seen_late_is_no_part_of_what_siblings_have_then(void)
{
    for (unsigned late = 0; late < 2; late++) {
        start_two();
        uint64_t seen = T + 20 * MS + (late ? 13 * MS : 100 * US);
        struct vc_gate_others of_other = vc_gate_others(&other), own = vc_gate_others(&one), after;
        struct vc_interval interval = {.from_ns = T, .to_ns = T + 20 * MS, .estimate_ns = MS, .measurable = true, .operations = 1, .doubted = true};
        vc_gate_seen(&one, seen, &interval);
        after = vc_gate_others(&other);
        CHECK(after.siblings_ns - of_other.siblings_ns == (late ? 0 : 19 * MS));
        after = vc_gate_others(&one);
        CHECK(after.siblings_ns == own.siblings_ns); /* its own clock of theirs stands */
    }
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

/* A child that is let go and launches 2 ms later, when its events are made, had nothing on the card in between: that was charged when it was killed (killed_after_launch 40 to 44 of 50, charged 50). */
static void test_what_is_not_handed_over_yet_owes_nothing(void)
{
    start(50, 50, 0);
    CHECK(ask(T, 0) == VC_GATE_GO && answer.from_idle && slot.predicted_finish_ns < T + 10 * US);
    vc_gate_hands_over(&gate, T + 20 * US, &answer);
    CHECK(slot.predicted_finish_ns < T + 10 * US); /* no longer than that always takes */
    vc_gate_hands_over(&gate, T + 2 * MS, &answer);
    CHECK(slot.predicted_finish_ns >= T + 2 * MS && slot.predicted_finish_ns < T + 2 * MS + 10 * US);
    vc_gate_hands_over(&gate, T + 4 * MS, &answer); /* once: what was launched since is on the card */
    CHECK(slot.predicted_finish_ns < T + 2 * MS + 10 * US);
    start(50, 50, 0);
    ask(T, 0);
    struct vc_gate_answer first = answer;
    CHECK(ask(T + MS, 0) == VC_GATE_GO); /* another thread, which has */
    uint64_t paid = slot.predicted_finish_ns;
    vc_gate_hands_over(&gate, T + 2 * MS, &first);
    CHECK(slot.predicted_finish_ns == paid);
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

/* A stream was destroyed, by another thread than the one that launched there: what it had launched without a mark was charged by estimate, and once more in the interval of the stream that ran
 * beside it. */
static void test_what_was_charged_without_a_mark_is_paid_for_where_its_lane_ends(void)
{
    for (unsigned late = 0; late <= 1; late++) {
        struct vc_lane lane;
        struct vc_lane_step step;
        struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x77 + late, 1, 1));
        start(50, 50, 0);
        vc_lane_init(&lane, &gate);
        vc_estimate_set(estimate, 400 * US);
        for (unsigned i = 0; i < VC_PROVEN_TIMES; i++)
            vc_estimate_learn(estimate, 400 * US, 400 * US, 400 * US, VC_EVIDENCE_CLEAN);
        vc_lane_ask(&lane, estimate, T, T, &answer, &step);
        CHECK(answer.reason == VC_GATE_GO);
        vc_lane_opened(&lane, true);
        vc_lane_launched(&lane, estimate, &answer, &step);
        CHECK(!step.mark_after);
        vc_lane_end(&lane, T + (late ? 500 : 200) * US);
        uint64_t charged = usage.gpu_ns;
        CHECK_NEAR(charged, 400 * US, US);
        struct vc_interval interval = {.from_ns = T, .to_ns = T + 1600 * US, .operations = 1, .unknown = true, .measurable = true};
        vc_gate_seen(&gate, T + 1600 * US, &interval);
        CHECK_NEAR(usage.gpu_ns - charged, (late ? 1600 : 1400) * US, 10 * US); /* of its 0.4 ms what was still to come */
    }
}

int main(void)
{
    test_what_was_charged_without_a_mark_is_paid_for_where_its_lane_ends();
    test_what_a_stopped_process_has_on_the_card_is_charged_and_settled_when_it_runs_again();
    test_what_siblings_are_charged_for_a_stopped_process_is_not_theirs();
    test_who_sees_late_that_its_work_ended_has_siblings_parts_by_the_time();
    test_what_is_seen_late_is_no_part_of_what_siblings_have_then();
    test_nobody_waits_for_ever_for_a_stopped_process();
    test_what_a_dead_process_had_on_the_card_is_charged_until_it_was_last_alive();
    test_others_part_of_abandoned_work_is_not_the_containers();
    test_what_is_not_handed_over_yet_owes_nothing();
    test_a_dead_process_is_not_charged_for_as_long_as_its_siblings_live();
    test_what_several_left_at_the_same_time_is_charged_once();
    test_who_ends_before_what_is_overdue_was_charged_leaves_that();
    test_what_others_were_charged_before_the_latest_is_not_forgotten();
    test_who_ends_between_two_looks_leaves_what_passed_since_the_first();
    test_what_the_dead_left_is_no_part_of_what_lives();
    test_who_launches_long_after_it_was_let_in_has_work_on_the_card();
    test_who_waited_for_its_work_leaves_none();
    test_a_process_that_rests_has_nothing_on_the_card();
    return check_failures != 0;
}
