/* Programs whose hosts don't fill the card: what they keep of it, and what they get side by side. */
#include "shares_fixture.h"

/* What limits it is its host: it is at work most of the time, and waits at the gate for no more than others' leases. */
static void test_a_launch_bound_program_keeps_what_its_share_is_of_the_time(void)
{
    static const uint32_t cores[] = {30, 70};
    struct model_load bound = {.kernel_ns = 10 * US, .host_ns = 16 * US, .sync_every = 16000, .until_ns = 100 * S};
    double native = 100.0 * 10 / 20;
    struct model *model = model_new(1, true);
    model_set_timing(model, &MODEL_H100);
    for (unsigned tenant = 0; tenant < 2; tenant++) {
        model_tenant(model, cores[tenant], cores[tenant], true);
        model_process(model, tenant, bound);
    }
    model_run(model, 5 * S);
    CHECK(share(model, 0, S, 5 * S) >= 0.28 * native);
    CHECK(share(model, 1, S, 5 * S) >= 0.66 * native);
    model_free(model);
}

static struct model *launch_bound(uint32_t first_limit, uint32_t second_limit, struct model_load first, struct model_load second)
{
    struct model *model = model_new(1, true);
    model_set_timing(model, &MODEL_H100);
    model_tenant(model, 30, first_limit, true);
    model_tenant(model, 70, second_limit, true);
    model_process(model, 0, first);
    model_process(model, 1, second);
    model_run(model, 6 * S);
    return model;
}

/* Two whose hosts don't fill the card leave it to each other: the same programs without shares get 89 % of what each does alone. */
static void test_launch_bound_programs_launch_side_by_side(void)
{
    struct model_load bound = {.kernel_ns = 10 * US, .host_ns = 16 * US, .sync_every = 16000, .until_ns = 100 * S};
    struct model_load many = {.kernel_ns = 5 * US, .longest_ns = 60 * US, .host_ns = 30 * US, .sync_every = 5600, .until_ns = 100 * S};
    double alone = 52.4, many_alone = 67;
    struct model *model = launch_bound(30, 70, bound, bound);
    CHECK(share(model, 0, S, 6 * S) >= 0.45 * alone && share(model, 0, S, 6 * S) <= 31);
    CHECK(share(model, 1, S, 6 * S) >= 0.9 * alone);
    model_free(model);
    model = launch_bound(100, 100, bound, bound);
    CHECK(share(model, 1, S, 6 * S) >= 0.75 * alone);
    CHECK(share(model, 0, S, 6 * S) + share(model, 1, S, 6 * S) >= 68);
    model_free(model);
    model = launch_bound(30, 70, bound, many);
    CHECK(share(model, 0, S, 6 * S) <= 31 && share(model, 1, S, 6 * S) >= 0.8 * many_alone);
    CHECK(share(model, 0, S, 6 * S) + share(model, 1, S, 6 * S) >= 75);
    model_free(model);
}

/* Nobody gets less than by leases when the other turns greedy, and who runs longer kernels side by side than it was measured with gets nothing by it. */
static void test_side_by_side_nobody_takes_more_than_its_own(void)
{
    struct model_load bound = {.kernel_ns = 10 * US, .host_ns = 16 * US, .sync_every = 16000, .until_ns = 100 * S};
    double alone = 52.4;
    static const uint64_t slynesses[] = {50 * US, 300 * US, 2 * MS};
    for (unsigned i = 0; i < 3; i++) {
        struct model_load sly = bound;
        sly.sly_ns = slynesses[i];
        struct model *model = launch_bound(30, 70, sly, bound);
        CHECK(share(model, 0, S, 6 * S) <= 33);
        CHECK(share(model, 1, S, 6 * S) >= 0.58 * alone);
        model_free(model);
        sly.sync_every = 1; /* each is waited for: an interval of its own */
        model = launch_bound(30, 70, sly, bound);
        CHECK(share(model, 0, S, 6 * S) <= 33);
        CHECK(share(model, 1, S, 6 * S) >= 0.66 * alone);
        model_free(model);
    }
}

int main(void)
{
    test_a_launch_bound_program_keeps_what_its_share_is_of_the_time();
    test_launch_bound_programs_launch_side_by_side();
    test_side_by_side_nobody_takes_more_than_its_own();
    return check_failures != 0;
}
