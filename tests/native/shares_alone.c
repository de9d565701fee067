/* What one container gets of a card that nobody else uses: its limit, whatever its kernels and processes are. */
#include "shares_fixture.h"

static void test_a_cap_holds_for_short_and_long_kernels(void)
{
    static const uint64_t kernels[] = {10 * US, 1 * MS, 5 * MS, 100 * MS};
    static const uint32_t caps[] = {5, 30, 90};
    for (unsigned k = 0; k < 4; k++)
        for (unsigned c = 0; c < 3; c++) {
            struct model *model = model_new(1, false);
            model_tenant(model, caps[c], caps[c], false);
            model_process(model, 0, greedy(kernels[k]));
            model_run(model, 5 * S);
            CHECK_NEAR(100 * share(model, 0, S, 5 * S), 100.0 * caps[c], 100);
            if (kernels[k] <= MS)
                CHECK(model_error(model, 0, caps[c], 100 * MS, S, 5 * S) <= 3.0);
            model_free(model);
        }
}

static void test_all_processes_of_a_container_share_one_cap(void)
{
    struct model *model = model_new(1, false);
    model_tenant(model, 30, 30, false);
    for (unsigned i = 0; i < 4; i++)
        model_process(model, 0, greedy(MS));
    model_run(model, 4 * S);
    CHECK_NEAR(share(model, 0, S, 4 * S), 30, 1);
    model_free(model);
}

static void test_a_live_change_of_the_limit_takes_effect(void)
{
    struct model *model = model_new(1, true);
    model_tenant(model, 30, 30, false);
    model_process(model, 0, greedy(MS));
    model_run(model, 2 * S);
    model_limit(model, 0)->cores = model_limit(model, 0)->core_limit = 60;
    model_run(model, 4 * S);
    CHECK_NEAR(share(model, 0, S, 2 * S), 30, 1);
    CHECK_NEAR(share(model, 0, 2200 * MS, 4 * S), 60, 1);
    model_free(model);
}

int main(void)
{
    test_a_cap_holds_for_short_and_long_kernels();
    test_all_processes_of_a_container_share_one_cap();
    test_a_live_change_of_the_limit_takes_effect();
    return check_failures != 0;
}
