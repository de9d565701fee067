/* Two counters: visitors, and those that keep them out. */
#include "cuda/work/visit.h"

#include <sched.h>

#include "base/clock.h"

uint64_t vc__work_state = UINT64_C(1) << VC_EPOCH_SHIFT;
static const uint64_t CAPTURES = UINT32_MAX;
static const uint64_t VISIT_NS = 50000000;
static uint32_t visits, forbidden, all_forbidden;

void vc_visit_change_captures(int change)
{
    vc_add(&vc__work_state, (uint64_t)(int64_t)change);
}

static bool begin(const uint32_t *who_forbids)
{
    vc_add(&visits, 1);
    if (vc_load(who_forbids) == 0)
        return true;
    vc_sub(&visits, 1);
    return false;
}

bool vc_visit_begin(void)
{
    return begin(&forbidden);
}

bool vc_visit_begin_living(void)
{
    return begin(&all_forbidden);
}

void vc_visit_end(void)
{
    vc_sub(&visits, 1);
}

void vc_visit_forbid(void)
{
    vc_add(&forbidden, 1);
    uint64_t until = vc_now_ns() + VISIT_NS;
    while (vc_load(&visits) != 0 && vc_now_ns() < until)
        sched_yield();
}

void vc_visit_allow(void)
{
    vc_sub(&forbidden, 1);
}

void vc_visit_forbid_all(void)
{
    vc_add(&all_forbidden, 1);
    vc_visit_forbid();
}

void vc_visit_allow_all(void)
{
    vc_visit_allow();
    vc_sub(&all_forbidden, 1);
}

void vc_visits_forked(void)
{
    vc_store(&visits, 0);
    vc_store(&forbidden, 0);
    vc_store(&all_forbidden, 0);
    __atomic_and_fetch(&vc__work_state, ~CAPTURES, __ATOMIC_SEQ_CST);
}
