/* Reservations, the record of live allocations, and the list of sources. */
#include "cuda/memory/account.h"

#include <stdlib.h>

#include "base/log.h"
#include "base/table.h"
#include "cuda/driver/owner.h"
#include "cuda/memory/refusal.h"
#include "region/overhead.h"

VC_TABLE(allocations, struct vc_allocation);

extern const struct vc_source *const __start_vc_sources[] __attribute__((visibility("hidden")));
extern const struct vc_source *const __stop_vc_sources[] __attribute__((visibility("hidden")));

#define VC__EACH_SOURCE(source)                                                                                        \
    for (const struct vc_source *const *source = __start_vc_sources; source < __stop_vc_sources; source++)

uint64_t vc_round_up(uint64_t bytes, uint64_t multiple)
{
    return bytes > UINT64_MAX - multiple ? UINT64_MAX : (bytes + multiple - 1) / multiple * multiple;
}

uint64_t vc_times(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

/* Sets of cards. */

void vc_cards_rollback(vc_cards cards, uint64_t bytes)
{
    VC_EACH_CARD(card, cards)
        vc_quota_rollback(vc_card(card)->region, vc_card(card)->index, bytes);
}

static bool reserve_cards(vc_cards cards, uint64_t bytes, bool managed)
{
    if (cards & VC_LOST_CARDS)
        return false;
    VC_EACH_CARD(card, cards) {
        if ((managed ? vc_quota_reserve_managed : vc_quota_reserve)(vc_card(card)->region, vc_card(card)->index, bytes))
            continue;
        vc_cards_rollback(cards & ((1u << card) - 1), bytes);
        return false;
    }
    return true;
}

bool vc_cards_reserve(vc_cards cards, uint64_t bytes)
{
    return bytes == 0 || reserve_cards(cards, bytes, false);
}

bool vc_cards_could_fit(vc_cards cards, uint64_t bytes, bool managed)
{
    if (cards & VC_LOST_CARDS)
        return false;
    VC_EACH_CARD(card, cards) {
        if (!vc_quota_could_fit(vc_card(card)->region, vc_card(card)->index, bytes, managed))
            return false;
    }
    return true;
}

void vc_cards_commit(vc_cards cards, uint64_t bytes, enum vc_quota_kind kind)
{
    VC_EACH_CARD(card, cards)
        vc_quota_commit(vc_card(card)->region, vc_card(card)->index, bytes, kind);
}

void vc_cards_release(vc_cards cards, uint64_t bytes, enum vc_quota_kind kind)
{
    VC_EACH_CARD(card, cards)
        vc_quota_release(vc_card(card)->region, vc_card(card)->index, bytes, kind);
}

void vc_cards_charge(vc_cards cards, uint64_t bytes, enum vc_quota_kind kind)
{
    VC_EACH_CARD(card, cards)
        vc_quota_charge(vc_card(card)->region, vc_card(card)->index, bytes, kind);
}

void vc_cards_share(vc_cards cards, int64_t bytes)
{
    VC_EACH_CARD(card, cards) {
        struct vc_slot *own = vc_region_slot(vc_card(card)->region);
        if (own)
            vc_add(&own->cards[vc_card(card)->index].exported_bytes, (uint64_t)bytes);
    }
}

void vc_account_make_room(vc_cards cards)
{
    VC_EACH_CARD(card, cards) {
        VC__EACH_SOURCE(source) {
            if ((*source)->make_room)
                (*source)->make_room(card);
        }
        if (vc_load_relaxed(&vc_card(card)->limit->overhead_bytes) > 0)
            vc_overhead_refresh(vc_card(card)->region, vc_card(card)->index, true);
    }
}

void vc_account_settle(void)
{
    VC__EACH_SOURCE(source) {
        if ((*source)->settle)
            (*source)->settle();
    }
}

/* Reservations. */

/* Nothing is left of the physical share: take the memory as managed memory, if the share is oversold. Pre: one card. */
static bool oversell(struct vc_charge *charge, uint64_t bytes)
{
    const struct vc_card *card = vc_card((uint32_t)__builtin_ctz(charge->cards));
    if (!vc_real.cuMemAllocManaged || !vc_quota_oversells(card->region, card->index) ||
        !reserve_cards(vc_cards_all(), bytes, true))
        return false;
    charge->cards = vc_cards_all();
    charge->managed = true;
    vc_add_relaxed(&card->usage->oversold_allocations, 1);
    vc_log_once(VC_NOTICE_OVERSOLD,
                "the share is oversold and its physical part is full: from here on memory may lie on the host, and be slow");
    return true;
}

/* What a reservation may be. */
enum form { AS_ASKED, OR_MANAGED };

static CUresult reserve(struct vc_charge *charge, uint64_t bytes, enum form form)
{
    charge->reserved = bytes;
    if (!charge->cards || reserve_cards(charge->cards, bytes, charge->managed))
        return CUDA_SUCCESS;
    /* What can't be had anyway takes nothing from anybody. */
    if (vc_cards_could_fit(charge->cards, bytes, charge->managed || form == OR_MANAGED)) {
        vc_account_make_room(charge->cards);
        if (reserve_cards(charge->cards, bytes, charge->managed) || (form == OR_MANAGED && oversell(charge, bytes)))
            return CUDA_SUCCESS;
    }
    vc_refused(charge->cards, bytes);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

bool vc_beyond_every_card(uint64_t bytes)
{
    int count = 0;
    size_t most = SIZE_MAX, total;
    if (vc_real.cuDeviceGetCount && vc_real.cuDeviceTotalMem_v2 && vc_real.cuDeviceGetCount(&count) == CUDA_SUCCESS)
        most = 0;
    for (CUdevice device = 0; device < count && most < SIZE_MAX; device++) {
        total = SIZE_MAX;
        vc_real.cuDeviceTotalMem_v2(&total, device);
        most = total > most ? total : most;
    }
    return bytes > most;
}

static CUresult reserve_card(struct vc_charge *charge, int card, uint64_t bytes, enum form form)
{
    /* Managed memory goes to whichever card uses it, unasked. */
    charge->cards = card < 0 ? 0 : charge->managed ? vc_cards_all() : 1u << card;
    charge->reserved = bytes;
    /* Limits are unreadable, or the share has nothing of this card. */
    if (card == VC_CARD_NONE || card == VC_CARD_LOST)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = reserve(charge, bytes, form);
    if (result != CUDA_SUCCESS && !charge->managed && vc_beyond_every_card(bytes)) {
        charge->cards = 0;
        result = CUDA_SUCCESS;
    }
    return result;
}

static CUresult reserve_current(struct vc_charge *charge, uint64_t bytes, bool managed, enum form form)
{
    int card;
    *charge = (struct vc_charge){.managed = managed};
    charge->context = vc_only_context(&card);
    if (VC_UNLIKELY(!charge->context)) {
        card = vc_card_of_current(&charge->context);
        charge->context = vc_context_owner(charge->context);
        return reserve_card(charge, card, bytes, form);
    }
    CUresult result = reserve_card(charge, card, bytes, form);
    if (result == CUDA_SUCCESS || vc_card_of_current(NULL) != VC_CARD_UNKNOWN)
        return result;
    charge->cards = 0; /* no context is current: that is what is wrong */
    return CUDA_SUCCESS;
}

CUresult vc_charge_current(struct vc_charge *charge, uint64_t bytes)
{
    return reserve_current(charge, bytes, false, AS_ASKED);
}

CUresult vc_charge_managed(struct vc_charge *charge, uint64_t bytes)
{
    return reserve_current(charge, bytes, true, AS_ASKED);
}

CUresult vc_charge_either(struct vc_charge *charge, uint64_t bytes)
{
    return reserve_current(charge, bytes, false, OR_MANAGED);
}

CUresult vc_charge_device(struct vc_charge *charge, CUdevice device, uint64_t bytes)
{
    *charge = (struct vc_charge){0};
    return reserve_card(charge, vc_card_of_device(device), bytes, AS_ASKED);
}

CUresult vc_charge_cards(struct vc_charge *charge, vc_cards cards, uint64_t bytes)
{
    *charge = (struct vc_charge){.cards = cards};
    return reserve(charge, bytes, AS_ASKED);
}

bool vc_charge_resize(struct vc_charge *charge, uint64_t bytes)
{
    if (bytes < charge->reserved) {
        vc_cards_rollback(charge->cards, charge->reserved - bytes);
    } else if (bytes > charge->reserved) {
        uint64_t more = bytes - charge->reserved;
        bool fits = reserve_cards(charge->cards, more, charge->managed);
        if (!fits && vc_cards_could_fit(charge->cards, bytes, charge->managed)) {
            vc_account_make_room(charge->cards);
            fits = reserve_cards(charge->cards, more, charge->managed);
        }
        if (!fits) {
            vc_refused(charge->cards, more);
            return false;
        }
    }
    charge->reserved = bytes;
    return true;
}

void vc_charge_drop(const struct vc_charge *charge)
{
    vc_cards_rollback(charge->cards, charge->reserved);
}

int64_t vc_left_on_card(const struct vc_charge *charge)
{
    size_t free_bytes = 0, total_bytes;
    const struct vc_card *card = vc_card((uint32_t)__builtin_ctz(charge->cards));
    struct vc_slot *own = vc_region_slot(card->region);
    if (vc_real.cuMemGetInfo_v2)
        vc_real.cuMemGetInfo_v2(&free_bytes, &total_bytes);
    return (int64_t)(free_bytes + (own ? vc_load(&own->cards[card->index].committed_bytes) : 0));
}

/* Records. */

static enum vc_quota_kind quota_kind(uint32_t kind)
{
    return kind == VC_MEMORY_MANAGED    ? VC_QUOTA_MANAGED
           : kind == VC_MEMORY_OVERSOLD ? VC_QUOTA_OVERSOLD
                                        : VC_QUOTA_PLAIN;
}

/* Whether an allocation shares its chunks. */
static bool is_small(const struct vc_allocation *allocation)
{
    return allocation->bytes < VC_CHUNK && allocation->kind <= VC_MEMORY_OVERSOLD && !allocation->source;
}

static struct vc_range range_of(const struct vc_allocation *allocation)
{
    return (struct vc_range){allocation->key, allocation->bytes, allocation->kind};
}

static bool keep(struct vc_charge *charge, const struct vc_allocation *allocation, uint64_t taken)
{
    struct vc_range range = range_of(allocation);
    if (vc_charge_resize(charge, taken) && vc_table_put(&allocations, allocation)) {
        if (taken > 0) /* not in a chunk that others have opened */
            vc_cards_commit(charge->cards, taken, quota_kind(allocation->kind));
        return true;
    }
    if (is_small(allocation))
        vc_chunks_leave(&range);
    vc_charge_drop(charge);
    return false;
}

bool vc_charge_keep(struct vc_charge *charge, CUdeviceptr pointer, uint64_t bytes, enum vc_memory_kind kind)
{
    if (!charge->cards)
        return true;
    struct vc_allocation allocation = {.key = pointer, .bytes = bytes, .context = charge->context, .cards = charge->cards, .kind = kind};
    struct vc_range range = range_of(&allocation);
    uint64_t taken;
    if (!is_small(&allocation)) {
        allocation.bytes = vc_chunks_of(&range);
        return keep(charge, &allocation, allocation.bytes);
    }
    if (vc_chunks_enter(&range, &taken))
        return keep(charge, &allocation, taken);
    vc_charge_drop(charge);
    return false;
}

bool vc_charge_keep_opaque(struct vc_charge *charge, const void *handle)
{
    if (!charge->cards)
        return true;
    struct vc_allocation allocation = {.key = (uint64_t)(uintptr_t)handle, .bytes = charge->reserved, .context = charge->context,
                                       .cards = charge->cards, .kind = VC_MEMORY_OPAQUE};
    return keep(charge, &allocation, allocation.bytes);
}

bool vc_account_record(const struct vc_allocation *allocation)
{
    return vc_table_put(&allocations, allocation);
}

bool vc_account_get(uint64_t key, struct vc_allocation *allocation)
{
    return vc_table_get(&allocations, key, allocation);
}

bool vc_charge_take(uint64_t key, struct vc_allocation *freeing)
{
    vc_regions_get(); /* in a forked child: forgets the parent's allocations first */
    return vc_table_take(&allocations, key, freeing);
}

/* Whether a chunk that this has left goes on being charged, to a source of which something may lie in it. */
static bool is_taken_over(const struct vc_allocation *left, uint64_t bytes)
{
    if (bytes < VC_CHUNK || left->kind != (is_small(left) ? VC_MEMORY_PLAIN : VC_MEMORY_OPAQUE))
        return false;
    VC__EACH_SOURCE(source) {
        if ((*source)->takes_chunk && (*source)->takes_chunk((uint32_t)__builtin_ctz(left->cards)))
            return true;
    }
    return false;
}

static void release(const struct vc_allocation *freed)
{
    struct vc_range range = range_of(freed);
    uint64_t bytes = is_small(freed) ? vc_chunks_leave(&range) : freed->bytes;
    uint64_t kept = is_taken_over(freed, bytes) ? VC_CHUNK : 0;
    if (bytes > kept)
        vc_cards_release(freed->cards, bytes - kept, quota_kind(freed->kind));
}

uint64_t vc_account_chunk(const struct vc_allocation *allocation)
{
    struct vc_range range = range_of(allocation);
    return is_small(allocation) ? vc_chunks_only(&range) : 0;
}

static enum vc_table_edit adopt(void *record, void *argument)
{
    struct vc_allocation *allocation = record;
    const struct vc_allocation *by = argument;
    if (!allocation->source) {
        allocation->source = by->source;
        allocation->owner = by->owner;
    }
    return VC_TABLE_KEEP;
}

bool vc_account_adopt(uint64_t key, const struct vc_source *source, void *owner)
{
    struct vc_allocation by = {.source = source, .owner = owner};
    return vc_table_edit(&allocations, key, false, adopt, &by);
}

void vc_account_release(const struct vc_allocation *adopted)
{
    struct vc_allocation plain = *adopted;
    plain.source = NULL;
    release(&plain);
}

void vc_charge_freed(const struct vc_allocation *freeing, CUresult result)
{
    if (result != CUDA_SUCCESS)
        vc_table_put(&allocations, freeing); /* the table has the room that it left */
    else if (freeing->source)
        freeing->source->freed(freeing);
    else
        release(freeing);
}

static bool dies_with(const void *record, const void *context)
{
    return ((const struct vc_allocation *)record)->context == context;
}

struct vc_dying vc_account_context_ending(CUcontext context)
{
    struct vc_dying dying = {0};
    if (context)
        dying.allocations = vc_table_take_all(&allocations, dies_with, context, &dying.count);
    return dying;
}

void vc_account_context_ended(struct vc_dying dying, CUcontext context, CUresult result)
{
    for (size_t index = 0; index < dying.count; index++)
        vc_charge_freed(&dying.allocations[index], result);
    free(dying.allocations);
    if (result != CUDA_SUCCESS)
        return;
    VC__EACH_SOURCE(source) {
        if ((*source)->context_ended)
            (*source)->context_ended(context);
    }
}
