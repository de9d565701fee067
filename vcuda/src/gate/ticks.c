/* The tick counter's rate, measured once against CLOCK_MONOTONIC without ever waiting for it. */
#include "gate/ticks.h"

static const uint64_t BASELINE_NS = 5000000;

/* Ticks per ns as 32.32 fixed point; 0 while unknown. */
static uint64_t rate_fixed;
static uint64_t first_ns, first_ticks;

uint64_t vc_ticks_of_ns(uint64_t ns, uint64_t now_ns, uint64_t now_ticks)
{
    uint64_t rate = __atomic_load_n(&rate_fixed, __ATOMIC_RELAXED);
    if (rate == 0) {
        uint64_t started = __atomic_load_n(&first_ns, __ATOMIC_ACQUIRE);
        if (started == 0) {
            __atomic_store_n(&first_ticks, now_ticks, __ATOMIC_RELAXED);
            __atomic_store_n(&first_ns, now_ns, __ATOMIC_RELEASE);
            return 0;
        }
        uint64_t before = __atomic_load_n(&first_ticks, __ATOMIC_RELAXED);
        if (now_ns < started + BASELINE_NS || now_ticks <= before)
            return 0;
        rate = (uint64_t)(((unsigned __int128)(now_ticks - before) << 32) / (now_ns - started));
        __atomic_store_n(&rate_fixed, rate, __ATOMIC_RELAXED);
    }
    return (uint64_t)(((unsigned __int128)ns * rate) >> 32);
}
