/* cuCtxSetLimit: stacks, heap and printf's buffer beyond their defaults, which are part of what a context costs.
 *
 * The driver may take the memory only at a later launch, which nobody could refuse without harm: so it is charged with the
 * limit, in full, by what the driver says the limit is now. It dies with its context. */
#include "base/table.h"
#include "cuda/memory/account.h"

#define VC__LIMITS (CU_LIMIT_MALLOC_HEAP_SIZE + 1)

struct limits {
    uint64_t key; /* the context */
    vc_cards cards;
    uint64_t bytes[VC__LIMITS]; /* charged */
};
VC_TABLE(charged, struct limits);

static size_t defaults[VC__LIMITS]; /* + 1; 0: not asked */

/* Bytes of the card for a limit beyond its default: a stack for every thread that can be resident. 0: not to be had. */
static uint64_t cost(int limit, size_t value)
{
    CUdevice device;
    int processors = 0, threads = 0;
    size_t least = vc_load_relaxed(&defaults[limit]) - 1;
    uint64_t beyond = value > least ? value - least : 0;
    if (beyond == 0 || limit != CU_LIMIT_STACK_SIZE)
        return vc_round_up(beyond, VC_CHUNK);
    if (!vc_real.cuDeviceGetAttribute || vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        vc_real.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        vc_real.cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS)
        return 0;
    return vc_round_up(vc_times(beyond, (uint64_t)processors * (uint64_t)threads), VC_CHUNK);
}

/* One limit of a context is charged `bytes` from now on; `was` is what it was. */
struct change {
    int limit;
    vc_cards cards;
    uint64_t bytes, was;
};

static enum vc_table_edit change(void *record, void *argument)
{
    struct limits *limits = record;
    struct change *made = argument;
    made->was = limits->bytes[made->limit];
    limits->bytes[made->limit] = made->bytes;
    limits->cards = made->cards;
    return VC_TABLE_KEEP;
}

/* Pay for the limit as it is now out of what is reserved. */
static void settle(const struct vc_charge *charge, CUcontext context, int limit, size_t value)
{
    struct change made = {.limit = limit, .cards = charge->cards};
    if (vc_real.cuCtxGetLimit(&value, limit) == CUDA_SUCCESS || value > 0)
        made.bytes = cost(limit, value);
    if (!vc_table_edit(&charged, (uint64_t)(uintptr_t)context, made.bytes > 0, change, &made))
        made.was = made.bytes = 0; /* nothing was charged and nothing is, or no host memory: then it is overhead */
    uint64_t more = made.bytes > made.was ? made.bytes - made.was : 0, paid = more < charge->reserved ? more : charge->reserved;
    vc_cards_commit(charge->region, charge->cards, paid, VC_QUOTA_PLAIN);
    vc_cards_rollback(charge->region, charge->cards, charge->reserved - paid);
    if (more > paid) /* another thread has set it meanwhile */
        vc_cards_charge(charge->region, charge->cards, more - paid, VC_QUOTA_PLAIN);
    if (made.was > made.bytes)
        vc_cards_release(charge->region, charge->cards, made.was - made.bytes, VC_QUOTA_PLAIN);
}

/* There is no room for it; but what the driver would not do anyway is answered by the driver, which takes no memory before a launch. */
static CUresult refuse(int limit, size_t value, CUresult refusal)
{
    size_t before;
    if (vc_real.cuCtxGetLimit(&before, limit) != CUDA_SUCCESS)
        return refusal;
    CUresult result = vc_real.cuCtxSetLimit(limit, value);
    if (result != CUDA_SUCCESS)
        return result;
    vc_real.cuCtxSetLimit(limit, before);
    return refusal;
}

CUresult vc_hook_cuCtxSetLimit(int limit, size_t value)
{
    struct vc_charge charge;
    struct limits known = {0};
    CUcontext context = NULL;
    size_t least;
    if (limit < 0 || limit >= VC__LIMITS || vc_region_get()->state == VC_REGION_DAMAGED || !vc_real.cuCtxGetLimit ||
        vc_real.cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
        return vc_real.cuCtxSetLimit(limit, value); /* computing is allowed without readable limits, and takes stacks */
    if (vc_load_relaxed(&defaults[limit]) == 0) {
        if (vc_real.cuCtxGetLimit(&least, limit) != CUDA_SUCCESS)
            return vc_real.cuCtxSetLimit(limit, value);
        vc_store_relaxed(&defaults[limit], least + 1);
    }
    vc_table_get(&charged, (uint64_t)(uintptr_t)context, &known);
    uint64_t wanted = cost(limit, value), have = known.bytes[limit];
    CUresult result = vc_charge_current(&charge, wanted > have ? wanted - have : 0);
    if (result != CUDA_SUCCESS)
        return refuse(limit, value, result);
    result = vc_real.cuCtxSetLimit(limit, value);
    if (result == CUDA_SUCCESS)
        settle(&charge, context, limit, value);
    else
        vc_charge_drop(&charge);
    return result;
}

/* A reset sets them back, too. */
static void context_ended(CUcontext context)
{
    struct limits ended;
    if (!vc_table_take(&charged, (uint64_t)(uintptr_t)context, &ended))
        return;
    for (int limit = 0; limit < VC__LIMITS; limit++)
        vc_cards_release(vc_region_get(), ended.cards, ended.bytes[limit], VC_QUOTA_PLAIN);
}

static const struct vc_source context_limits = {.context_ended = context_ended};
VC_SOURCE(context_limits);
