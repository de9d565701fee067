/* The tick counter of native tests: they set it. */
#include <stdint.h>

uint64_t vc_test_ticks;
