/* The benchmark's driver that keeps nothing but a clock; it counts who asks for the current context, its streams can go, its contexts
 * are several, and a thread that is not the program's may take long to make an event. */
#define _GNU_SOURCE
#include <unistd.h>
#define cuEventCreate clock_cuEventCreate
#define cuCtxGetCurrent clock_cuCtxGetCurrent
#define cuCtxCreate_v2 clock_cuCtxCreate_v2
#include "../../benchmarks/throttle_null_driver.c"
#undef cuEventCreate
#undef cuCtxGetCurrent
#undef cuCtxCreate_v2

__attribute__((visibility("default"))) volatile uint64_t gate_questions, helpers_event_us;

API cuEventCreate(uint64_t **event, unsigned flags)
{
    if (gettid() != getpid())
        usleep(helpers_event_us);
    return clock_cuEventCreate(event, flags);
}

API cuCtxGetCurrent(handle *context)
{
    gate_questions++;
    return clock_cuCtxGetCurrent(context);
}

API cuCtxCreate_v2(handle *context, unsigned flags, int device) { *context = current = malloc(1); return (int)flags * device; }

API cuLaunchKernel_ptsz(handle f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, handle s, void **p,
                        void **x)
{
    return cuLaunchKernel(f, a, b, c, d, e, g, h, s, p, x);
}

API cuStreamDestroy_v2(handle stream) { free(stream); return 0; }
