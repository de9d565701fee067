/* What came out of the model, by the card's own books; see gate_model.h. */
#include <stdlib.h>
#include <string.h>

#include "gate_model_parts.h"

uint64_t model_work_ns(const struct model *model, unsigned tenant, uint64_t from_ns, uint64_t to_ns)
{
    uint64_t sum = 0;
    for (uint64_t bin = from_ns / 100000; bin < to_ns / 100000 && bin < MODEL_BINS; bin++)
        sum += model->tenants[tenant].bins[bin];
    return sum;
}

uint64_t model_process_ns(const struct model *model, unsigned process)
{
    return model->processes[process].worked_ns;
}

double model_error(const struct model *model, unsigned tenant, double target, uint64_t window_ns, uint64_t from_ns,
                   uint64_t to_ns)
{
    double sum = 0;
    unsigned windows = 0;
    for (uint64_t at = from_ns; at + window_ns <= to_ns; at += window_ns, windows++) {
        double points = 100.0 * (double)model_work_ns(model, tenant, at, at + window_ns) / (double)window_ns;
        sum += points > target ? points - target : target - points;
    }
    return windows ? sum / windows : 1e9;
}

static int ascending(const void *left, const void *right)
{
    uint64_t a = *(const uint64_t *)left, b = *(const uint64_t *)right;
    return a < b ? -1 : a > b;
}

uint64_t model_burst_percentile(const struct model *model, unsigned tenant, double part)
{
    static uint64_t sorted[MODEL_BURSTS];
    unsigned count = model->tenants[tenant].burst_count;
    if (count == 0)
        return 0;
    memcpy(sorted, model->tenants[tenant].bursts, count * sizeof *sorted);
    qsort(sorted, count, sizeof *sorted, ascending);
    unsigned index = (unsigned)(part * count);
    return sorted[index < count ? index : count - 1];
}
