/* What passes while processes stand still with work on the card, by what they told where no tenant can write; and what follows from it. */
#include "arbiter_fixture.h"

#include "arbiter/stood.h"

static struct vc_stood stood;
static uint64_t told, others;

/* Looks every 10 ms. */
static void look_until(uint64_t from, uint64_t until)
{
    for (uint64_t now = from; now <= until; now += 10 * MS)
        vc_stood_look(&stood, now, told, others);
}

static void begin(void)
{
    memset(&stood, 0, sizeof stood);
    told = others = 0;
    look_until(T - 50 * MS, T);
}

static void test_who_stands_still_is_charged_what_passes(void)
{
    begin();
    vc_stood_tells(&stood, 3, T - 5 * MS, T + 5 * MS);
    look_until(T + 10 * MS, T + 10 * MS);
    CHECK(stood.open == 1 && stood.standing == 0 && stood.charged_ns == 0);
    look_until(T + 20 * MS, T + 20 * MS);
    CHECK(stood.standing == 1);
    CHECK_NEAR(stood.charged_ns, 15 * MS, MS);
    CHECK(vc_stood_counts(&stood, T + 20 * MS) == 0); /* it may go on */
    look_until(T + 30 * MS, T + 900 * MS);
    CHECK(vc_stood_counts(&stood, T + 900 * MS) == stood.charged_ns);
    CHECK_NEAR(stood.charged_ns, 895 * MS, MS);
    look_until(T + 910 * MS, T + 8000 * MS);
    CHECK_NEAR(stood.charged_ns, VC_STOOD_MOST_NS, 20 * MS);
    CHECK(stood.standing == 0 && stood.open == 1);
    stood.hidden = stood.hides = true;
    look_until(T + 8010 * MS, T + 20000 * MS);
    CHECK_NEAR(stood.charged_ns, 19995 * MS, 30 * MS); /* what passed meanwhile, too */
}

static void test_who_runs_or_has_nothing_there_is_not(void)
{
    begin();
    for (uint64_t now = T; now < T + 500 * MS; now += 10 * MS) {
        vc_stood_tells(&stood, 3, T, now - 4 * MS);
        look_until(now, now);
    }
    CHECK(stood.charged_ns == 0 && stood.standing == 0);
    vc_stood_tells(&stood, 3, T, 0); /* and then it is stopped, in a debugger */
    look_until(T + 500 * MS, T + 900 * MS);
    CHECK(stood.charged_ns == 0 && stood.open == 0);
}

static void test_who_goes_on_tells_it_itself(void)
{
    begin();
    vc_stood_tells(&stood, 3, T, T);
    look_until(T + 10 * MS, T + 400 * MS);
    CHECK_NEAR(stood.charged_ns, 400 * MS, MS);
    vc_stood_tells(&stood, 3, T, T + 405 * MS);
    CHECK(stood.charged_ns == 0);
    look_until(T + 410 * MS, T + 600 * MS);
    vc_stood_tells(&stood, 3, T, 0);
    CHECK(stood.charged_ns == 0);
}

/* Another one in its slot is none that goes on. */
static void test_who_was_killed_keeps_its_charge(void)
{
    for (unsigned anew = 0; anew < 2; anew++) {
        begin();
        vc_stood_tells(&stood, 3, T, T);
        look_until(T + 10 * MS, T + 400 * MS);
        vc_stood_tells(&stood, 3, anew ? T + 405 * MS : 0, anew ? T + 405 * MS : 0);
        look_until(T + 410 * MS, T + 410 * MS);
        CHECK_NEAR(stood.charged_ns, 400 * MS, MS);
        CHECK(vc_stood_counts(&stood, T + 410 * MS) == stood.charged_ns);
    }
}

/* Where the file hides it no silence is too short: it may be killed before it would be taken to stand still. Nor is anything charged back to who goes on: a sibling that took over the locks of
 * a killed one did so, and 26 points of 10 were had. */
static void test_what_is_hidden_is_charged_at_once(void)
{
    begin();
    stood.hidden = stood.hides = true;
    for (unsigned child = 0; child < 10; child++) {
        uint64_t from = T + child * 10 * MS;
        vc_stood_tells(&stood, 3, from, from);
        for (unsigned ms = 0; ms <= 9; ms++)
            vc_stood_look(&stood, from + ms * MS, told, others);
        CHECK(vc_stood_counts(&stood, from + 9 * MS) == stood.charged_ns);
    }
    vc_stood_tells(&stood, 3, 0, 0);
    CHECK_NEAR(stood.charged_ns, 90 * MS, MS);
    double before = stood.charged_ns;
    for (uint64_t now = T + 100 * MS; now < T + 400 * MS; now += MS) {
        if ((now - T) % (4 * MS) == 0) {
            told += 3 * MS;
            vc_stood_tells(&stood, 3, T + 100 * MS, now);
        }
        vc_stood_look(&stood, now, told, others);
    }
    vc_stood_tells(&stood, 3, T + 100 * MS, 0);
    CHECK_NEAR(stood.charged_ns - before, 60 * MS, 20 * MS); /* less what it told */
    CHECK(stood.open == 0);
}

static void test_what_passes_is_charged_once(void)
{
    begin();
    for (unsigned slot = 0; slot < 5; slot++)
        vc_stood_tells(&stood, slot, T, T);
    look_until(T + 10 * MS, T + 400 * MS);
    CHECK_NEAR(stood.charged_ns, 400 * MS, MS);
    vc_stood_tells(&stood, 0, T, T + 400 * MS); /* one goes on */
    CHECK_NEAR(stood.charged_ns, 320 * MS, MS);
}

static void test_what_siblings_told_and_others_had_is_taken_off(void)
{
    begin();
    vc_stood_tells(&stood, 3, T, T);
    for (uint64_t now = T + 10 * MS; now <= T + 400 * MS; now += 10 * MS) {
        told += 2 * MS;
        others += 4 * MS;
        look_until(now, now);
    }
    CHECK_NEAR(stood.charged_ns, 160 * MS, 8 * MS);
    begin();
    vc_stood_tells(&stood, 3, T, T);
    for (uint64_t now = T + 10 * MS; now <= T + 400 * MS; now += 10 * MS) {
        others += 10 * MS;
        look_until(now, now);
    }
    CHECK_NEAR(stood.charged_ns, 80 * MS, 8 * MS); /* they never had nearly all */
}

/* Siblings ask the card: what it was free for is not charged, what it was busy for stays. */
static void test_what_the_card_says_counts(void)
{
    begin();
    vc_stood_tells(&stood, 3, T, T);
    for (uint64_t now = T + 10 * MS; now <= T + 2000 * MS; now += 10 * MS) {
        if (now > T + 20 * MS)
            vc_stood_asked(&stood, now - 3 * MS, now < T + 1000 * MS);
        look_until(now, now);
        CHECK(now < T + 1000 * MS || stood.charged_ns < 1020 * MS);
    }
    CHECK_NEAR(stood.charged_ns, 990 * MS, 20 * MS);
    look_until(T + 2010 * MS, T + 3000 * MS); /* nobody asks any more */
    CHECK_NEAR(stood.charged_ns, 1990 * MS, 30 * MS);
    vc_stood_asked(&stood, T + 2995 * MS, false);
    CHECK(stood.charged_ns > 1870 * MS); /* what passed for long before is not known to have been free */
}

/* Before it is taken to stand still: what it left is charged by nobody else whom its container could not keep from it. 46 points of 10 were had by two that were killed each 10 ms. */
static void test_who_is_killed_soon_is_charged_what_passed_since_it_told(void)
{
    begin();
    vc_stood_tells(&stood, 3, T, T);
    vc_stood_tells(&stood, 4, T, T + 2 * MS);
    vc_stood_ends(&stood, 3, T + 9 * MS, T + 10 * MS, told, others);
    vc_stood_tells(&stood, 3, 0, 0);
    CHECK_NEAR(stood.charged_ns, 8 * MS, MS / 10);
    vc_stood_ends(&stood, 4, T + 12 * MS, T + 12 * MS, told + MS, others); /* had the card in turns with the one before */
    vc_stood_tells(&stood, 4, T + 12 * MS, T + 12 * MS);
    CHECK_NEAR(stood.charged_ns, 10 * MS, MS / 10);
    CHECK(vc_stood_counts(&stood, T + 12 * MS) == stood.charged_ns);
    vc_stood_ends(&stood, 4, T + 12 * MS, T + 13 * MS, told, others); /* as soon as it told */
    vc_stood_ends(&stood, 7, T + 20 * MS, T + 20 * MS, told, others); /* had told nothing */
    CHECK_NEAR(stood.charged_ns, 10 * MS, MS / 10);
}

/* Anybody can make up that the card was free: who was killed before it told what it had is charged that after all, and it helps for some seconds only. 96 points of 10 were had by that, and
 * as a 30 beside a steady 70 77, which left it 19. */
static void test_what_was_excused_is_charged_to_who_is_killed(void)
{
    for (unsigned killed = 0; killed < 2; killed++) {
        begin();
        vc_stood_tells(&stood, 3, T, T);
        for (uint64_t now = T + 10 * MS; now <= T + 2000 * MS; now += 10 * MS) {
            look_until(now, now);
            vc_stood_asked(&stood, now, false);
        }
        CHECK(stood.charged_ns < 10 * MS);
        vc_stood_tells(&stood, 3, killed ? 0 : T, killed ? 0 : T + 2000 * MS);
        CHECK_NEAR(stood.charged_ns, killed ? 2000 * MS : 0, 30 * MS);
        CHECK(stood.excused_ns == 0);
    }
    begin();
    for (unsigned slot = 0; slot < 4; slot++)
        vc_stood_tells(&stood, slot, T, T);
    for (uint64_t now = T + 10 * MS; now <= T + 12000 * MS; now += 10 * MS) {
        look_until(now, now);
        vc_stood_asked(&stood, now, false);
    }
    CHECK_NEAR(stood.excused_ns, 5000 * MS, 30 * MS);
    CHECK_NEAR(stood.charged_ns, 7000 * MS, 30 * MS);
}

/* Whatever its file says: no lease, and its neighbours may save up what they had less. */
static void test_its_container_stands_still_until_that_is_paid(void)
{
    start(2);
    for (unsigned ms = 0; ms <= 400; ms++) {
        waits(0, T + ms * MS);
        waits(1, T + ms * MS);
        tenants[0].seen.open = ms > 20;
        tenants[0].seen.hides = ms > 20;
        tenants[0].seen.stood_ns = ms > 20 ? ms * (int64_t)MS : 0;
        vc_plan_decide(&plan, T + ms * MS);
        CHECK(ms < 200 || (plan.holder == 1 && !tenants[0].in_credit));
    }
    CHECK(tenants[0].closed_until_ns > T + 700 * MS && tenants[1].closed_until_ns == 0);
    CHECK(tenants[1].saved_ns > 50 * MS && tenants[0].unsaid_ns == T + 400 * MS && tenants[1].others_still_ns != 0);
    tenants[0].seen.stood_ns = 0; /* it goes on, and had nothing */
    tenants[0].seen.hides = false;
    vc_plan_decide(&plan, T + 401 * MS);
    CHECK(tenants[0].closed_until_ns == 0 && tenants[0].in_credit);
}

/* Children that hid work, stopped and were killed soon had 82 points of 50: siblings that went on took half of it away, and said that the card was free when it suited them; so did who only forged such an answer. */
static void test_who_hides_it_has_no_say(void)
{
    for (unsigned hidden = 0; hidden < 2; hidden++) {
        begin();
        stood.hidden = stood.hides = hidden;
        vc_stood_tells(&stood, 3, T, T);
        for (uint64_t now = T + 20 * MS; now <= T + 200 * MS; now += 20 * MS) {
            vc_stood_tells(&stood, 4, T, now - 19 * MS);
            look_until(now, now);
        }
        vc_stood_tells(&stood, 4, T, 0);
        CHECK_NEAR(stood.charged_ns, hidden ? 200 * MS : 110 * MS, 20 * MS);
        double before = stood.charged_ns;
        vc_stood_asked(&stood, T + 200 * MS, false);
        CHECK(hidden ? stood.charged_ns == before : stood.charged_ns < before - 20 * MS);
    }
}

int main(void)
{
    test_who_hides_it_has_no_say();
    test_who_stands_still_is_charged_what_passes();
    test_who_runs_or_has_nothing_there_is_not();
    test_who_goes_on_tells_it_itself();
    test_who_was_killed_keeps_its_charge();
    test_what_is_hidden_is_charged_at_once();
    test_what_passes_is_charged_once();
    test_what_siblings_told_and_others_had_is_taken_off();
    test_what_the_card_says_counts();
    test_what_was_excused_is_charged_to_who_is_killed();
    test_who_is_killed_soon_is_charged_what_passed_since_it_told();
    test_its_container_stands_still_until_that_is_paid();
    return check_failures != 0;
}
