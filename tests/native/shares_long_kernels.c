/* Kernels longer than a slice or a lease: nothing takes the card from them, and yet everybody has its share. */
#include "shares_fixture.h"

/* Kernels longer than a slice overlap at every change of lease: what each was charged stays near what it had. */
static void test_long_kernels_of_several_tenants_are_charged_what_they_had(void)
{
    static const uint64_t kernels[] = {5 * MS, 20 * MS};
    for (unsigned k = 0; k < 2; k++) {
        struct model *model = model_new(1, true);
        for (unsigned tenant = 0; tenant < 4; tenant++) {
            model_tenant(model, 10 * (tenant + 1), 10 * (tenant + 1), true);
            model_process(model, tenant, greedy(kernels[k]));
        }
        model_run(model, 9 * S);
        for (unsigned tenant = 0; tenant < 4; tenant++) {
            CHECK(model_error(model, tenant, 10.0 * (tenant + 1), S, S, 9 * S) <= 2.2);
            double real = (double)model_work_ns(model, tenant, 0, 9 * S);
            CHECK_NEAR((double)model_usage(model, tenant)->gpu_ns / real * 1000, 1000, 80);
        }
        model_free(model);
    }
}

/* A neighbour that waits for each of its short kernels behind slices of long ones that run on had next to nothing of that time: taken to have had half of it, it
 * let them have 60 points of 50 and, with kernels whose time changes, 54. */
static void test_long_kernels_beside_who_waits_for_each_of_its_own_have_their_limit(void)
{
    static const struct model_load loads[] = {
        {.kernel_ns = 20 * MS, .until_ns = 100 * S},
        {.kernel_ns = 5 * MS, .until_ns = 100 * S},
        {.kernel_ns = 20 * US, .slower_ns = 3 * MS, .change_ns = 7 * MS, .sync_every = 1, .until_ns = 100 * S},
    };
    for (unsigned i = 0; i < 3; i++) {
        struct model *model = model_new(1, true);
        model_tenant(model, 50, 50, true);
        model_process(model, 0, loads[i]);
        model_tenant(model, 30, 30, true);
        model_process(model, 1, (struct model_load){.kernel_ns = 10 * US, .host_ns = 3 * US, .sync_every = 1, .until_ns = 100 * S});
        model_run(model, 6 * S);
        double got = share(model, 0, S, 6 * S);
        CHECK(got >= 47 && got <= 51);
        model_free(model);
    }
}

/* Beside kernels longer than its lease a neighbour has its own lease whole, whatever it does: one of them that was let begin before the other's had ended had 66 points of 70 beside its
 * like, 28 of 30 were left to a steady one, and who was long now and then 35 of 30, the other's 46 of 50. */
static void test_leases_wait_for_long_kernels(void)
{
    static const struct {
        uint32_t cores, others;
        struct model_load load;
    } cases[] = {{70, 30, {.kernel_ns = MS, .until_ns = 100 * S}},
                 {50, 30, {.kernel_ns = 10 * US, .slower_ns = 3 * MS, .change_ns = 60 * MS, .sync_every = 1, .until_ns = 100 * S}},
                 {50, 30, {.kernel_ns = 10 * US, .host_ns = 3 * US, .slower_ns = 3 * MS, .seldom_ns = 60 * MS, .sync_every = 1, .until_ns = 100 * S}},
                 {70, 30, {.kernel_ns = 20 * MS, .until_ns = 100 * S}}};
    for (unsigned i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model *model = model_new(1, true);
        model_tenant(model, cases[i].cores, cases[i].cores, true);
        model_process(model, 0, greedy(20 * MS));
        model_tenant(model, cases[i].others, cases[i].others, true);
        model_process(model, 1, cases[i].load);
        model_run(model, 6 * S);
        double got = share(model, 0, S, 6 * S), other = share(model, 1, S, 6 * S);
        CHECK(got <= cases[i].cores + 1 && got >= cases[i].cores - 1.5);
        CHECK(other <= cases[i].others + 1 && other >= cases[i].others - 1.5);
        model_free(model);
    }
}

/* Beside a steady 70 on an H100, where a slice and two switches are long: who waits behind its own work does not wait for a card that cuts no kernel.
 * For ten seconds after that was believed the 30 had 51 points, charged 30. */
static void test_waiting_behind_work_of_its_own_shows_no_uncut_card(void)
{
    struct model *model = model_new(1, true);
    model_set_timing(model, &MODEL_H100);
    model_tenant(model, 30, 30, true);
    model_process(model, 0, greedy(20 * MS));
    model_tenant(model, 70, 70, true);
    model_process(model, 1, greedy(MS));
    model_run(model, 8 * S);
    CHECK_NEAR(share(model, 0, 4 * S, 8 * S), 29, 2);
    CHECK(share(model, 1, 4 * S, 8 * S) >= 68);
    model_free(model);
}

/* Work that ran up to 2 ms into the next lease was not waited for: kernels of 3 ms beside their like had 31 points of 30, charged 28.8, and the 70 65.6, charged 67.4. */
static void test_what_runs_on_for_less_than_a_slice_is_waited_for_too(void)
{
    static const struct model_timing *timings[] = {&MODEL_TIMING, &MODEL_H100_HOST};
    for (unsigned i = 0; i < 2; i++) {
        struct model *model = model_new(1, true);
        model_set_timing(model, timings[i]);
        for (unsigned tenant = 0; tenant < 2; tenant++) {
            model_tenant(model, tenant ? 70 : 30, tenant ? 70 : 30, true);
            model_process(model, tenant, greedy(3 * MS));
        }
        model_run(model, 9 * S);
        CHECK_NEAR(100 * share(model, 0, S, 9 * S), 2950, 100);
        CHECK(share(model, 1, S, 9 * S) >= 67.7);
        CHECK_NEAR((double)model_usage(model, 1)->gpu_ns / (double)model_work_ns(model, 1, 0, 9 * S) * 1000, 1000, 15);
        model_free(model);
    }
}

/* Kernels hardly longer than a slice: the last one of a lease has a whole slice of another inside. By equal parts a 70 was charged 69.7 for 68.1 points. */
static void test_kernels_as_long_as_a_slice_are_charged_what_they_had(void)
{
    struct model *model = model_new(1, true);
    model_set_timing(model, &MODEL_H100_HOST);
    model_tenant(model, 70, 70, true);
    model_process(model, 0, greedy(2100 * US));
    model_tenant(model, 30, 30, true);
    model_process(model, 1, greedy(MS));
    model_run(model, 6 * S);
    CHECK_NEAR((double)model_usage(model, 0)->gpu_ns / (double)model_work_ns(model, 0, 0, 6 * S) * 1000, 1000, 16);
    CHECK_NEAR((double)model_usage(model, 1)->gpu_ns / (double)model_work_ns(model, 1, 0, 6 * S) * 1000, 1000, 10);
    model_free(model);
}

/* What is left of a lease when the next kernel is too long for it goes to the next tenant, not to nobody. */
static void test_the_rest_of_a_lease_that_fits_no_kernel_is_not_lost(void)
{
    static const uint32_t cores[] = {30, 70};
    struct model *model = model_new(1, true);
    for (unsigned tenant = 0; tenant < 2; tenant++) {
        model_tenant(model, cores[tenant], cores[tenant], true);
        model_process(model, tenant, greedy(5 * MS));
    }
    model_run(model, 9 * S);
    CHECK_NEAR(100 * share(model, 0, S, 9 * S), 3000, 150);
    CHECK_NEAR(100 * share(model, 1, S, 9 * S), 7000, 200);
    CHECK(share(model, 0, S, 9 * S) + share(model, 1, S, 9 * S) >= 97.5);
    model_free(model);
}

/* Who waits for a neighbour's whole kernel has nothing of its time, and the neighbour nothing of his. */
static void test_a_card_that_cuts_no_kernel_is_divided_by_what_each_ran(void)
{
    static const uint32_t splits[2][4] = {{30, 70, 0, 0}, {10, 20, 30, 40}};
    static const uint64_t kernels[] = {1 * MS, 5 * MS, 20 * MS};
    for (unsigned split = 0; split < 2; split++)
        for (unsigned k = 0; k < 3; k++) {
            struct model *model = model_new(1, true);
            model_run_to_completion(model);
            double sum = 0;
            unsigned tenants = 0;
            for (; tenants < 4 && splits[split][tenants]; tenants++) {
                model_tenant(model, splits[split][tenants], splits[split][tenants], true);
                model_process(model, tenants, greedy(kernels[k]));
            }
            model_run(model, 9 * S);
            for (unsigned tenant = 0; tenant < tenants; tenant++) {
                CHECK_NEAR(100 * share(model, tenant, S, 9 * S), 100.0 * splits[split][tenant], 200);
                sum += share(model, tenant, S, 9 * S);
            }
            CHECK(sum >= 97);
            model_free(model);
        }
}

int main(void)
{
    test_long_kernels_of_several_tenants_are_charged_what_they_had();
    test_long_kernels_beside_who_waits_for_each_of_its_own_have_their_limit();
    test_leases_wait_for_long_kernels();
    test_waiting_behind_work_of_its_own_shows_no_uncut_card();
    test_what_runs_on_for_less_than_a_slice_is_waited_for_too();
    test_kernels_as_long_as_a_slice_are_charged_what_they_had();
    test_the_rest_of_a_lease_that_fits_no_kernel_is_not_lost();
    test_a_card_that_cuts_no_kernel_is_divided_by_what_each_ran();
    return check_failures != 0;
}
