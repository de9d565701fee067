/* What a container gets whose launches go to several streams, by one thread or many: as much as with one. */
#include "shares_fixture.h"

static void test_threads_with_a_stream_each_get_what_one_gets(void)
{
    struct model_load rounds = {.kernel_ns = 100 * US, .sync_every = 8, .until_ns = 100 * S};
    struct model *model = model_new(1, true);
    model_tenant(model, 30, 30, false);
    model_process(model, 0, rounds);
    for (unsigned thread = 1; thread < 16; thread++)
        model_thread(model, rounds);
    model_run(model, 2 * S);
    CHECK_NEAR(share(model, 0, S, 2 * S), 30, 1);
    model_free(model);
}

/* What one stream leaves unmarked lies within another's interval, and what they have in common is paid once: neither twice nor not at all, whether a
 * thread has them all or each has its own. */
static void test_streams_beside_each_other_get_what_one_gets(void)
{
    static const struct {
        unsigned streams;
        struct model_load load;
    } cases[] = {{8, {.kernel_ns = 300 * US, .in_turn = true, .until_ns = 100 * S}},
                 {4, {.kernel_ns = 300 * US, .until_ns = 100 * S}},
                 {2, {.kernel_ns = 20 * US, .sync_every = 8, .until_ns = 100 * S}},
                 {48, {.kernel_ns = 20 * US, .sync_every = 8, .until_ns = 100 * S}},
                 {48, {.kernel_ns = 100 * US, .sync_every = 8, .until_ns = 100 * S}},
                 {8, {.kernel_ns = 300 * US, .slower_ns = 3 * MS, .in_turn = true, .until_ns = 100 * S}},
                 {16, {.kernel_ns = 100 * US, .slower_ns = MS, .sync_every = 8, .until_ns = 100 * S}}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++)
        for (unsigned beside = 0; beside < 2; beside++) {
            struct model *model = streams(beside ? 30 : 50, beside, cases[i].streams, cases[i].load);
            model_run(model, 2500 * MS);
            double got = share(model, 0, 1500 * MS, 2500 * MS), wanted = beside ? 30 : 50, other = beside ? share(model, 1, 1500 * MS, 2500 * MS) : 70;
            CHECK(got >= wanted - 3 && got <= wanted + 1);
            bool longer = cases[i].load.slower_ns > 2 * MS; /* than a slice: 66.8 to 68.7 and sums of 96 to 97.3, second by second */
            CHECK(other >= (longer ? 66.5 : 68) && (!beside || got + other >= (longer ? 95.5 : 96)));
            model_free(model);
        }
}

/* The end of a burst is marked when its thread sleeps at the gate, long after it: what other streams did since was taken to be paid (82 of 50). */
static void test_bursts_on_streams_in_turn_are_paid_for(void)
{
    static const struct {
        unsigned streams;
        struct model_load load;
    } cases[] = {{3, {.kernel_ns = 50 * US, .burst = 16, .pause_ns = 600 * US}}, {4, {.kernel_ns = 50 * US, .burst = 16, .pause_ns = 600 * US}},
                 {4, {.kernel_ns = 20 * US, .burst = 20, .pause_ns = 300 * US}}, {16, {.kernel_ns = 20 * US, .burst = 20, .pause_ns = 300 * US}},
                 {16, {.kernel_ns = 50 * US, .burst = 4, .pause_ns = 200 * US}}, {8, {.kernel_ns = 10 * US, .burst = 16, .pause_ns = 100 * US}}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model_load load = cases[i].load;
        load.in_turn = true;
        load.until_ns = 100 * S;
        struct model *model = streams(50, false, cases[i].streams, load);
        model_run(model, 2500 * MS);
        CHECK_NEAR(share(model, 0, 500 * MS, 2500 * MS), 50, 1.5);
        model_free(model);
    }
}

/* A host that holds them up between the card's idling and the next launch is no work: 48 threads had 21 points, and one call in eight is held up here. */
static void test_threads_that_are_held_up_pay_for_less_of_it(void)
{
    struct model *model = streams(50, false, 48, (struct model_load){.kernel_ns = 100 * US, .sync_every = 8, .until_ns = 100 * S});
    struct model_timing busy = MODEL_TIMING;
    busy.stall_every = 8;
    busy.stall_ns = 3 * MS;
    busy.stalls_marks = true;
    model_set_timing(model, &busy);
    model_run(model, 4 * S);
    CHECK(share(model, 0, S, 4 * S) >= 26);
    model_free(model);
}

int main(void)
{
    test_threads_with_a_stream_each_get_what_one_gets();
    test_streams_beside_each_other_get_what_one_gets();
    test_bursts_on_streams_in_turn_are_paid_for();
    test_threads_that_are_held_up_pay_for_less_of_it();
    return check_failures != 0;
}
