/* What the tests of shares on the model card have in common: loads, and the share that came of them. */
#ifndef SHARES_FIXTURE_H
#define SHARES_FIXTURE_H

#include "gate_check.h"
#include "gate_model.h"

#define S 1000000000ull

static inline struct model_load greedy(uint64_t kernel_ns)
{
    return (struct model_load){.kernel_ns = kernel_ns, .until_ns = 100 * S};
}

static inline double share(const struct model *model, unsigned tenant, uint64_t from, uint64_t to)
{
    return 100.0 * (double)model_work_ns(model, tenant, from, to) / (double)(to - from);
}

/* One container with `count` streams of such a load, alone on its card or beside a greedy 70. */
static inline struct model *streams(uint32_t cores, bool beside, unsigned count, struct model_load load)
{
    struct model *model = model_new(1, true);
    model_tenant(model, cores, cores, beside);
    model_process(model, 0, load);
    for (unsigned stream = 1; stream < count; stream++)
        model_thread(model, load);
    if (beside) {
        model_tenant(model, 70, 70, true);
        model_process(model, 1, greedy(MS));
    }
    return model;
}

#endif
