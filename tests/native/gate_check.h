/* CHECK for native tests: prints what failed and goes on; main returns check_failures. */
#ifndef GATE_CHECK_H
#define GATE_CHECK_H

#include <stdint.h>
#include <stdio.h>

static int check_failures;

#define CHECK(condition)                                                             \
    do {                                                                             \
        if (!(condition)) {                                                          \
            printf("%s:%d: %s: failed: %s\n", __FILE__, __LINE__, __func__, #condition); \
            check_failures++;                                                        \
        }                                                                            \
    } while (0)

#define CHECK_NEAR(value, wanted, tolerance)                                                             \
    do {                                                                                                 \
        double value_ = (double)(value), wanted_ = (double)(wanted);                                     \
        if (value_ < wanted_ - (tolerance) || value_ > wanted_ + (tolerance)) {                          \
            printf("%s:%d: %s: %s is %.0f, not %.0f\n", __FILE__, __LINE__, __func__, #value, value_, wanted_); \
            check_failures++;                                                                            \
        }                                                                                                \
    } while (0)

#define MS 1000000ull
#define US 1000ull

#endif
