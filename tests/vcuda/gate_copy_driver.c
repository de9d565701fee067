/* The benchmark's driver that keeps nothing but a clock, with the copies that the simulated driver's version does not have: each
 * takes 5 ms of the stream's time. Addresses from 1 TiB on are the card's. */
#include "../../benchmarks/throttle_null_driver.c"

API cuPointerGetAttribute(unsigned *type, int attribute, unsigned long long pointer)
{
    *type = pointer >> 40 ? 2 : 1;
    return attribute != 2;
}

static int takes_5_ms(void)
{
    uint64_t now = now_ns();
    busy_until = (busy_until < now ? now : busy_until) + 5000000;
    return 0;
}

#define COPY(name) API name(void) { return takes_5_ms(); }
#define STREAM_COPY(name) COPY(name) COPY(name##_ptsz)
STREAM_COPY(cuMemcpyBatchAsync)
STREAM_COPY(cuMemcpyBatchAsync_v2)
STREAM_COPY(cuMemcpy3DBatchAsync)
STREAM_COPY(cuMemcpy3DBatchAsync_v2)
STREAM_COPY(cuMemcpyWithAttributesAsync)
STREAM_COPY(cuMemcpy3DWithAttributesAsync)
STREAM_COPY(cuMemBatchDecompressAsync)
COPY(cuMemcpyAtoA)
COPY(cuMemcpyAtoA_v2)
COPY(cuMemcpyAtoA_v2_ptds)
COPY(cuMemcpyAtoD)
COPY(cuMemcpyAtoD_v2)
COPY(cuMemcpyAtoD_v2_ptds)
COPY(cuMemcpyDtoA)
COPY(cuMemcpyDtoA_v2)
COPY(cuMemcpyDtoA_v2_ptds)
