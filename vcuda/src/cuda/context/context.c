/* Contexts: reserve what one costs before the driver makes it, true up afterwards, give back what dies with it. */
#include <stdlib.h>

#include "cuda/memory/binding.h"
#include "cuda/memory/charge.h"
#include "cuda/context/context.h"
#include "cuda/context/measure.h"
#include "cuda/work/work.h"

#define VC__MAX_DEVICES 64

/* context → its cost; `kind` holds the count of cuCtxAttach and `owner` nothing. */
static struct vc_ledger contexts = VC_LEDGER_INITIALIZER;

/* Primary contexts: at most one per device and process. */
static struct primary {
    uint32_t charged;
    CUcontext context;
    struct vc_entry cost;
} primaries[VC__MAX_DEVICES];

static void forget(void)
{
    vc_ledger_reset(&contexts);
    for (int device = 0; device < VC__MAX_DEVICES; device++)
        primaries[device] = (struct primary){0};
}

struct creation {
    struct vc_charge charge;
    struct vc_measure measure;
    bool measuring;
};

static CUresult begin_creation(struct creation *creation, CUdevice device)
{
    static uint32_t watching;
    struct vc_region *region = vc_region_get();
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    creation->measuring = false;
    creation->charge = (struct vc_charge){.region = region, .card = VC_CARD_UNKNOWN};
    if (region->state == VC_REGION_DAMAGED)
        return CUDA_SUCCESS; /* computing is allowed then, allocating is not */
    int card = vc_card_of_device(region, device);
    uint64_t expected = 0;
    if (card >= 0) {
        expected = vc_load_relaxed(&region->limits->cards[card].context_bytes);
        if (expected == 0)
            expected = vc_load_relaxed(&region->usage->cards[card].learnt_context_bytes);
        creation->measuring = expected == 0;
    }
    CUresult result = vc_charge_device(&creation->charge, device, expected);
    if (result == CUDA_SUCCESS && creation->measuring)
        vc_measure_begin(&creation->measure, region->limits->cards[card].uuid);
    return result;
}

/* The context exists. Hold what it costs; false: that is over the limit, and it must go again. */
static bool hold_cost(struct creation *creation)
{
    struct vc_charge *charge = &creation->charge;
    if (charge->card < 0)
        return true;
    uint32_t card = (uint32_t)charge->card;
    if (creation->measuring) {
        uint64_t cost = vc_measure_end(&creation->measure);
        if (cost > 0 && !vc_quota_reserve(charge->region, card, cost)) {
            vc_quota_refused(charge->region, card);
            return false;
        }
        charge->reserved = cost;
        vc_raise_to(&charge->region->usage->cards[card].learnt_context_bytes, cost);
    }
    vc_quota_commit(charge->region, card, charge->reserved, VC_QUOTA_CONTEXT);
    return true;
}

static struct vc_entry cost_of(const struct creation *creation, CUcontext context)
{
    return (struct vc_entry){.key = (uint64_t)(uintptr_t)context, .bytes = creation->charge.reserved,
                             .card = creation->charge.card, .kind = 1};
}

static void release_cost(const struct vc_entry *cost)
{
    if (cost->card >= 0)
        vc_quota_release(vc_region_get(), (uint32_t)cost->card, cost->bytes, VC_QUOTA_CONTEXT);
}

static CUresult end_creation(struct creation *creation, CUresult result, CUcontext *context)
{
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(&creation->charge);
        return result;
    }
    if (!hold_cost(creation)) {
        vc_real.cuCtxDestroy_v2(*context);
        *context = NULL;
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    struct vc_entry cost = cost_of(creation, *context);
    if (creation->charge.card >= 0 && !vc_ledger_put(&contexts, &cost)) {
        vc_real.cuCtxDestroy_v2(*context);
        *context = NULL;
        release_cost(&cost);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

CUresult vc_hook_cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    return result != CUDA_SUCCESS ? result : end_creation(&creation, vc_real.cuCtxCreate(context, flags, device), context);
}

CUresult vc_hook_cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    return result != CUDA_SUCCESS ? result : end_creation(&creation, vc_real.cuCtxCreate_v2(context, flags, device), context);
}

CUresult vc_hook_cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    if (result != CUDA_SUCCESS)
        return result;
    return end_creation(&creation, vc_real.cuCtxCreate_v3(context, affinity, count, flags, device), context);
}

CUresult vc_hook_cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    if (result != CUDA_SUCCESS)
        return result;
    return end_creation(&creation, vc_real.cuCtxCreate_v4(context, parameters, flags, device), context);
}

CUresult vc_hook_cuCtxAttach(CUcontext *context, unsigned int flags)
{
    CUresult result = vc_real.cuCtxAttach(context, flags);
    struct vc_entry cost;
    if (result == CUDA_SUCCESS && vc_ledger_take(&contexts, (uint64_t)(uintptr_t)*context, &cost)) {
        cost.kind++;
        vc_ledger_put(&contexts, &cost);
    }
    return result;
}

/* Allocations of the context and its own cost: taken out before the driver destroys it, released after. */
static CUresult destroy(CUcontext context, CUresult (*call)(CUcontext))
{
    struct vc_entry cost;
    vc_region_get(); /* a forked child forgets its parent's contexts first */
    bool known = vc_ledger_take(&contexts, (uint64_t)(uintptr_t)context, &cost);
    size_t count = 0;
    struct vc_freeing *dying = known ? vc_charge_take_context(context, &count) : NULL;
    struct vc_tracker *work = vc_work_context_ending(context);
    CUresult result = call(context);
    vc_work_context_ended(work, result == CUDA_SUCCESS);
    vc_cards_forget_contexts();
    for (size_t index = 0; index < count; index++)
        vc_charge_freed(&dying[index], result);
    free(dying);
    if (result == CUDA_SUCCESS)
        vc_bindings_context_ended(context);
    if (known && result == CUDA_SUCCESS)
        release_cost(&cost);
    else if (known)
        vc_ledger_put(&contexts, &cost);
    return result;
}

CUresult vc_hook_cuCtxDestroy(CUcontext context)
{
    return destroy(context, vc_real.cuCtxDestroy);
}

CUresult vc_hook_cuCtxDestroy_v2(CUcontext context)
{
    return destroy(context, vc_real.cuCtxDestroy_v2);
}

CUresult vc_hook_cuCtxDetach(CUcontext context)
{
    struct vc_entry cost;
    if (!vc_ledger_get(&contexts, (uint64_t)(uintptr_t)context, &cost) || cost.kind <= 1)
        return destroy(context, vc_real.cuCtxDetach);
    CUresult result = vc_real.cuCtxDetach(context);
    if (result == CUDA_SUCCESS && vc_ledger_take(&contexts, cost.key, &cost)) {
        cost.kind--;
        vc_ledger_put(&contexts, &cost);
    }
    return result;
}

CUresult vc_primary_keep(CUdevice device, const struct vc_keeper *keeper, CUcontext *context)
{
    bool known = device >= 0 && device < VC__MAX_DEVICES;
    vc_region_get();
    if (!known || vc_load_acquire(&primaries[device].charged))
        return keeper->call(keeper->argument, context);
    struct primary *primary = &primaries[device];
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    if (result != CUDA_SUCCESS)
        return result;
    result = keeper->call(keeper->argument, context);
    if (result != CUDA_SUCCESS || creation.charge.card < 0) {
        vc_charge_drop(&creation.charge);
        return result;
    }
    if (__atomic_exchange_n(&primary->charged, 1, __ATOMIC_ACQ_REL)) {
        vc_charge_drop(&creation.charge); /* another thread was here first: there is one context, charged once */
        return result;
    }
    if (!hold_cost(&creation)) {
        keeper->undo(keeper->argument, device);
        *context = NULL;
        vc_store_release(&primary->charged, 0);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    primary->context = *context;
    primary->cost = cost_of(&creation, *context);
    return result;
}

static CUresult retain(void *device, CUcontext *context)
{
    return vc_real.cuDevicePrimaryCtxRetain(context, *(CUdevice *)device);
}

static void release(void *argument, CUdevice device)
{
    (void)argument;
    vc_real.cuDevicePrimaryCtxRelease_v2 ? vc_real.cuDevicePrimaryCtxRelease_v2(device)
                                         : vc_real.cuDevicePrimaryCtxRelease(device);
}

CUresult vc_hook_cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    if (!context)
        return vc_real.cuDevicePrimaryCtxRetain(context, device);
    return vc_primary_keep(device, &(struct vc_keeper){retain, release, &device}, context);
}

/* What a context held is gone with the driver's word. */
static void empty(CUcontext context)
{
    size_t count = 0;
    struct vc_freeing *dying = vc_charge_take_context(context, &count);
    for (size_t index = 0; index < count; index++)
        vc_charge_freed(&dying[index], CUDA_SUCCESS);
    free(dying);
    vc_bindings_context_ended(context);
}

bool vc_primary_ended(CUdevice device)
{
    unsigned int flags;
    int active = 1;
    struct primary *primary = &primaries[device];
    if (!vc_load_acquire(&primary->charged) || vc_real.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS ||
        active)
        return false;
    struct vc_entry cost = primary->cost;
    CUcontext context = primary->context;
    if (!__atomic_exchange_n(&primary->charged, 0, __ATOMIC_ACQ_REL))
        return true;
    empty(context);
    release_cost(&cost);
    vc_cards_forget_contexts();
    return true;
}

static CUresult end_primary(CUdevice device, CUresult (*call)(CUdevice), bool reset)
{
    vc_region_get();
    if (device < 0 || device >= VC__MAX_DEVICES)
        return call(device);
    bool charged = vc_load_acquire(&primaries[device].charged);
    struct vc_tracker *work = charged ? vc_work_context_ending(primaries[device].context) : NULL;
    CUresult result = call(device);
    bool gone = result == CUDA_SUCCESS && vc_primary_ended(device);
    bool emptied = result == CUDA_SUCCESS && reset && charged && !gone; /* "does not release it": who retained it has it */
    if (emptied)
        empty(primaries[device].context);
    vc_work_context_ended(work, gone || emptied);
    return result;
}

CUresult vc_hook_cuDevicePrimaryCtxRelease(CUdevice device)
{
    return end_primary(device, vc_real.cuDevicePrimaryCtxRelease, false);
}

CUresult vc_hook_cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    return end_primary(device, vc_real.cuDevicePrimaryCtxRelease_v2, false);
}

CUresult vc_hook_cuDevicePrimaryCtxReset(CUdevice device)
{
    return end_primary(device, vc_real.cuDevicePrimaryCtxReset, true);
}

CUresult vc_hook_cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    return end_primary(device, vc_real.cuDevicePrimaryCtxReset_v2, true);
}
