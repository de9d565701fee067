/* A slice of one's own: where it begins, how long it is, and what an interval is charged within it. */
#include "gate_fixture.h"

/* 1.9 ms between two marks, of which the first was reached 1 ms behind its record, by a kernel that is thought to take 0.4 ms, while others are thought to have had 1.3 ms. */
static const struct vc_interval waited = {.from_ns = T + MS, .to_ns = T + MS + 1900 * US, .estimate_ns = 400 * US, .others_gpu_ns = 1300 * US, .risk_ns = 1900 * US, .waited = true,
                                          .operations = 1, .measurable = true, .contended_until_ns = T + 100 * MS};

static bool opens(struct vc_interval interval, bool first, uint64_t ended_ns)
{
    struct vc_slice slice = {.ended_ns = ended_ns};
    vc_interval_open(&interval, first, &slice);
    return interval.slice_from_ns == interval.from_ns;
}

/* What an operation of varying cost took in a slice of its own was halved by what others were thought to have had there: 20 us, waited for, and 1.9 ms by its argument, not waited for, as a 30 beside a 70 had 36.9, charged 20.3. The
 * same behind copies was charged 16 points of 28, and the neighbour had 66.6 of 70. */
static void test_a_slice_of_ones_own_is_nobody_elses(void)
{
    static const struct {
        uint64_t lasted, others, charged, idle;
        bool not_first, not_waited;
    } cases[] = {
        {.lasted = 1900 * US, .others = 1100 * US, .charged = 1900 * US},
        {.lasted = 4050 * US, .others = 1300 * US, .charged = 2750 * US}, /* beyond a slice of its own the clock tells … */
        {.lasted = 3100 * US, .others = 3 * MS, .charged = 2 * MS},
        {.lasted = 5150 * US, .others = 3 * MS, .charged = 3150 * US}, /* … but that slices come in turns */
        {.lasted = 9300 * US, .others = 6 * MS, .charged = 5300 * US},
        {.lasted = 5 * MS, .others = 2 * MS, .charged = 4800 * US, .idle = 2800 * US}, /* others had little left behind our slice … */
        {.lasted = 5 * MS, .others = 2 * MS, .charged = 5 * MS, .idle = 4 * MS},       /* … or nothing */
        {.lasted = 1900 * US, .others = 1100 * US, .charged = 800 * US, .not_first = true}, /* what was before may have had that slice */
        {.lasted = 1900 * US, .others = 1100 * US, .charged = 800 * US, .not_waited = true},
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vc_busy busy = {0};
        struct vc_interval interval = waited;
        struct vc_slice slice = {0};
        interval.to_ns = interval.from_ns + cases[i].lasted;
        interval.others_gpu_ns = cases[i].others;
        interval.waited = !cases[i].not_waited;
        if (cases[i].idle != 0)
            interval.contended_until_ns = interval.to_ns - cases[i].idle;
        vc_interval_open(&interval, !cases[i].not_first, &slice);
        CHECK_NEAR(vc_interval_settle(&busy, &interval, true, false).charged_ns, cases[i].charged, US);
        CHECK(slice.ended_ns == interval.to_ns);
    }
}

static void test_a_slice_begins_where_a_mark_was_reached_with_its_operation(void)
{
    static const struct {
        struct vc_mark_times from;
        uint64_t reached;
        bool waited;
    } cases[] = {
        {{.recording_ns = T, .recorded_ns = T + 2 * US, .begins_ns = T + 6 * US}, T + MS, true},
        {{.recording_ns = T, .recorded_ns = T + 2 * US, .begins_ns = T + 6 * US}, T + 10 * US, false},           /* it waited for nothing */
        {{.recording_ns = T, .recorded_ns = T + 2 * US, .begins_ns = T + MS + 100 * US}, T + MS, false},         /* held up: the card was idle, and another may have come */
        {{.recording_ns = T, .recorded_ns = T + 2 * US, .begins_ns = T + 6 * US, .stuck_ns = MS}, T + MS, false}, /* … or in its launch */
        {{.recording_ns = T, .recorded_ns = T + 2 * US}, T + MS, false},                                         /* nobody knows when that was handed over */
    };
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct vc_interval interval = {.estimate_ns = 300 * US};
        vc_interval_begin(&interval, &cases[i].from, cases[i].reached, T + 3 * MS, 0);
        CHECK(interval.waited == cases[i].waited);
    }
}

/* Work of its own that ended where the mark was reached had the card before, and perhaps most of that slice. */
static void test_who_had_the_card_before_has_no_new_slice(void)
{
    for (unsigned us = 0; us <= 100; us += 20)
        CHECK(opens(waited, true, waited.from_ns - us * US) == (us > 50));
}

/* What follows at once is in the slice that it began: 1.9 ms behind 10 us on streams with callbacks had 36 of 30, charged 23, as half of each was taken for others'. */
static void test_what_follows_in_a_slice_of_ones_own_is_nobody_elses(void)
{
    struct vc_busy busy = {0};
    struct vc_slice slice = {0};
    struct vc_interval shorter = waited, longer = waited, later = waited, before = waited, beside = waited;
    shorter.to_ns = longer.from_ns = shorter.from_ns + 10 * US;
    longer.waited = later.waited = false;
    vc_interval_open(&shorter, true, &slice);
    vc_interval_settle(&busy, &shorter, true, false);
    vc_interval_open(&longer, true, &slice);
    CHECK(vc_interval_settle(&busy, &longer, true, false).charged_ns == 1890 * US);
    vc_interval_close(&longer, &slice);
    CHECK(slice.put_off_ns == 1300 * US); /* that they had behind it */
    beside.from_ns = longer.from_ns + US;
    vc_interval_open(&beside, true, &slice); /* another stream's: what it has was paid, so what others had there was taken off */
    vc_interval_settle(&busy, &beside, true, false);
    vc_interval_close(&beside, &slice);
    CHECK(slice.put_off_ns == 1300 * US);
    later.from_ns = longer.to_ns;
    later.to_ns = later.from_ns + 2300 * US;
    later.others_gpu_ns = 600 * US;
    vc_interval_open(&later, true, &slice); /* its first 0.1 ms */
    vc_interval_settle(&busy, &later, true, false);
    CHECK_NEAR(vc_interval_own(&later), 400 * US, US); /* less than a fifth */
    vc_interval_close(&later, &slice);
    CHECK(slice.put_off_ns == 0);
    before.from_ns = T;
    vc_interval_open(&before, true, &slice); /* another stream's, seen late */
    CHECK(before.slice_from_ns == 0);
    struct vc_interval apart = {.from_ns = later.to_ns + 60 * US, .to_ns = later.to_ns + MS}; /* another may have had the card */
    vc_interval_open(&apart, true, &slice);
    CHECK(slice.from_ns == 0 && apart.slice_from_ns == 0);
}

/* … while it lasts, too, and what was seen of it then is not taken for something before it. */
static void test_what_passes_of_a_slice_of_its_own_is_charged(void)
{
    struct vc_interval interval = waited;
    struct vc_slice slice = {0};
    start(30, 30, VC_CARD_SHARED);
    limits.cards[0].others_active_ns = waited.to_ns;
    interval.to_ns = 0;
    interval.others_gpu_ns = 600 * US;
    vc_interval_open(&interval, true, &slice);
    vc_gate_progress(&gate, interval.from_ns + MS, &interval);
    CHECK(interval.advance_ns == 600 * US && slice.ended_ns == 0);
    interval.to_ns = waited.to_ns;
    interval.others_gpu_ns = 1100 * US;
    slice.ended_ns = interval.from_ns; /* another stream's end was seen meanwhile */
    vc_interval_open(&interval, true, &slice);
    CHECK(vc_gate_seen(&gate, interval.to_ns + 50 * US, &interval).charged_ns == 1900 * US);
}

/* Six processes begin with a kernel of 20 ms each, on a card of their own: only one slice of the first 120 ms is sure. All of it was charged to each. */
static void test_what_siblings_have_is_not_every_other_slice(void)
{
    struct vc_interval interval = {.from_ns = T, .others_gpu_ns = 100 * MS, .operations = 1, .measurable = true, .unknown = true, .slice_from_ns = T};
    start(10, 10, 0);
    vc_gate_progress(&gate, T + 120 * MS, &interval);
    CHECK(interval.advance_ns == 24 * MS);
    interval.to_ns = T + 120 * MS;
    CHECK(vc_gate_seen(&gate, interval.to_ns, &interval).charged_ns == 24 * MS);
}

int main(void)
{
    test_what_siblings_have_is_not_every_other_slice();
    test_a_slice_of_ones_own_is_nobody_elses();
    test_a_slice_begins_where_a_mark_was_reached_with_its_operation();
    test_who_had_the_card_before_has_no_new_slice();
    test_what_follows_in_a_slice_of_ones_own_is_nobody_elses();
    test_what_passes_of_a_slice_of_its_own_is_charged();
    return check_failures != 0;
}
