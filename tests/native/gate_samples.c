/* Samples: what they find, what they learn, and what follows. */
#include "gate_fixture.h"

static uint64_t throw(uint64_t *dice)
{
    *dice ^= *dice << 13, *dice ^= *dice >> 7, *dice ^= *dice << 17;
    return *dice;
}

/* So long until the helper looks again. */
static uint64_t pause_of(const struct vc_samples *samples, const struct vc_card_usage *container, uint64_t *dice)
{
    uint64_t wait = vc_samples_wait_ns(samples, container);
    return wait / 2 + throw(dice) % wait;
}

/* A process whose card works `busy` of each 1000 us, of which `charged` are charged: what samples have added to that after so many seconds. */
static uint64_t added(unsigned busy, unsigned charged, unsigned seconds, uint64_t others, bool clear)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T, due = 0, others_ns = 0;
    int64_t account = 0;
    while (now < T + seconds * 1000 * MS) {
        uint64_t passed = pause_of(&samples, NULL, &dice);
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
    unsigned wrong = 0;
    for (unsigned busy = 50; busy <= 1000; busy += 50) {
        wrong += added(busy, busy, 60, 0, true) != 0;
        wrong += added(busy, busy / 2, 60, busy / 2, true) != 0; /* others had half of it */
    }
    CHECK(wrong <= 4); /* in 40 minutes */
    CHECK(added(800, 10, 60, 0, false) == 0); /* others may have had it */
    uint64_t due = added(800, 10, 2, 0, true);
    CHECK(due > 5 * MS && due < 20 * MS); /* before all was marked, for 2 s */
    due = added(800, 10, 60, 0, true); /* twice as long each time: 2, 4, 8, 16, 32 s */
    CHECK(due > 25 * MS && due < 100 * MS);
    CHECK(added(130, 100, 60, 0, true) > 0);
}

/* The card works all the time, of which a part is charged: what was hidden until that is known, on average, and what of it samples add. */
static uint64_t hidden_before_it_is_sure(unsigned charged, uint64_t *found)
{
    uint64_t dice = 88172645463325252u, hidden = 0;
    *found = 0;
    for (unsigned i = 0; i < 100; i++) {
        struct vc_samples samples = {0};
        uint64_t now = T;
        while (samples.all_until_ns == 0) {
            now += pause_of(&samples, NULL, &dice);
            struct vc_sample sample = {.now_ns = now, .charged_ns = (int64_t)((now - T) * charged / 1000), .rate_ppm = charged * 1000, .busy = throw(&dice) >> 32 & 1, .clear = true};
            *found += vc_samples_add(&samples, NULL, &sample);
        }
        hidden += (now - T) / 2 - (now - T) * charged / 1000;
    }
    *found /= 100;
    return hidden / 100;
}

static void test_little_is_hidden_until_it_is_sure_and_all_of_it_charged(void)
{
    uint64_t found, hidden = hidden_before_it_is_sure(100, &found);
    CHECK(hidden < 30 * MS && found > hidden * 9 / 10 && found < hidden * 12 / 10);
    hidden = hidden_before_it_is_sure(300, &found);
    CHECK(hidden < 45 * MS && found > hidden * 9 / 10 && found < hidden * 12 / 10);
}

/* Each launch of 10 us of work is `way` ns on its way to the card, one every 25 us. */
static unsigned times_marked(uint64_t way, unsigned seconds)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T;
    unsigned times = 0;
    vc_samples_mark_until(&samples, T, T + 250 * MS); /* as every process's first ones are */
    while (now < T + seconds * 1000 * MS) {
        now += pause_of(&samples, NULL, &dice);
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
        uint64_t passed = pause_of(&samples, NULL, &dice), each = 1 * US + hidden;
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

/* For 400 ms each launch seems to be 25 us on its way, then 20 us are hidden behind each, but not where it is marked. */
static int64_t hidden_by_taught_launches(void)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T;
    int64_t account = 0, had = 0;
    vc_samples_mark_until(&samples, T, T + 250 * MS);
    while (now < T + 10000 * MS) {
        uint64_t passed = pause_of(&samples, NULL, &dice), way = now < T + 400 * MS ? 25 * US : 0, hides = way == 0 && now >= samples.all_until_ns ? 20 * US : 0;
        now += passed;
        had += (int64_t)(passed / (40 * US) * hides);
        account += (int64_t)(passed / (40 * US) * US);
        struct vc_sample sample = {.now_ns = now, .charged_ns = account, .launches = now / (40 * US), .rate_ppm = 100000, .clear = true};
        sample.busy = (dice >> 32) % (40 * US) < US + way + hides;
        had -= (int64_t)vc_samples_add(&samples, NULL, &sample);
    }
    return had;
}

static void test_what_launches_were_taught_to_take_hides_little(void)
{
    CHECK(hidden_by_taught_launches() < 100 * (int64_t)MS); /* a point */
}

/* Nobody looks in the pauses, and the first look is at once behind a launch. */
static void test_requests_with_long_pauses_between_are_not_seen_twice(void)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, now = T;
    int64_t account = 0;
    for (unsigned request = 0; request < 1000; request++, now += 30 * MS) {
        uint64_t from = now, next = now + throw(&dice) % MS;
        for (; next < from + 25 * MS; next += pause_of(&samples, NULL, &dice)) {
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
    struct vc_card_usage container = {0};
    for (uint64_t born = T; born < T + 10000 * MS && due == 0; born += lives * MS) {
        struct vc_samples samples = {0};
        for (uint64_t now = born; now < born + lives * MS && due == 0; now += pause_of(&samples, &container, &dice)) {
            struct vc_sample sample = {.now_ns = now, .charged_ns = (int64_t)((now - born) * charged / 1000), .rate_ppm = 500000, .busy = throw(&dice) >> 32 & 1, .clear = true};
            due += vc_samples_add(&samples, &container, &sample);
        }
    }
    return due;
}

static void test_what_processes_that_end_soon_were_not_charged_adds_up(void)
{
    CHECK(added_to_container(500, 80) == 0);
    CHECK(added_to_container(10, 80) > 20 * MS);
}

/* Processes of 400 ms, one after another, each of which has the card half of the time and is charged `charged` of 1000 us; all that they tell the file is cleared. When the arbiter has all marked, in ms;
 * 0: not in 10 s. None of them is sure by itself. */
static uint64_t marked_by_the_arbiter_after(uint64_t charged)
{
    uint64_t dice = 88172645463325252u, heard = T;
    struct vc_samples all = {0};
    struct vc_samples_told slot = {0};
    for (uint64_t born = T; born < T + 10000 * MS; born += 400 * MS) {
        struct vc_card_usage container = {0};
        struct vc_samples samples = {0};
        for (uint64_t now = born; now < born + 400 * MS; now += pause_of(&samples, &container, &dice)) {
            container = (struct vc_card_usage){0};
            struct vc_sample sample = {.now_ns = now, .charged_ns = (int64_t)((now - born) * charged / 1000), .rate_ppm = 500000, .busy = throw(&dice) >> 32 & 1, .clear = true,
                                       .doubt = all.doubt, .all_until_ns = all.all_until_ns, .all_for_ns = all.all_for_ns};
            CHECK(vc_samples_add(&samples, &container, &sample) == 0);
            if (now - heard > 10 * MS) {
                vc_samples_hear(&all, now, vc_samples_found(&slot, (struct vc_samples_told){(uint64_t)sample.charged_ns, samples.more_ns, samples.less_ns, 0}), 500000);
                heard = now;
            }
            if (all.all_until_ns != 0) {
                CHECK(samples.all_until_ns == 0 && vc_samples_suspect(all.all_until_ns, all.all_for_ns, now + 10000 * MS));
                sample.now_ns = now += MS;
                sample.all_until_ns = all.all_until_ns;
                vc_samples_add(&samples, &container, &sample);
                CHECK(samples.all_until_ns == all.all_until_ns);
                return (now - T) / MS;
            }
        }
    }
    return 0;
}

static void test_what_processes_found_adds_up_where_no_tenant_can_write(void)
{
    CHECK(marked_by_the_arbiter_after(500) == 0);
    uint64_t after = marked_by_the_arbiter_after(440); /* 24 ms each, of 110 that one must hide to be sure */
    CHECK(after > 400 && after < 3000);
}

/* Others may tell in the place of one that is not there. */
static void test_what_was_found_is_taken_off_only_by_who_was_charged_as_much(void)
{
    struct vc_samples_told slot = {0};
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){20 * MS, 30 * MS, 10 * MS, 0}) == 20 * (int64_t)MS);
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){20 * MS, 30 * MS, 12 * MS, 0}) == -2 * (int64_t)MS);
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){0, 0, 0, 0}) == 0); /* what one found that ended is kept */
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){0, 0, 100 * MS, 0}) == 0);
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){2 * MS, 0, 100 * MS, 0}) == -2 * (int64_t)MS);
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){9 * MS, 0, 100 * MS, 0}) == -7 * (int64_t)MS);
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){9 * MS, 0, 0, 0}) == 0);
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){9 * MS, 0, 100 * MS, 0}) == 0); /* … and not for the same again */
    CHECK(vc_samples_found(&slot, (struct vc_samples_told){10 * MS, 0, 100 * MS, 0}) == -1 * (int64_t)MS);
}

/* Two processes with work on the card all the time, of which each is charged `charged` of 1000 us and says that it is there: what samples add to one in 20 s. */
static uint64_t added_beside(uint64_t charged, uint64_t told)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u, due = 0;
    struct vc_card_usage container = {0};
    for (uint64_t now = T; now < T + 20000 * MS && due == 0; now += pause_of(&samples, &container, &dice)) {
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

/* 12,000 launches in a second of a process that has the card with `siblings`, and is charged its part: when all is marked for what they might hide. */
static bool marked_for_launches(uint32_t siblings)
{
    struct vc_samples samples = {0};
    uint64_t dice = 88172645463325252u;
    struct vc_card_usage container = {0};
    for (uint64_t now = T; now < T + 5000 * MS && samples.all_until_ns == 0; now += pause_of(&samples, &container, &dice)) {
        struct vc_sample sample = {.now_ns = now, .charged_ns = (int64_t)((now - T) / (1 + siblings)), .siblings_ns = (now - T) * siblings / (1 + siblings), .siblings = siblings,
                                   .launches = (now - T) * 12 / MS, .rate_ppm = 900000, .busy = true, .clear = true};
        vc_samples_add(&samples, &container, &sample);
    }
    return samples.all_until_ns != 0;
}

static void test_what_is_divided_among_siblings_hides_their_part_of_launches(void)
{
    CHECK(marked_for_launches(0) && !marked_for_launches(3) && !marked_for_launches(7));
}

static void test_what_samples_find_is_charged_and_then_all_is_marked(void)
{
    start(10, 10, 0);
    uint64_t now = T;
    for (unsigned i = 0; i < 200 && gate.all_until_ns == 0; i++, now += 2 * MS) {
        limits.arbiter_heartbeat_ns = now;
        vc_gate_sampled(&gate, now, true, false);
    }
    CHECK(gate.all_until_ns > now && (int64_t)usage.gpu_ns > (int64_t)(40 * MS) && gate.own.taken_ns > (int64_t)(40 * MS));
    start(10, 10, VC_CARD_SHARED); /* or was stopped, and waits for nothing: a steady 70 beside such was charged 68 for 62 */
    for (now = T; now < T + 400 * MS; now += 2 * MS) {
        lease(now, UINT64_MAX, 0);
        limits.cards[0].others_still_ns = now - 4 * MS;
        vc_gate_sampled(&gate, now, true, false);
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
        vc_gate_sampled(&gate, now, i * 7 % 16 < busy, false);
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

/* Each ms a launch and a look, whose moment somebody chose or nobody: whether what was thought to be little is taken for more. */
static bool marked_where_looks_are_late(bool held, bool launches)
{
    start(10, 10, 0);
    uint64_t now = T;
    for (unsigned i = 0; i < 200 && gate.all_until_ns == 0; i++, now += MS) {
        limits.arbiter_heartbeat_ns = now;
        gate.launches += launches;
        vc_gate_sampled(&gate, now, false, held);
    }
    return gate.all_until_ns != 0;
}

static void test_what_was_launched_before_a_look_that_was_held_up_counts_as_seen(void)
{
    CHECK(marked_where_looks_are_late(true, true) && !marked_where_looks_are_late(false, true) && !marked_where_looks_are_late(true, false));
}

int main(void)
{
    test_what_was_launched_before_a_look_that_was_held_up_counts_as_seen();
    test_samples_find_what_is_not_charged_and_nothing_else();
    test_little_is_hidden_until_it_is_sure_and_all_of_it_charged();
    test_what_launches_were_taught_to_take_hides_little();
    test_samples_learn_how_long_launches_are_on_their_way();
    test_little_is_hidden_in_the_way_of_many_launches_to_the_card();
    test_requests_with_long_pauses_between_are_not_seen_twice();
    test_what_processes_that_end_soon_were_not_charged_adds_up();
    test_what_processes_found_adds_up_where_no_tenant_can_write();
    test_what_was_found_is_taken_off_only_by_who_was_charged_as_much();
    test_processes_that_have_the_card_at_the_same_time_are_seen_once();
    test_what_is_divided_among_siblings_hides_their_part_of_launches();
    test_what_samples_find_is_charged_and_then_all_is_marked();
    test_what_is_busy_in_its_lease_when_nobody_thought_so_is_marked();
    return check_failures != 0;
}
