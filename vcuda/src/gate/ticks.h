/* The processor's tick counter, for the launch fast path; everything shared uses CLOCK_MONOTONIC (vc_clock.h). */
#ifndef VC_GATE_TIME_H
#define VC_GATE_TIME_H

#include <stdint.h>

#include "base/clock.h"

/* About 10 ns, against 24 to 80 ns for clock_gettime; its rate is found by vc_ticks_of_ns. */
static inline uint64_t vc_ticks(void)
{
#if defined(VC_TICKS_OF_TEST) /* a native test sets the clock */
    extern uint64_t vc_test_ticks;
    return vc_test_ticks;
#elif defined(__x86_64__)
    return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
    uint64_t ticks;
    __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
    return ticks;
#else
    return vc_now_ns();
#endif
}

/* Ticks in `ns` nanoseconds; 0 until the rate is known. The rate is measured between calls (first to later ones, at least
 * 5 ms apart) and kept: pass the pair of readings taken together. */
uint64_t vc_ticks_of_ns(uint64_t ns, uint64_t now_ns, uint64_t now_ticks);

#endif
