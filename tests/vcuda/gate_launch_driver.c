/* The benchmark's driver that keeps nothing but a clock; it counts who asks for the current context, and its streams can go. */
#define cuCtxGetCurrent clock_cuCtxGetCurrent
#include "../../benchmarks/throttle_null_driver.c"
#undef cuCtxGetCurrent

__attribute__((visibility("default"))) volatile uint64_t gate_questions;

API cuCtxGetCurrent(handle *context)
{
    gate_questions++;
    return clock_cuCtxGetCurrent(context);
}

API cuStreamDestroy_v2(handle stream) { free(stream); return 0; }
