/* What a tenant writes into its own usage file gives it nothing. */
#include "shares_fixture.h"

/* Into its usage file, every millisecond: whole credit, a clock from which it has flowed in since the beginning of time, or all that says that it
 * has done nothing. */
static void write_into(struct vc_card_usage *usage, unsigned what)
{
    usage->credit_ns = what == 1 ? usage->credit_ns : INT64_MAX;
    usage->credit_updated_ns = what == 1 ? 0 : usage->credit_updated_ns;
    if (what == 2) {
        usage->gpu_ns = usage->predicted_finish_ns = 0;
        usage->waiting_until_ns = UINT64_MAX;
    }
}

static void test_what_a_tenant_writes_gives_it_nothing(void)
{
    for (unsigned run = 0; run < 12; run++) {
        unsigned what = run % 3, beside = run / 3 % 2, processes = run < 6 ? 1 : 8;
        struct model *model = model_new(1, true);
        model_tenant(model, 10, 10, beside);
        for (unsigned p = 0; p < processes; p++)
            model_process(model, 0, greedy(MS));
        if (beside) {
            model_tenant(model, 70, 70, true);
            model_process(model, 1, greedy(MS));
        }
        for (uint64_t at = MS; at <= 5 * S; at += MS) {
            write_into(model_usage(model, 0), what);
            model_run(model, at);
        }
        CHECK(share(model, 0, S, 5 * S) <= 11);
        CHECK(!beside || share(model, 1, S, 5 * S) >= 69);
        model_free(model);
    }
}

/* Half of what passes was siblings', says the file, who then take it back: 50.7 of 10 were had. */
static void test_siblings_that_are_made_up_take_nothing_from_the_charge(void)
{
    struct model *model = model_new(1, true);
    model_tenant(model, 10, 10, false);
    model_process(model, 0, greedy(20 * MS));
    for (uint64_t at = MS; at <= 5 * S; at += MS) {
        model_usage(model, 0)->credit_ns = INT64_MAX;
        model_usage(model, 0)->gpu_ns = at % (100 * MS) * 2;
        model_run(model, at);
    }
    CHECK(share(model, 0, S, 5 * S) <= 11);
    model_free(model);
}

/* As on a card that cuts no kernel it waits for 20 of each 30 ms, says the file. Then nobody waited for its long kernels to end, and nothing of their time was taken off what the neighbour was
 * charged beside them: that had 62.6 points, charged 70.0, and the liar 18.0. */
static void test_waiting_that_is_made_up_costs_the_neighbour_nothing(void)
{
    struct model *model = model_new(1, true);
    model_tenant(model, 30, 30, true);
    model_process(model, 0, greedy(20 * MS));
    model_tenant(model, 70, 70, true);
    model_process(model, 1, greedy(MS));
    for (uint64_t at = MS / 2; at <= 5 * S; at += MS / 2) {
        uint64_t now = S + at, phase = at % (30 * MS);
        model_usage(model, 0)->began_ns = phase < 20 * MS ? VC_NOT_BEGUN | (now - phase) : now - MS / 10;
        model_run(model, at);
    }
    CHECK(share(model, 0, S, 5 * S) <= 31 && share(model, 1, S, 5 * S) >= 68);
    CHECK_NEAR((double)model_usage(model, 1)->gpu_ns / (double)model_work_ns(model, 1, 0, 5 * S) * 1000, 1000, 15);
    model_free(model);
}

int main(void)
{
    test_what_a_tenant_writes_gives_it_nothing();
    test_siblings_that_are_made_up_take_nothing_from_the_charge();
    test_waiting_that_is_made_up_costs_the_neighbour_nothing();
    return check_failures != 0;
}
