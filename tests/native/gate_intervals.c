/* What an interval between two marks is charged: alone, among others' slices, beside other streams. */
#include "base/atomic.h"
#include "gate_fixture.h"

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

/* All of them were marked before the first began, while others had 400 us: these were taken off each of them, and so they were charged what they were thought to take. */
static void test_others_part_is_taken_off_one_of_those_that_are_seen_late(void)
{
    struct vc_late latest = {0};
    struct vc_interval interval = {.estimate_ns = 10 * US};
    uint64_t all = 0;
    for (unsigned i = 0; i < 8; i++) {
        interval.from_ns = T + 100 * US + i * 104 * US - (i != 0) * US; /* as exactly as the card's clock tells */
        interval.to_ns = T + 204 * US + i * 104 * US;
        uint64_t inside = vc_others_in_late(&latest, &interval, T, 7 * MS, 7 * MS + 400 * US);
        CHECK(inside <= interval.to_ns - interval.from_ns - 10 * US);
        all += inside;
    }
    CHECK(all == 300 * US); /* for 100 us the first waited behind its mark */
    interval.estimate_ns = 60 * US;
    latest = (struct vc_late){0};
    CHECK(vc_others_in_late(&latest, &interval, interval.from_ns, MS, 2 * MS) == 0); /* a slice takes two switches */
    interval.to_ns = interval.from_ns + 2100 * US;
    CHECK(vc_others_in_late(&latest, &interval, interval.from_ns, MS, 3 * MS) == 2 * MS);
    struct vc_interval beside = interval; /* another stream's */
    CHECK(vc_others_in_late(&latest, &beside, interval.from_ns, MS, 3 * MS) == 2 * MS);
    CHECK(vc_others_in_late(&latest, &beside, interval.from_ns, 3 * MS, 2 * MS) == 0); /* a refund */
}

/* Behind callbacks each operation has a mark of its own, long before it begins. All that others had since then was taken off each, so eight of 50 us on streams in turn had 14.2 of 10. */
static void test_others_part_is_spread_over_what_began_between_two_looks(void)
{
    struct vc_others_look look = {T + MS, {.tenants_ns = 5 * MS, .siblings_ns = 7 * MS}}, next = {T + 2 * MS, {.tenants_ns = 6 * MS, .siblings_ns = 8 * MS}};
    struct vc_gate_others marked = {4 * MS, 6 * MS}, before = marked, after = next.others;
    struct vc_interval interval = {.from_ns = T + 1400 * US, .to_ns = T + 1900 * US};
    vc_others_between(&look, &next, &interval, &before, &after);
    CHECK(before.tenants_ns == 5400 * US && after.tenants_ns == 5900 * US && before.siblings_ns == 6 * MS && after.siblings_ns == 8 * MS);
    interval.from_ns = T + 900 * US; /* it began before */
    before = marked;
    vc_others_between(&look, &next, &interval, &before, &after);
    CHECK(before.tenants_ns == 4 * MS);
}

/* Nobody has the card for so short that it took more to go there and back. */
static void test_what_is_too_short_for_another_context_is_its_own(void)
{
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 50 * US, .uncovered_ns = 50 * US, .others_gpu_ns = 600 * US};
    CHECK(vc_interval_own(&interval) == 50 * US);
    interval.to_ns = T + 100 * US;
    interval.uncovered_ns = 100 * US;
    CHECK(vc_interval_own(&interval) == 50 * US);
}

/* Each began a microsecond before the one before it had ended, as far as the card's clock tells: no estimate followed. */
static void test_what_the_cards_clock_does_not_resolve_is_no_other_stream(void)
{
    start(30, 30, 0);
    struct vc_interval interval = {.from_ns = T, .to_ns = T + 104 * US, .estimate_ns = 50 * US, .operations = 1, .measurable = true, .launched_ns = 50 * US};
    gate.launched_ns = MS;
    vc_gate_seen(&gate, T + 104 * US, &interval);
    interval = (struct vc_interval){.from_ns = T + 103 * US, .to_ns = T + 207 * US, .estimate_ns = 50 * US, .operations = 1, .measurable = true, .launched_ns = 100 * US};
    CHECK(vc_gate_seen(&gate, T + 207 * US, &interval).evidence == VC_EVIDENCE_CLEAN);
    interval = (struct vc_interval){.from_ns = T + 190 * US, .to_ns = T + 294 * US, .estimate_ns = 50 * US, .operations = 1, .measurable = true, .launched_ns = 150 * US};
    CHECK(vc_gate_seen(&gate, T + 294 * US, &interval).evidence == VC_EVIDENCE_BESIDE);
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

/* Proven short, then long behind a callback: half of what a neighbour was charged meanwhile counted as unsure, so 0.7 of 13 ms were charged, each time, and nothing was learnt. */
static void test_others_parts_excuse_no_more_than_a_few_operations(void)
{
    for (unsigned longer = 0; longer < 2; longer++) {
        struct vc_busy busy = {0};
        struct vc_interval interval = {.from_ns = T, .to_ns = T + (longer ? 58 : 9) * MS, .estimate_ns = 700 * US, .others_gpu_ns = (longer ? 45 : 6) * MS, .operations = 29,
                                       .measurable = true, .behind = true};
        struct vc_settlement settlement = vc_interval_settle(&busy, &interval, true, false);
        CHECK(settlement.charged_ns == (longer ? 13 * MS : 700 * US));
        CHECK(settlement.evidence == (longer ? VC_EVIDENCE_LONG_OVERLAP : VC_EVIDENCE_UPPER_BOUND));
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

/* What siblings launch while a kernel of unknown cost has the card runs behind it: four children of eight kernels of 1 ms had 51.3 points of 50, as a quarter of their first ones was charged 0.2 ms. */
static void test_what_siblings_launch_takes_nothing_off_a_first_measurement_shorter_than_a_slice(void)
{
    static const struct {
        uint64_t lasted, siblings, charged;
    } cases[] = {{MS, 2 * MS, MS}, {1900 * US, 10 * MS, 1900 * US}, {4 * MS, 2 * MS, 2 * MS}, {4 * MS, 10 * MS, 800 * US}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        for (unsigned siblings = 0; siblings < 2; siblings++) {
            struct vc_busy busy = {0};
            struct vc_interval interval = {.from_ns = T, .to_ns = T + cases[i].lasted, .others_gpu_ns = cases[i].siblings, .operations = 1, .measurable = true, .unknown = true,
                                           .risk_ns = VC_UNPROVEN_NS, .siblings = siblings};
            uint64_t rest = cases[i].lasted - (cases[i].siblings < cases[i].lasted ? cases[i].siblings : cases[i].lasted);
            uint64_t of_tenants = rest > cases[i].lasted / 5 ? rest : cases[i].lasted / 5;
            CHECK(vc_interval_settle(&busy, &interval, true, false).charged_ns == (siblings ? cases[i].charged : of_tenants));
        }
}

/* Another process's 640 us are charged when it launches them, and run within a kernel of 10 us that begins later: that was charged them too, and its cost was taken for one that varies (eight
 * processes had 48 to 59 of 90, charged 90). They excuse so much once, and not what they had in between. */
static void test_what_siblings_were_charged_before_is_not_charged_again(void)
{
    static const struct {
        uint64_t siblings, from, charged;
    } steps[] = {{640 * US, 10 * US, 10 * US}, {0, 900 * US, 660 * US}, {640 * US, 1600 * US, 10 * US}, {300 * US, 4000 * US, 660 * US}};
    start(90, 90, 0);
    struct vc_interval first = {.from_ns = T - 10 * US, .to_ns = T, .estimate_ns = 10 * US, .operations = 1, .measurable = true};
    vc_gate_seen(&gate, T, &first);
    for (unsigned i = 0; i < sizeof steps / sizeof *steps; i++) {
        usage.gpu_ns += steps[i].siblings;
        struct vc_interval interval = {.from_ns = T + steps[i].from, .to_ns = T + steps[i].from + 660 * US, .estimate_ns = 10 * US, .operations = 1, .measurable = true};
        struct vc_settlement settlement = vc_gate_seen(&gate, interval.to_ns, &interval);
        CHECK_NEAR(settlement.charged_ns, steps[i].charged, 1);
    }
    /* One that has nobody's slice inside is charged what it took. */
    usage.gpu_ns += 10 * MS;
    struct vc_interval interval = {.from_ns = T + 5 * MS, .to_ns = T + 5 * MS + 30 * US, .estimate_ns = 10 * US, .operations = 1, .measurable = true};
    struct vc_settlement settlement = vc_gate_seen(&gate, interval.to_ns, &interval);
    CHECK(settlement.charged_ns == 30 * US && settlement.evidence == VC_EVIDENCE_CLEAN);
}

/* Nor what they were charged after its work had ended, which nobody saw: two processes that hid 9 kernels of 100 us behind short ones, stood still for 3 ms, and did so again had 62 points of 50, charged 28, and
 * with a third that went on 83. A container that does so again and again has nothing taken off what is too short for a slice. */
static void test_what_siblings_did_while_a_process_stood_still_is_charged(void)
{
    for (unsigned doubted = 0; doubted < 2; doubted++) {
        start(50, 50, 0);
        for (unsigned i = 0; doubted && i < 10; i++)
            vc_gate_learnt(&gate, 0, VC_SURPRISE);
        struct vc_interval first = {.from_ns = T - 10 * US, .to_ns = T, .estimate_ns = 10 * US, .operations = 1, .measurable = true};
        vc_gate_seen(&gate, T, &first);
        usage.gpu_ns += 900 * US;
        uint64_t charged = 0;
        for (unsigned i = 0; i < 9; i++) {
            struct vc_interval interval = {.from_ns = T + i * 100 * US, .to_ns = T + (i + 1) * 100 * US, .estimate_ns = 10 * US, .operations = 1, .measurable = true};
            charged += vc_gate_seen(&gate, T + 3900 * US, &interval).charged_ns;
        }
        CHECK(doubted ? charged == 900 * US : charged >= 600 * US && charged <= 700 * US);
    }
}

/* A slice or two of theirs that nothing accounts for are charged, but the cost is not taken for one that varies; and what was measured first, with them inside, is forgotten once nobody was. */
static void test_siblings_slices_make_no_cost_vary(void)
{
    for (unsigned told = 0; told < 2; told++) {
        struct vc_estimate *estimate = vc_estimate_find(vc_estimate_function_key(0x7100 + told, 1, 1));
        start(90, 90, 0);
        vc_estimate_set(estimate, 700 * US);
        vc_estimate_learn(estimate, 700 * US, 10 * US, 700 * US, VC_EVIDENCE_CLEAN);
        CHECK(vc_estimate_cost(estimate) == 10 * US);
        for (unsigned i = 0; i < 10; i++) {
            lease(T + i * 10 * MS, 0, 0);
            limits.cards[0].told_ns += told * MS;
            struct vc_interval interval = {.from_ns = T + i * 10 * MS, .to_ns = T + i * 10 * MS + (i == 9 ? MS : 10 * US), .estimate_ns = 10 * US, .operations = 1, .measurable = true};
            struct vc_settlement settlement = vc_gate_seen(&gate, interval.to_ns, &interval);
            CHECK(settlement.charged_ns == interval.to_ns - interval.from_ns);
            vc_estimate_learn(estimate, 10 * US, settlement.measured_ns, 10 * US, settlement.evidence);
        }
        CHECK((vc_estimate_risk(estimate) != 0) == !told);
    }
}

/* What a stopped process of another tenant left on the card may be done: kernels of 20 ms had 14 to 18 points of 10 beside one whose processes stop themselves behind 10 us and are killed, and 42 of 30 beside one whose
 * eight go on in the end: they lasted no longer than they do alone, and were charged a fifth of it. */
static void test_what_the_stopped_may_have_had_takes_nothing_that_did_not_last_longer(void)
{
    static const struct {
        uint64_t lasted, others, charged;
        bool unknown, stopped;
    } cases[] = {{22 * MS, 18 * MS, 20 * MS, false, true}, {22 * MS, 18 * MS, 22 * MS / 5, false, false}, {22 * MS, 18 * MS, 22 * MS / 5, true, true}, {18 * MS, 16 * MS, 18 * MS, false, true},
                 {100 * MS, 80 * MS, 20 * MS, false, true}, {100 * MS, 84 * MS, 20 * MS, false, true}, {60 * MS, 42 * MS, 18 * MS, false, true}, {60 * MS, 30 * MS, 30 * MS, false, true}, {150 * MS, 60 * MS, 90 * MS, false, true}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vc_busy busy = {0};
        struct vc_interval interval = {.from_ns = T, .to_ns = T + cases[i].lasted, .estimate_ns = 20 * MS, .others_gpu_ns = cases[i].others, .operations = 1, .measurable = true, .unknown = cases[i].unknown,
                                       .stopped = cases[i].stopped};
        struct vc_settlement settlement = vc_interval_settle(&busy, &interval, true, false);
        CHECK(settlement.charged_ns == cases[i].charged);
        CHECK(!cases[i].stopped || cases[i].unknown || (settlement.evidence == VC_EVIDENCE_BESIDE) == (cases[i].lasted >= 20 * MS && cases[i].charged <= 80 * MS));
    }
    for (unsigned stopped = 0; stopped < 2; stopped++) {
        struct vc_interval interval = {.from_ns = T, .to_ns = T + 22 * MS, .estimate_ns = 20 * MS, .others_gpu_ns = 18 * MS, .operations = 1, .measurable = true};
        start(50, 50, VC_CARD_SHARED);
        limits.cards[0].others_still_ns = stopped ? T + 21 * MS : T - MS;
        CHECK(vc_gate_seen(&gate, T + 22 * MS, &interval).charged_ns == (stopped ? 20 * MS : 22 * MS / 5));
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

/* … also beside others: what the second had in the first one's interval was paid by neither, as an interval that is shorter than was thought holds nobody's slice. Four streams with requests as a 30 beside a trainer had 34, charged
 * 29.7. */
static void test_beside_others_streams_have_their_common_time_paid_too(void)
{
    struct vc_busy busy = {0};
    struct vc_interval first = {.from_ns = T, .to_ns = T + 2500 * US, .estimate_ns = MS, .others_gpu_ns = 500 * US, .operations = 1, .measurable = true, .unclear = true}, second = first, third = first;
    second.from_ns += 100 * US;
    CHECK(vc_interval_settle(&busy, &first, true, true).charged_ns == MS);
    struct vc_settlement settlement = vc_interval_settle(&busy, &second, true, true);
    CHECK(settlement.charged_ns == MS && settlement.evidence != VC_EVIDENCE_CLEAN);
    CHECK(vc_interval_settle(&busy, &third, true, true).charged_ns == 500 * US); /* together no more than passed */
    struct vc_interval alone = {.from_ns = T + 3 * MS, .to_ns = T + 4040 * US, .estimate_ns = MS, .operations = 1, .measurable = true, .unclear = true};
    settlement = vc_interval_settle(&busy, &alone, true, true);
    CHECK(settlement.charged_ns == 1040 * US && settlement.evidence == VC_EVIDENCE_CLEAN);
}

/* The last kernel of a lease, of 2 ms and waited for, has a slice of 2 ms and two switches of another inside, while both had work there for little more than that: by equal parts a ms too much
 * was charged, so a 70 had 65. */
static void test_others_have_whole_slices_of_a_long_operation(void)
{
    static const struct vc_interval one = {.from_ns = T, .to_ns = T + 4150 * US, .estimate_ns = 2010 * US, .others_gpu_ns = 1100 * US, .operations = 1, .measurable = true};
    static const struct {
        uint64_t length_ns, others_ns, estimate_ns, charged_ns;
    } cases[] = {{4150, 1100, 2010, 2010}, {4150, 1000, 2010, 2010}, {4150, 990, 2010, 3160}, {2000, 200, 2010, 2000}, {2000, 200, 2000, 2000},
                 {6300, 1100, 2010, 5200}, /* what one slice does not explain is its own */
                 {4150, 1100, 3200, 3200}, {4150, 1100, 4160, 3050}, {8450, 3100, 4100, 4100}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vc_busy busy = {0};
        struct vc_interval interval = one;
        interval.to_ns = T + cases[i].length_ns * US;
        interval.others_gpu_ns = cases[i].others_ns * US;
        interval.estimate_ns = cases[i].estimate_ns * US;
        CHECK_NEAR((double)vc_interval_settle(&busy, &interval, true, false).charged_ns / US, (double)cases[i].charged_ns, 1);
    }
    /* Nor is an estimate asked of what varies, of who is doubted, or where others' parts are a guess. */
    struct vc_interval doubts[] = {one, one, one, one};
    doubts[0].risk_ns = 4 * MS;
    doubts[1].doubted = doubts[2].behind = doubts[3].unclear = true;
    for (unsigned i = 0; i < sizeof doubts / sizeof *doubts; i++) {
        struct vc_busy busy = {0};
        CHECK(vc_interval_settle(&busy, &doubts[i], true, i == 3).charged_ns == 3050 * US);
    }
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

/* A thread that was held up between a launch and the mark behind it, by a busy machine: its sets of 2.7 us seemed to take 0.1 ms now and then, so they were taken for such
 * that vary, and each got a mark of its own (14 points of a steady 70's neighbour, which could have 21). */
static void test_who_is_held_up_before_its_end_mark_does_not_vary(void)
{
    static const struct {
        uint64_t took;
        bool done; /* before its end was marked */
        enum vc_evidence evidence;
    } cases[] = {
        {150 * US, true, VC_EVIDENCE_UPPER_BOUND}, {150 * US, false, VC_EVIDENCE_CLEAN}, {5 * US, true, VC_EVIDENCE_CLEAN}, {5 * MS, true, VC_EVIDENCE_CLEAN},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vc_mark_times from = {.recording_ns = T - 300, .recorded_ns = T, .begins_ns = T};
        uint64_t end = T + cases[i].took, recorded = cases[i].done ? end + US : T + 2 * US;
        struct vc_mark_times to = {.recording_ns = recorded - 300, .recorded_ns = recorded, .reached_ns = end};
        struct vc_busy busy = {0};
        struct vc_interval interval = {.estimate_ns = 2700, .operations = 1, .measurable = true};
        vc_interval_begin(&interval, &from, T, end, 0);
        vc_interval_end(&interval, &to);
        struct vc_settlement settlement = vc_interval_settle(&busy, &interval, false, false);
        CHECK(settlement.charged_ns == cases[i].took && settlement.evidence == cases[i].evidence);
    }
}

int main(void)
{
    test_who_is_held_up_before_its_end_mark_does_not_vary();
    test_work_that_was_done_within_its_call_is_not_taken_to_be_short();
    test_others_have_whole_slices_of_a_long_operation();
    test_a_call_that_is_held_up_hides_nothing_of_what_it_launched();
    test_work_waits_since_its_own_before_it_ended();
    test_no_work_begins_before_it_is_handed_over();
    test_others_parts_are_taken_off_once();
    test_others_parts_excuse_no_more_than_a_few_operations();
    test_what_varies_is_charged_by_its_time();
    test_others_part_is_taken_off_one_of_those_that_are_seen_late();
    test_others_part_is_spread_over_what_began_between_two_looks();
    test_what_is_too_short_for_another_context_is_its_own();
    test_what_the_cards_clock_does_not_resolve_is_no_other_stream();
    test_what_siblings_launched_takes_nothing_from_what_was_learnt();
    test_what_siblings_launch_takes_nothing_off_a_first_measurement_shorter_than_a_slice();
    test_what_siblings_were_charged_before_is_not_charged_again();
    test_what_siblings_did_while_a_process_stood_still_is_charged();
    test_siblings_slices_make_no_cost_vary();
    test_a_pause_behind_work_covers_nothing();
    test_what_the_stopped_may_have_had_takes_nothing_that_did_not_last_longer();
    test_a_launch_that_takes_long_does_not_cover_anothers_work();
    test_overlapped_work_is_charged_fairly();
    test_other_processes_of_the_container_count_as_others();
    test_streams_side_by_side_pay_common_time_once();
    test_beside_others_streams_have_their_common_time_paid_too();
    return check_failures != 0;
}
