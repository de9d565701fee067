/* Reservations and the record of live allocations. */
#include "charge.h"

#include "pool.h"

/* Suballocation granularity of the driver's own heaps; larger requests are served in whole pages. */
#define VC__SMALL_ALIGNMENT 512u

static struct vc_ledger allocations = VC_LEDGER_INITIALIZER;

static void forget(void)
{
    vc_ledger_reset(&allocations);
    vc_cards_forget_contexts();
}

static void watch_forks(void)
{
    static uint32_t watching;
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
}

uint64_t vc_round_plain(uint64_t bytes)
{
    uint64_t rounded = (bytes + VC__SMALL_ALIGNMENT - 1) & ~(uint64_t)(VC__SMALL_ALIGNMENT - 1);
    return rounded >= bytes ? rounded : UINT64_MAX;
}

static CUresult reserve(struct vc_charge *charge, uint64_t bytes)
{
    struct vc_region *region = charge->region;
    charge->bytes = bytes;
    if (charge->card == VC_CARD_UNKNOWN)
        return CUDA_SUCCESS;
    if (charge->card == VC_CARD_NONE)
        return CUDA_ERROR_OUT_OF_MEMORY; /* limits are unreadable, or the share has nothing of this card */
    watch_forks();
    uint32_t card = (uint32_t)charge->card;
    if (vc_quota_reserve(region, card, bytes) || (vc_pools_make_room(card) && vc_quota_reserve(region, card, bytes)))
        return CUDA_SUCCESS;
    vc_quota_refused(region, card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_charge_current(struct vc_charge *charge, uint64_t bytes)
{
    charge->region = vc_region_get();
    charge->context = NULL;
    charge->card = vc_card_of_current(charge->region, &charge->context);
    return reserve(charge, bytes);
}

CUresult vc_charge_device(struct vc_charge *charge, CUdevice device, uint64_t bytes)
{
    charge->region = vc_region_get();
    charge->context = NULL;
    charge->card = vc_card_of_device(charge->region, device);
    return reserve(charge, bytes);
}

static enum vc_quota_kind quota_kind(uint32_t kind)
{
    return kind == VC_MEMORY_MANAGED ? VC_QUOTA_MANAGED : VC_QUOTA_PLAIN;
}

bool vc_charge_keep(const struct vc_charge *charge, uint64_t key, enum vc_memory_kind kind)
{
    if (charge->card < 0)
        return true;
    struct vc_entry entry = {
        .key = key,
        .bytes = charge->bytes,
        .owner = (uint64_t)(uintptr_t)charge->context,
        .card = charge->card,
        .kind = kind,
    };
    if (!vc_ledger_put(&allocations, &entry)) {
        vc_charge_drop(charge);
        return false;
    }
    vc_quota_commit(charge->region, (uint32_t)charge->card, charge->bytes, quota_kind(kind));
    return true;
}

void vc_charge_drop(const struct vc_charge *charge)
{
    if (charge->card >= 0)
        vc_quota_rollback(charge->region, (uint32_t)charge->card, charge->bytes);
}

bool vc_charge_take(uint64_t key, struct vc_entry *entry)
{
    vc_region_get(); /* in a forked child: forgets the parent's allocations first */
    return vc_ledger_take(&allocations, key, entry);
}

void vc_charge_freed(const struct vc_entry *entry, CUresult result)
{
    if (result != CUDA_SUCCESS) {
        vc_ledger_put(&allocations, entry); /* it came from there: the table has the room */
        return;
    }
    if (entry->kind == VC_MEMORY_POOL)
        vc_pool_freed(entry);
    else
        vc_quota_release(vc_region_get(), (uint32_t)entry->card, entry->bytes, quota_kind(entry->kind));
}

bool vc_charge_record_pooled(uint64_t key, uint64_t bytes, uint64_t pool, uint32_t card)
{
    struct vc_entry entry = {.key = key, .bytes = bytes, .owner = pool, .card = (int32_t)card, .kind = VC_MEMORY_POOL};
    return vc_ledger_put(&allocations, &entry);
}

static bool dies_with(const struct vc_entry *entry, const void *context)
{
    return entry->kind != VC_MEMORY_POOL && entry->owner == (uint64_t)(uintptr_t)context;
}

struct vc_entry *vc_charge_take_context(CUcontext context, size_t *count)
{
    return vc_ledger_take_all(&allocations, dies_with, context, count);
}
