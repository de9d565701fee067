/* cuCtxSetLimit: stacks, heap and printf's buffer beyond their defaults, which are part of what a context costs.
 *
 * The driver may take the memory only at a later launch, which nobody could refuse without harm: so it is charged with the
 * limit, in full. It dies with its context. */
#include "cuda/memory/charge.h"

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* one change at a time: held across calls that do not wait */
static size_t defaults[CU_LIMIT_MALLOC_HEAP_SIZE + 1];
static bool asked[CU_LIMIT_MALLOC_HEAP_SIZE + 1];

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
}

/* Bytes of the card for a limit beyond its default: a stack for every thread that can be resident. 0: not to be had. */
static uint64_t cost(int limit, size_t value)
{
    CUdevice device;
    int processors = 0, threads = 0;
    uint64_t beyond = value > defaults[limit] ? value - defaults[limit] : 0, bytes;
    if (beyond == 0 || limit != CU_LIMIT_STACK_SIZE)
        return vc_round_up(beyond, VC_CHUNK);
    if (!vc_real.cuDeviceGetAttribute || vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        vc_real.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        vc_real.cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS)
        return 0;
    uint64_t resident = (uint64_t)processors * (uint64_t)threads;
    return __builtin_mul_overflow(beyond, resident, &bytes) ? UINT64_MAX : vc_round_up(bytes, VC_CHUNK);
}

/* Pre: the mutex is held. */
static CUresult set_limit(int limit, size_t value)
{
    struct vc_charge charge = {.region = vc_region_get(), .card = VC_CARD_UNKNOWN};
    struct vc_freeing old = {.bytes = 0};
    if (charge.region->state == VC_REGION_DAMAGED || !vc_real.cuCtxGetLimit)
        return vc_real.cuCtxSetLimit(limit, value); /* computing is allowed without limits, and takes stacks */
    if (!asked[limit]) {
        if (vc_real.cuCtxGetLimit(&defaults[limit], limit) != CUDA_SUCCESS)
            return vc_real.cuCtxSetLimit(limit, value);
        asked[limit] = true;
    }
    CUcontext current = NULL;
    vc_real.cuCtxGetCurrent(&current);
    uint64_t key = (uint64_t)(uintptr_t)current + 1 + (uint64_t)limit; /* contexts are aligned: nothing else has these */
    uint64_t wanted = cost(limit, value);
    bool known = vc_charge_take(key, &old);
    CUresult result = CUDA_SUCCESS;
    if (wanted > old.bytes)
        result = vc_charge_current(&charge, wanted - old.bytes);
    else if (known) /* less than before is never refused */
        charge = (struct vc_charge){.region = charge.region, .card = old.entry.card,
                                    .context = (CUcontext)(uintptr_t)old.entry.owner};
    if (result == CUDA_SUCCESS) {
        result = vc_real.cuCtxSetLimit(limit, value);
        if (result == CUDA_SUCCESS && charge.card >= 0)
            return vc_charge_replace(&charge, known ? &old : NULL, key, wanted) ? result : CUDA_ERROR_OUT_OF_MEMORY;
        vc_charge_drop(&charge);
    }
    if (known)
        vc_charge_freed(&old, CUDA_ERROR_OUT_OF_MEMORY); /* it stays as it was */
    return result;
}

CUresult vc_hook_cuCtxSetLimit(int limit, size_t value)
{
    static uint32_t watching;
    if (limit < CU_LIMIT_STACK_SIZE || limit > CU_LIMIT_MALLOC_HEAP_SIZE)
        return vc_real.cuCtxSetLimit(limit, value);
    vc_region_get();
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    pthread_mutex_lock(&mutex);
    CUresult result = set_limit(limit, value);
    pthread_mutex_unlock(&mutex);
    return result;
}
