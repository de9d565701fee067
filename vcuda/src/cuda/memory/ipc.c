/* Memory that another process opens by a name (cuIpc*, pointers of pools): it stays on the card until its owner has freed it and all others have closed it,
 * whoever dies first. So the owner gives it an extent (region/shared.h), published under the handle's bytes, and goes on paying while that
 * is held; who opens what nobody in the container has published pays himself. */
#include <stdlib.h>

#include "base/table.h"
#include "cuda/driver/owner.h"
#include "cuda/memory/account.h"
#include "region/shared.h"
#include "region/slot.h"

#define VC__NAMES 4 /* of one allocation: drivers are free to give it another at each call */

/* Ours, of which others have been told. */
struct told {
    struct told *next; /* of those that were freed */
    struct vc_extent extent;
    uint64_t names[VC__NAMES], bytes;
    uint64_t chunk; /* whose extent it is; 0: its own */
    vc_cards cards;
    struct vc_allocation freed;
};

/* A chunk in which small allocations lie that others have been told of: it stays on the card as a whole, so they have one extent. */
struct told_chunk {
    uint64_t key, count;
    struct vc_extent extent;
};
VC_TABLE(told_chunks, struct told_chunk);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the list, names and chunks; no call of the driver under it */
static struct told *lingering; /* freed, but held by others */

/* What this process has opened. */
struct opened {
    uint64_t key;      /* its address */
    uint64_t count;    /* how often: the driver counts, too */
    CUcontext context; /* it is closed with this one */
    vc_cards cards;    /* on which we pay; none: its owner does, whose extent is held */
    uint64_t bytes;
    struct vc_extent extent;
};
VC_TABLE(opens, struct opened);

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    lingering = NULL;
}
VC_AT_FORK(forget);

static uint64_t name_of(const void *bytes)
{
    uint64_t name = 0xcbf29ce484222325u; /* FNV-1a */
    for (size_t at = 0; at < 64; at++)
        name = (name ^ ((const unsigned char *)bytes)[at]) * 0x100000001b3u;
    return name ? name : 1;
}

/* The owner. */

/* Memory on cards of several regions has none. */
static bool new_extent(const struct vc_allocation *allocation, uint64_t bytes, struct vc_extent *extent)
{
    uint32_t within;
    struct vc_region *region = vc_cards_region(allocation->cards, &within);
    return region && vc_shared_new(region, within, bytes, extent);
}

/* Pre: locked. */
static bool give_extent(struct told *told, const struct vc_allocation *allocation)
{
    struct told_chunk chunk = {.key = vc_account_chunk(allocation)};
    told->bytes = vc_round_up(allocation->bytes, VC_CHUNK);
    told->chunk = chunk.key;
    told->cards = allocation->cards;
    if (chunk.key && vc_table_take(&told_chunks, chunk.key, &chunk)) {
        chunk.count++;
        told->extent = chunk.extent;
        return vc_table_put(&told_chunks, &chunk); /* it was just taken out */
    }
    if (!new_extent(allocation, told->bytes, &told->extent))
        return false;
    chunk.count = 1;
    chunk.extent = told->extent;
    if (chunk.key && !vc_table_put(&told_chunks, &chunk))
        return false;
    vc_cards_share(allocation->cards, (int64_t)told->bytes);
    return true;
}

/* Pre: locked. */
static void leave_extent(const struct told *told)
{
    struct told_chunk chunk;
    if (told->chunk && vc_table_take(&told_chunks, told->chunk, &chunk) && --chunk.count > 0)
        vc_table_put(&told_chunks, &chunk);
    else
        vc_cards_share(told->cards, -(int64_t)told->bytes);
}

/* Whether others in its chunk keep that charged, whoever holds what of it. */
static bool leave_to_others(const struct told *told)
{
    struct told_chunk chunk;
    bool others = false;
    pthread_mutex_lock(&mutex);
    if (told->chunk && vc_table_take(&told_chunks, told->chunk, &chunk)) {
        others = chunk.count > 1;
        chunk.count -= others;
        vc_table_put(&told_chunks, &chunk); /* it was just taken out */
    }
    pthread_mutex_unlock(&mutex);
    return others;
}

static void release(struct told *told)
{
    vc_account_release(&told->freed);
    free(told);
}

static void end(struct told *told)
{
    pthread_mutex_lock(&mutex);
    leave_extent(told);
    pthread_mutex_unlock(&mutex);
    release(told);
}

static void freed(const struct vc_allocation *allocation)
{
    struct told *told = allocation->owner;
    for (int at = 0; at < VC__NAMES && told->names[at]; at++)
        vc_shared_withdraw(told->names[at], &told->extent); /* first: who finds it holds it, and then looks again */
    told->freed = *allocation;
    if (leave_to_others(told)) {
        release(told);
        return;
    }
    if (!vc_shared_is_held(&told->extent)) {
        end(told);
        return;
    }
    pthread_mutex_lock(&mutex);
    told->next = lingering;
    vc_store_release(&lingering, told);
    pthread_mutex_unlock(&mutex);
}

static void sweep(void)
{
    struct told *gone = NULL;
    if (VC_LIKELY(!vc_load_relaxed(&lingering)))
        return;
    pthread_mutex_lock(&mutex);
    for (struct told **link = &lingering; *link;) {
        struct told *one = *link;
        if (vc_shared_is_held(&one->extent)) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        one->next = gone;
        gone = one;
    }
    pthread_mutex_unlock(&mutex);
    while (gone) {
        struct told *next = gone->next;
        end(gone);
        gone = next;
    }
}

static void make_room(uint32_t card)
{
    (void)card;
    sweep();
}

static void context_ended(CUcontext context);

static const struct vc_source ipc = {.make_room = make_room, .settle = sweep, .freed = freed, .context_ended = context_ended};
VC_SOURCE(ipc);

/* Pre: locked. */
static void add_name(struct told *told, uint64_t name)
{
    for (int at = 0; at < VC__NAMES; at++) {
        if (told->names[at] == name)
            return;
        if (told->names[at] == 0) {
            if (vc_shared_publish(name, &told->extent))
                told->names[at] = name;
            return;
        }
    }
}

/* Others may open it now. Where that can't be noted, who opens it pays, too. */
static void tell(CUdeviceptr pointer, uint64_t name)
{
    struct vc_allocation allocation;
    CUdeviceptr start = pointer;
    size_t bytes;
    if (vc_real.cuMemGetAddressRange_v2)
        vc_real.cuMemGetAddressRange_v2(&start, &bytes, pointer);
    pthread_mutex_lock(&mutex);
    if (vc_account_get(start, &allocation) && !allocation.source) {
        struct told *told = calloc(1, sizeof *told);
        if (told && give_extent(told, &allocation)) {
            if (vc_account_adopt(start, &ipc, told))
                told = NULL;
            else /* another thread has freed it */
                leave_extent(told);
        }
        free(told);
    }
    if (vc_account_get(start, &allocation) && allocation.source == &ipc)
        add_name(allocation.owner, name);
    pthread_mutex_unlock(&mutex);
}

CUresult vc_hook_cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer)
{
    CUresult result = vc_real.cuIpcGetMemHandle(handle, pointer);
    if (result == CUDA_SUCCESS)
        tell(pointer, name_of(handle->reserved));
    return result;
}

/* The others. */

static bool are_same(const struct vc_extent *a, const struct vc_extent *b)
{
    return a->slot == b->slot && a->first == b->first && a->chunks == b->chunks;
}

static bool hold_in(struct vc_region *region, uint64_t name, struct vc_extent *extent)
{
    struct vc_extent again;
    if (!vc_shared_find(region, name, extent) || !vc_shared_hold(extent, vc_slot_tag(region, extent->slot)))
        return false;
    if (vc_shared_find(region, name, &again) && are_same(extent, &again))
        return true;
    vc_shared_let(extent);
    return false;
}

/* Hold what somebody has published under that name, before he can be told that it is freed. */
static bool hold(uint64_t name, struct vc_extent *extent)
{
    struct vc_regions *regions = vc_regions_get();
    bool held = false;
    for (uint32_t number = 0; number < regions->count && !held; number++)
        held = hold_in(&regions->all[number], name, extent);
    if (!held)
        *extent = (struct vc_extent){0};
    return held;
}

/* Whether anything of what is opened can be held, or paid. */
static bool is_counted(void)
{
    const struct vc_regions *regions = vc_regions_get();
    uint32_t number = 0;
    while (number < regions->count && regions->all[number].state != VC_REGION_ENFORCED)
        number++;
    return number < regions->count;
}

static enum vc_table_edit count_open(void *record, void *argument)
{
    (void)argument;
    ((struct opened *)record)->count++;
    return VC_TABLE_KEEP;
}

/* What was opened, as the driver says, whatever context is current. No bytes: it doesn't. */
struct lying {
    vc_cards cards;
    uint64_t bytes;
};

static struct lying lying_at(CUdeviceptr pointer)
{
    CUdeviceptr start;
    size_t bytes = 0;
    if (!vc_real.cuMemGetAddressRange_v2 || vc_real.cuMemGetAddressRange_v2(&start, &bytes, pointer) != CUDA_SUCCESS)
        bytes = 0;
    return (struct lying){vc_cards_at(pointer), vc_round_up(bytes, VC_CHUNK)};
}

/* Whether the extent that is held is one of such memory. A record of it can be written over. */
static bool is_of(const struct vc_extent *extent, CUdeviceptr pointer)
{
    struct lying lying = lying_at(pointer);
    uint32_t within;
    return vc_cards_region(lying.cards, &within) == extent->region && within == extent->cards &&
           extent->chunks >= lying.bytes / VC_CHUNK;
}

/* Nobody else is known to pay for it. */
static CUresult pay(struct opened *opened)
{
    struct vc_charge charge;
    struct lying lying = lying_at(opened->key);
    CUresult result = lying.bytes ? vc_charge_cards(&charge, lying.cards, lying.bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS)
        return result;
    opened->cards = charge.cards;
    opened->bytes = charge.reserved;
    vc_cards_commit(charge.cards, charge.reserved, VC_QUOTA_PLAIN);
    return result;
}

/* The hold is let go of where it is not one of what was opened. */
static CUresult held_or_paid(struct opened *opened, bool held)
{
    if (held && is_of(&opened->extent, opened->key))
        return CUDA_SUCCESS;
    if (held)
        vc_shared_let(&opened->extent);
    opened->extent = (struct vc_extent){0};
    return pay(opened);
}

/* Where nothing is limited it is neither paid nor held. */
static void close_one(const struct opened *opened)
{
    if (opened->cards)
        vc_cards_release(opened->cards, opened->bytes, VC_QUOTA_PLAIN);
    else if (opened->extent.chunks > 0)
        vc_shared_let(&opened->extent);
}

static CUresult open_memory(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags,
                            CUresult (*call)(CUdeviceptr *, CUipcMemHandle, unsigned int))
{
    struct opened opened = {.count = 1};
    if (!pointer || !is_counted())
        return call(pointer, handle, flags);
    bool held = hold(name_of(handle.reserved), &opened.extent);
    CUdeviceptr before = *pointer;
    CUresult result = call(pointer, handle, flags);
    opened.key = result == CUDA_SUCCESS ? *pointer : 0;
    if (result != CUDA_SUCCESS || vc_table_edit(&opens, opened.key, false, count_open, NULL)) {
        if (held)
            vc_shared_let(&opened.extent);
        return result;
    }
    vc_card_of_current(&opened.context);
    opened.context = vc_context_owner(opened.context);
    result = held_or_paid(&opened, held);
    if (result == CUDA_SUCCESS && vc_table_put(&opens, &opened))
        return result;
    if (result == CUDA_SUCCESS)
        close_one(&opened);
    vc_real.cuIpcCloseMemHandle(*pointer);
    *pointer = before;
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags)
{
    return open_memory(pointer, handle, flags, vc_real.cuIpcOpenMemHandle);
}

CUresult vc_hook_cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags)
{
    return open_memory(pointer, handle, flags, vc_real.cuIpcOpenMemHandle_v2);
}

CUresult vc_hook_cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    struct opened opened;
    vc_regions_get();
    bool known = vc_table_take(&opens, pointer, &opened); /* before the driver, who may give the address again */
    CUresult result = vc_real.cuIpcCloseMemHandle(pointer);
    if (!known)
        return result;
    if (result == CUDA_SUCCESS && --opened.count == 0)
        close_one(&opened);
    else
        vc_table_put(&opens, &opened);
    return result;
}

static bool closes_with(const void *record, const void *context)
{
    return ((const struct opened *)record)->context == context;
}

static void context_ended(CUcontext context)
{
    size_t count;
    struct opened *closed = context ? vc_table_take_all(&opens, closes_with, context, &count) : NULL;
    for (size_t index = 0; closed && index < count; index++)
        close_one(&closed[index]);
    free(closed);
    sweep();
}

/* Pointers of pools. What the owner frees is his pool's until that gives it back, so an extent is only for who comes after him. */

struct pooled {
    uint64_t key; /* the pointer */
    uint64_t name;
    struct vc_extent extent;
};
VC_TABLE(pooled, struct pooled);

static void tell_pooled(CUdeviceptr pointer, uint64_t name)
{
    struct vc_allocation allocation;
    struct pooled made, known;
    if (!vc_account_get(pointer, &allocation))
        return;
    uint64_t bytes = vc_round_up(allocation.bytes, VC_CHUNK);
    if (vc_table_take(&pooled, pointer, &known)) {
        if (known.name == name && known.extent.chunks * VC_CHUNK == bytes) {
            vc_table_put(&pooled, &known);
            return;
        }
        vc_shared_withdraw(known.name, &known.extent); /* of memory that was freed since */
    }
    made = (struct pooled){.key = pointer, .name = name};
    if (!new_extent(&allocation, bytes, &made.extent) || !vc_shared_publish(name, &made.extent))
        return;
    vc_cards_share(allocation.cards, (int64_t)bytes);
    vc_table_put(&pooled, &made);
}

CUresult vc_hook_cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr pointer)
{
    CUresult result = vc_real.cuMemPoolExportPointer(data, pointer);
    if (result == CUDA_SUCCESS)
        tell_pooled(pointer, name_of(data->reserved));
    return result;
}

static void unimported(const struct vc_allocation *allocation)
{
    close_one(allocation->owner);
    free(allocation->owner);
}

static const struct vc_source imported = {.freed = unimported};
VC_SOURCE(imported);

CUresult vc_hook_cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    if (!pointer || !data || !is_counted())
        return vc_real.cuMemPoolImportPointer(pointer, pool, data);
    struct opened *opened = calloc(1, sizeof *opened);
    if (!opened)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bool held = hold(name_of(data->reserved), &opened->extent);
    CUdeviceptr before = *pointer;
    CUresult result = vc_real.cuMemPoolImportPointer(pointer, pool, data);
    if (result == CUDA_SUCCESS) {
        opened->key = *pointer;
        result = held_or_paid(opened, held);
        struct vc_allocation allocation = {.key = *pointer, .owner = opened, .source = &imported, .kind = VC_MEMORY_OPAQUE};
        if (result == CUDA_SUCCESS && vc_account_record(&allocation))
            return result;
        vc_real.cuMemFree_v2(*pointer);
        *pointer = before;
        if (result == CUDA_SUCCESS)
            close_one(opened);
        held = false;
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (held)
        vc_shared_let(&opened->extent);
    free(opened);
    return result;
}
