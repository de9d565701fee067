/* The one clock of the region: CLOCK_MONOTONIC in nanoseconds, common to all processes of a boot. */
#ifndef VC_CLOCK_H
#define VC_CLOCK_H

#include <stdint.h>
#include <time.h>

static inline uint64_t vc_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static inline uint64_t vc_later(uint64_t a, uint64_t b)
{
    return a > b ? a : b;
}

static inline uint64_t vc_earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

static inline void vc_sleep_ns(uint64_t ns)
{
    struct timespec pause = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&pause, NULL); /* a signal may shorten it: callers loop on a deadline */
}

#endif
