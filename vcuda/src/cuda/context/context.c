/* Contexts: reserve what one costs before the driver makes it, true up afterwards, give back what dies with it. */
#include <stdlib.h>

#include "base/table.h"
#include "cuda/memory/account.h"
#include "cuda/memory/context_memory.h"
#include "cuda/memory/refusal.h"
#include "cuda/context/context.h"
#include "cuda/context/measure.h"
#include "cuda/work/work.h"

#define VC__MAX_DEVICES 64
#define VC__DEAREST_CONTEXT ((uint64_t)544 << 20) /* of any card known: an H100, driver 580, 527 MiB */

/* What a context of its own costs. */
struct cost {
    uint64_t key; /* the context */
    uint64_t bytes;
    vc_cards cards;
    uint32_t attached; /* how often cuCtxDetach has to be called */
};
VC_TABLE(contexts, struct cost);

/* Primary contexts: at most one per device and process. */
static struct primary {
    uint32_t made; /* and charged, unless it is on a card that is lost */
    CUcontext context;
    struct cost cost;
} primaries[VC__MAX_DEVICES];

/* One measurement at a time: two would each see both contexts. Held across the creation of the first context of a card only, in places
 * where nobody has told us what one costs; other processes of the container wait for their turn (region/slot.h). Till then it may take all
 * that is left, so that is charged. */
static pthread_mutex_t measuring = PTHREAD_MUTEX_INITIALIZER;

static void forget(void)
{
    pthread_mutex_init(&measuring, NULL);
    for (int device = 0; device < VC__MAX_DEVICES; device++)
        primaries[device] = (struct primary){0};
}
VC_AT_FORK(forget);

struct creation {
    struct vc_charge charge;
    struct vc_measure measure;
    uint64_t ledger; /* of this process on the card when the measurement began */
    const struct vc_card *card; /* that is measured */
    bool measuring, turn;
};

static uint64_t own_ledger(const struct vc_card *card)
{
    struct vc_slot *own = vc_region_slot(card->region);
    return own ? vc_load(&own->cards[card->index].committed_bytes) : 0;
}

static void end_measuring(struct creation *creation)
{
    if (creation->turn)
        vc_slots_end_turn(creation->card->region, creation->card->index);
    creation->measuring = creation->turn = false;
    pthread_mutex_unlock(&measuring);
}

/* What a context on the card costs, as far as anybody knows. */
static uint64_t known_cost(const struct vc_card *card)
{
    uint64_t told = vc_load_relaxed(&card->limit->context_bytes);
    return told ? told : vc_load_relaxed(&card->usage->learnt_context_bytes);
}

/* Returns the cost where another one measured it meanwhile. */
static uint64_t begin_measuring(struct creation *creation, const struct vc_card *card)
{
    pthread_mutex_lock(&measuring);
    creation->card = card;
    creation->turn = vc_slots_take_turn(card->region, card->index);
    creation->measuring = true;
    uint64_t cost = known_cost(card);
    if (cost > 0)
        end_measuring(creation);
    return cost;
}

/* False: nothing is left. Of a whole card nothing is reserved. */
static bool reserve_rest(struct vc_charge *charge, const struct vc_card *card)
{
    for (int attempt = 0; attempt < 2 && charge->reserved == 0; attempt++) {
        if (attempt > 0)
            vc_account_make_room(charge->cards);
        charge->reserved = vc_quota_reserve_rest(card->region, card->index);
    }
    if (charge->reserved > 0 || vc_quota_limit(card->region, card->index) == UINT64_MAX)
        return true;
    vc_refused(charge->cards, 0);
    return false;
}

static CUresult begin_creation(struct creation *creation, CUdevice device)
{
    int number = vc_card_of_device(device);
    creation->measuring = creation->turn = false;
    creation->charge = (struct vc_charge){0};
    if (number == VC_CARD_LOST)
        return CUDA_SUCCESS; /* allocating and launching are refused then */
    const struct vc_card *card = number >= 0 ? vc_card((uint32_t)number) : NULL;
    uint64_t expected = card ? known_cost(card) : 0;
    if (card && expected == 0)
        expected = begin_measuring(creation, card);
    CUresult result = vc_charge_device(&creation->charge, device, expected);
    if (!creation->measuring)
        return result;
    if (result == CUDA_SUCCESS && !reserve_rest(&creation->charge, card))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        end_measuring(creation);
        return result;
    }
    vc_measure_begin(&creation->measure, card->limit->uuid);
    creation->ledger = own_ledger(card);
    return result;
}

/* It was not made, or there is one already. */
static void drop(struct creation *creation)
{
    vc_charge_drop(&creation->charge);
    if (creation->measuring)
        end_measuring(creation);
}

/* Nobody tells what it took: no more than is in use on the card beyond what the container is charged, nor than the dearest known. */
static uint64_t most_it_took(const struct vc_card *card, CUcontext context)
{
    size_t free_bytes = 0, total_bytes = 0;
    CUcontext popped;
    if (vc_real.cuCtxPushCurrent_v2 && vc_real.cuCtxPopCurrent_v2 && vc_real.cuMemGetInfo_v2 &&
        vc_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS) {
        if (vc_real.cuMemGetInfo_v2(&free_bytes, &total_bytes) != CUDA_SUCCESS)
            total_bytes = 0;
        vc_real.cuCtxPopCurrent_v2(&popped);
    }
    uint64_t in_use = total_bytes - free_bytes, charged = vc_quota_used(card->region, card->index);
    uint64_t beyond = in_use > charged ? in_use - charged : VC__DEAREST_CONTEXT;
    return beyond < VC__DEAREST_CONTEXT ? beyond : VC__DEAREST_CONTEXT;
}

/* What the card's use grew by, without what other threads of this process allocated meanwhile. */
static uint64_t measured_cost(const struct creation *creation, CUcontext context)
{
    const struct vc_card *card = creation->card;
    uint64_t grown = vc_measure_end(&creation->measure);
    if (grown == 0)
        return most_it_took(card, context);
    uint64_t ledger = own_ledger(card);
    uint64_t beside = ledger > creation->ledger ? ledger - creation->ledger : 0;
    uint64_t cost = grown > beside ? grown - beside : 0;
    vc_raise_to(&card->usage->learnt_context_bytes, cost);
    return cost;
}

/* The context exists. Hold what it costs; false: that is over the limit, and it must go again. */
static bool hold_cost(struct creation *creation, CUcontext context)
{
    struct vc_charge *charge = &creation->charge;
    if (!charge->cards)
        return true;
    bool fits = !creation->measuring || vc_charge_resize(charge, measured_cost(creation, context));
    if (fits)
        vc_cards_commit(charge->cards, charge->reserved, VC_QUOTA_CONTEXT);
    return fits;
}

static struct cost cost_of(const struct creation *creation, CUcontext context)
{
    return (struct cost){.key = (uint64_t)(uintptr_t)context, .bytes = creation->charge.reserved,
                             .cards = creation->charge.cards, .attached = 1};
}

static void release_cost(const struct cost *cost)
{
    vc_cards_release(cost->cards, cost->bytes, VC_QUOTA_CONTEXT);
}

/* Before anybody can use it: what was known of the only context is not true of two. */
static void is_made(CUcontext context, CUdevice device)
{
    vc_frames_forget();
    vc_context_made(context, device);
    vc_lanes_new_epoch();
}

static CUresult end_creation(struct creation *creation, CUresult result, CUcontext *context, CUdevice device)
{
    if (result != CUDA_SUCCESS) {
        drop(creation);
        return result;
    }
    if (!hold_cost(creation, *context)) {
        vc_real.cuCtxDestroy_v2(*context);
        *context = NULL;
        drop(creation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (creation->measuring)
        end_measuring(creation);
    struct cost cost = cost_of(creation, *context);
    if (creation->charge.cards && !vc_table_put(&contexts, &cost)) {
        vc_real.cuCtxDestroy_v2(*context);
        *context = NULL;
        release_cost(&cost);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    is_made(*context, device);
    return CUDA_SUCCESS;
}

CUresult vc_hook_cuCtxCreate(CUcontext *context, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    return result != CUDA_SUCCESS ? result : end_creation(&creation, vc_real.cuCtxCreate(context, flags, device), context, device);
}

CUresult vc_hook_cuCtxCreate_v2(CUcontext *context, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    return result != CUDA_SUCCESS ? result : end_creation(&creation, vc_real.cuCtxCreate_v2(context, flags, device), context, device);
}

CUresult vc_hook_cuCtxCreate_v3(CUcontext *context, CUexecAffinityParam *affinity, int count, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    if (result != CUDA_SUCCESS)
        return result;
    return end_creation(&creation, vc_real.cuCtxCreate_v3(context, affinity, count, flags, device), context, device);
}

CUresult vc_hook_cuCtxCreate_v4(CUcontext *context, CUctxCreateParams *parameters, unsigned int flags, CUdevice device)
{
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    if (result != CUDA_SUCCESS)
        return result;
    return end_creation(&creation, vc_real.cuCtxCreate_v4(context, parameters, flags, device), context, device);
}

CUresult vc_hook_cuCtxAttach(CUcontext *context, unsigned int flags)
{
    CUresult result = vc_real.cuCtxAttach(context, flags);
    struct cost cost;
    if (result == CUDA_SUCCESS && vc_table_take(&contexts, (uint64_t)(uintptr_t)*context, &cost)) {
        cost.attached++;
        vc_table_put(&contexts, &cost);
    }
    return result;
}

/* Allocations of the context and its own cost: taken out before the driver destroys it, released after. */
static CUresult destroy(CUcontext context, CUresult (*call)(CUcontext))
{
    struct cost cost;
    vc_regions_get(); /* a forked child forgets its parent's contexts first */
    bool known = vc_table_take(&contexts, (uint64_t)(uintptr_t)context, &cost);
    struct vc_dying dying = known ? vc_account_context_ending(context) : (struct vc_dying){0};
    struct vc_tracker *work = vc_work_context_ending(context);
    CUresult result = call(context);
    vc_work_context_ended(work, context, result == CUDA_SUCCESS);
    vc_cards_forget_contexts();
    vc_account_context_ended(dying, context, result);
    if (known && result == CUDA_SUCCESS)
        release_cost(&cost);
    else if (known)
        vc_table_put(&contexts, &cost);
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
    struct cost cost;
    if (!vc_table_get(&contexts, (uint64_t)(uintptr_t)context, &cost) || cost.attached <= 1)
        return destroy(context, vc_real.cuCtxDetach);
    CUresult result = vc_real.cuCtxDetach(context);
    if (result == CUDA_SUCCESS && vc_table_take(&contexts, cost.key, &cost)) {
        cost.attached--;
        vc_table_put(&contexts, &cost);
    }
    return result;
}

CUresult vc_primary_keep(CUdevice device, const struct vc_keeper *keeper, CUcontext *context)
{
    bool known = device >= 0 && device < VC__MAX_DEVICES;
    vc_regions_get();
    if (!known || vc_load_acquire(&primaries[device].made))
        return keeper->call(keeper->argument, context);
    struct primary *primary = &primaries[device];
    struct creation creation;
    CUresult result = begin_creation(&creation, device);
    if (result != CUDA_SUCCESS)
        return result;
    result = keeper->call(keeper->argument, context);
    if (result == CUDA_SUCCESS)
        is_made(*context, device); /* also on a card that is lost, or what is done in it is taken for the only context's */
    /* Another thread was here first: there is one context, charged once. */
    if (result != CUDA_SUCCESS || __atomic_exchange_n(&primary->made, 1, __ATOMIC_ACQ_REL)) {
        drop(&creation);
        return result;
    }
    if (!hold_cost(&creation, *context)) {
        keeper->undo(keeper->argument, device);
        drop(&creation);
        *context = NULL;
        vc_cards_forget_contexts();
        vc_store_release(&primary->made, 0);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (creation.measuring)
        end_measuring(&creation);
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

/* What a context held is gone by the driver's word. */
static void empty(CUcontext context)
{
    vc_account_context_ended(vc_account_context_ending(context), context, CUDA_SUCCESS);
}

bool vc_primary_ended(CUdevice device)
{
    unsigned int flags;
    int active = 1;
    struct primary *primary = &primaries[device];
    if (!vc_load_acquire(&primary->made) || vc_real.cuDevicePrimaryCtxGetState(device, &flags, &active) != CUDA_SUCCESS ||
        active)
        return false;
    struct cost cost = primary->cost;
    CUcontext context = primary->context;
    if (!__atomic_exchange_n(&primary->made, 0, __ATOMIC_ACQ_REL))
        return true;
    empty(context);
    release_cost(&cost);
    vc_cards_forget_contexts();
    return true;
}

static CUresult end_primary(CUdevice device, CUresult (*call)(CUdevice), bool reset)
{
    vc_regions_get();
    if (device < 0 || device >= VC__MAX_DEVICES)
        return call(device);
    bool made = vc_load_acquire(&primaries[device].made);
    CUcontext context = made ? primaries[device].context : NULL;
    struct vc_tracker *work = made ? vc_work_context_ending(context) : NULL;
    CUresult result = call(device);
    bool gone = result == CUDA_SUCCESS && vc_primary_ended(device);
    bool emptied = result == CUDA_SUCCESS && reset && made && !gone; /* "does not release it": who retained it has it */
    if (emptied)
        empty(primaries[device].context);
    vc_work_context_ended(work, context, gone || emptied);
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
