/* Reservations, the record of live allocations, and the chunks that they share. */
#include "cuda/memory/charge.h"

#include <stdlib.h>

#include "cuda/memory/binding.h"
#include "cuda/driver/owner.h"
#include "cuda/memory/graph_memory.h"
#include "cuda/memory/pool.h"
#include "cuda/memory/small_array.h"
#include "base/log.h"

static struct vc_ledger allocations = VC_LEDGER_INITIALIZER;
/* Chunk of small allocations and their kind → how many lie in it: each kind has chunks of its own in the quota's figures. */
static struct vc_ledger chunks = VC_LEDGER_INITIALIZER;

static void forget(void)
{
    vc_ledger_reset(&allocations);
    vc_ledger_reset(&chunks);
    vc_cards_forget_contexts();
}

static void watch_forks(void)
{
    static uint32_t watching;
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
}

uint64_t vc_round_up(uint64_t bytes, uint64_t multiple)
{
    return bytes > UINT64_MAX - multiple ? UINT64_MAX : (bytes + multiple - 1) / multiple * multiple;
}

static bool reserve_quota(const struct vc_charge *charge, uint64_t bytes)
{
    return (charge->managed ? vc_quota_reserve_managed : vc_quota_reserve)(charge->region, (uint32_t)charge->card, bytes);
}

/* Nothing is left of the physical share: take the memory as managed memory, if the share is oversold. */
static bool oversell(struct vc_charge *charge, uint64_t bytes)
{
    uint32_t card = (uint32_t)charge->card;
    if (!vc_real.cuMemAllocManaged || !vc_quota_oversells(charge->region, card) ||
        !vc_quota_reserve_managed(charge->region, card, bytes))
        return false;
    charge->managed = true;
    vc_add_relaxed(&charge->region->usage->cards[card].oversold_allocations, 1);
    vc_log_once(VC_NOTICE_OVERSOLD,
                "the share is oversold and its physical part is full: from here on memory may lie on the host, and be slow");
    return true;
}

/* What a reservation may be. */
enum form { AS_ASKED, OR_MANAGED };

static CUresult reserve(struct vc_charge *charge, uint64_t bytes, enum form form)
{
    struct vc_region *region = charge->region;
    charge->reserved = bytes;
    if (charge->card == VC_CARD_UNKNOWN)
        return CUDA_SUCCESS;
    if (charge->card == VC_CARD_NONE)
        return CUDA_ERROR_OUT_OF_MEMORY; /* limits are unreadable, or the share has nothing of this card */
    watch_forks();
    uint32_t card = (uint32_t)charge->card;
    if (reserve_quota(charge, bytes))
        return CUDA_SUCCESS;
    bool more = vc_pools_make_room(card);
    more |= vc_graph_memory_make_room(card);
    more |= vc_bindings_settle();
    if ((more && reserve_quota(charge, bytes)) || (form == OR_MANAGED && oversell(charge, bytes)))
        return CUDA_SUCCESS;
    vc_quota_refused(region, card);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult reserve_current(struct vc_charge *charge, uint64_t bytes, bool managed, enum form form)
{
    charge->region = vc_region_get();
    charge->context = NULL;
    charge->managed = managed;
    charge->card = vc_card_of_current(charge->region, &charge->context);
    charge->context = vc_context_owner(charge->context);
    return reserve(charge, bytes, form);
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
    charge->region = vc_region_get();
    charge->context = NULL;
    charge->managed = false;
    charge->card = vc_card_of_device(charge->region, device);
    return reserve(charge, bytes, AS_ASKED);
}

bool vc_charge_resize(struct vc_charge *charge, uint64_t bytes)
{
    if (charge->card < 0)
        return true;
    uint32_t card = (uint32_t)charge->card;
    if (bytes < charge->reserved) {
        vc_quota_rollback(charge->region, card, charge->reserved - bytes);
    } else if (bytes > charge->reserved && !reserve_quota(charge, bytes - charge->reserved)) {
        vc_quota_refused(charge->region, card);
        return false;
    }
    charge->reserved = bytes;
    return true;
}

void vc_charge_drop(const struct vc_charge *charge)
{
    if (charge->card >= 0)
        vc_quota_rollback(charge->region, (uint32_t)charge->card, charge->reserved);
}

static enum vc_quota_kind quota_kind(uint32_t kind)
{
    return kind == VC_MEMORY_MANAGED    ? VC_QUOTA_MANAGED
           : kind == VC_MEMORY_OVERSOLD ? VC_QUOTA_OVERSOLD
                                        : VC_QUOTA_PLAIN;
}

static bool is_small(const struct vc_entry *entry)
{
    return entry->bytes < VC_CHUNK && entry->kind <= VC_MEMORY_OVERSOLD;
}

static uint64_t first_chunk(const struct vc_entry *entry)
{
    return entry->key / VC_CHUNK;
}

static uint64_t last_chunk(const struct vc_entry *entry)
{
    return (entry->key + entry->bytes - 1) / VC_CHUNK;
}

static uint64_t chunk_key(const struct vc_entry *entry, uint64_t chunk)
{
    return (chunk + 1) * 4 + entry->kind;
}

/* Enter a small allocation into its chunks (two, if it lies across a border); `taken`: the bytes of those that are new. False (no
 * host memory): nothing is entered. */
static bool enter_chunks(const struct vc_entry *entry, uint64_t *taken)
{
    *taken = 0;
    for (uint64_t chunk = first_chunk(entry); chunk <= last_chunk(entry); chunk++) {
        uint64_t now = vc_ledger_add(&chunks, chunk_key(entry, chunk), 1);
        if (now == UINT64_MAX) {
            while (chunk-- > first_chunk(entry))
                vc_ledger_add(&chunks, chunk_key(entry, chunk), -1);
            return false;
        }
        *taken += now == 1 ? VC_CHUNK : 0;
    }
    return true;
}

/* The opposite; return the bytes of those that are empty now. */
static uint64_t leave_chunks(const struct vc_entry *entry)
{
    uint64_t emptied = 0;
    for (uint64_t chunk = first_chunk(entry); chunk <= last_chunk(entry); chunk++)
        emptied += vc_ledger_add(&chunks, chunk_key(entry, chunk), -1) == 0 ? VC_CHUNK : 0;
    return emptied;
}

static bool keep(struct vc_charge *charge, const struct vc_entry *entry, uint64_t taken)
{
    if (vc_charge_resize(charge, taken)) {
        if (vc_ledger_put(&allocations, entry)) {
            vc_quota_commit(charge->region, (uint32_t)charge->card, taken, quota_kind(entry->kind));
            return true;
        }
    }
    if (is_small(entry))
        leave_chunks(entry);
    vc_charge_drop(charge);
    return false;
}

bool vc_charge_keep(struct vc_charge *charge, CUdeviceptr pointer, uint64_t bytes, enum vc_memory_kind kind)
{
    if (charge->card < 0)
        return true;
    struct vc_entry entry = {
        .key = pointer,
        .bytes = bytes,
        .owner = (uint64_t)(uintptr_t)charge->context,
        .card = charge->card,
        .kind = kind,
    };
    if (is_small(&entry)) {
        uint64_t taken;
        if (enter_chunks(&entry, &taken))
            return keep(charge, &entry, taken);
        vc_charge_drop(charge);
        return false;
    }
    entry.bytes = (last_chunk(&entry) - first_chunk(&entry) + 1) * VC_CHUNK;
    return keep(charge, &entry, entry.bytes);
}

bool vc_charge_keep_opaque(struct vc_charge *charge, const void *handle)
{
    if (charge->card < 0)
        return true;
    struct vc_entry entry = {
        .key = (uint64_t)(uintptr_t)handle,
        .bytes = charge->reserved,
        .owner = (uint64_t)(uintptr_t)charge->context,
        .card = charge->card,
        .kind = VC_MEMORY_OPAQUE,
    };
    return keep(charge, &entry, entry.bytes);
}

bool vc_charge_replace(const struct vc_charge *charge, const struct vc_freeing *old, uint64_t key, uint64_t bytes)
{
    struct vc_entry entry = {
        .key = key,
        .bytes = bytes,
        .owner = (uint64_t)(uintptr_t)charge->context,
        .card = charge->card,
        .kind = VC_MEMORY_OPAQUE,
    };
    if (bytes > 0 && !vc_ledger_put(&allocations, &entry)) {
        vc_charge_drop(charge);
        if (old)
            vc_charge_freed(old, CUDA_ERROR_OUT_OF_MEMORY);
        return false;
    }
    if (charge->reserved > 0)
        vc_quota_commit(charge->region, (uint32_t)charge->card, charge->reserved, VC_QUOTA_PLAIN);
    if (old && old->bytes > bytes)
        vc_quota_release(charge->region, (uint32_t)charge->card, old->bytes - bytes, VC_QUOTA_PLAIN);
    return true;
}

bool vc_charge_record_array(const struct vc_charge *charge, uint32_t shape, const void *handle)
{
    struct vc_entry entry = {
        .key = (uint64_t)(uintptr_t)handle,
        .bytes = shape,
        .owner = (uint64_t)(uintptr_t)charge->context,
        .card = charge->card,
        .kind = VC_MEMORY_SMALL_ARRAY,
    };
    return vc_ledger_put(&allocations, &entry);
}

bool vc_charge_record_pooled(CUdeviceptr pointer, uint64_t bytes, uint64_t pool, int card)
{
    struct vc_entry entry = {.key = pointer, .bytes = bytes, .owner = pool, .card = card, .kind = VC_MEMORY_POOL};
    return vc_ledger_put(&allocations, &entry);
}

static void begin_freeing(struct vc_freeing *freeing)
{
    freeing->bytes = is_small(&freeing->entry) ? leave_chunks(&freeing->entry) : freeing->entry.bytes;
}

bool vc_charge_take(uint64_t key, struct vc_freeing *freeing)
{
    vc_region_get(); /* in a forked child: forgets the parent's allocations first */
    if (!vc_ledger_take(&allocations, key, &freeing->entry))
        return false;
    begin_freeing(freeing);
    return true;
}

void vc_charge_freed(const struct vc_freeing *freeing, CUresult result)
{
    const struct vc_entry *entry = &freeing->entry;
    if (result != CUDA_SUCCESS) {
        uint64_t taken; /* `bytes` of it were never released */
        if (is_small(entry))
            enter_chunks(entry, &taken); /* it came from there: the table has the room */
        vc_ledger_put(&allocations, entry); /* it came from there: the table has the room */
    } else if (entry->kind == VC_MEMORY_POOL) {
        vc_pool_freed(entry);
    } else if (entry->kind == VC_MEMORY_SMALL_ARRAY) {
        vc_small_array_freed(entry);
    } else if (freeing->bytes > 0) {
        bool shared = freeing->bytes >= VC_CHUNK && (is_small(entry) ? entry->kind == VC_MEMORY_PLAIN : entry->kind == VC_MEMORY_OPAQUE);
        uint64_t kept = shared && vc_small_array_takes_over(entry->card) ? VC_CHUNK : 0;
        if (freeing->bytes > kept)
            vc_quota_release(vc_region_get(), (uint32_t)entry->card, freeing->bytes - kept, quota_kind(entry->kind));
    }
}

static bool dies_with(const struct vc_entry *entry, const void *context)
{
    return entry->kind != VC_MEMORY_POOL && entry->owner == (uint64_t)(uintptr_t)context;
}

struct vc_freeing *vc_charge_take_context(CUcontext context, size_t *count)
{
    struct vc_entry *entries = vc_ledger_take_all(&allocations, dies_with, context, count);
    struct vc_freeing *freeing = *count ? calloc(*count, sizeof *freeing) : NULL;
    for (size_t index = 0; freeing && index < *count; index++) {
        freeing[index].entry = entries[index];
        begin_freeing(&freeing[index]);
    }
    if (!freeing) {
        /* No host memory for the bookkeeping: leave them recorded, charged until the process ends. */
        for (size_t index = 0; index < *count; index++)
            vc_ledger_put(&allocations, &entries[index]);
        *count = 0;
    }
    free(entries);
    return freeing;
}
