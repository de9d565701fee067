/* Stream-ordered memory: a pool is charged what the driver says it has reserved of the card, not what is allocated from it.
 *
 * Nothing that the driver tells is counted here. A pool that the application destroys while memory of it is in use lives on in the
 * driver until that is freed, but nobody could ask about it any more: so it is really destroyed only then. A pool that we did not
 * see made is asked where it lies, and lies on all cards if that can't be told. What is captured into a graph is the graph's. */
#include <stdlib.h>

#include "base/table.h"
#include "cuda/memory/context_memory.h"
#include "cuda/memory/departure.h"
#include "cuda/memory/meter.h"
#include "cuda/memory/refusal.h"

#define VC__POOL_ALIGNMENT 512u /* of sizes within a pool */

struct pool {
    struct vc_meter meter; /* first: what reads and trims it is given the meter */
    struct pool *next;     /* the list only grows; a destroyed pool's record is used again */
    struct pool *next_unsettled;
    CUmemoryPool handle; /* NULL: a record to be used again, or one of which the last memory is still in use */
    bool is_foreign;     /* of a card that is not of the share: refused */
    bool is_on_card;     /* and never on the host */
    bool is_ours_to_destroy;
    bool is_destroyed;   /* by the application */
    bool is_unsettled;
    uint64_t untold;     /* allocated from it, where the driver does not tell what it has reserved */
    uint64_t live;       /* allocated and not freed: only a hint whether the driver still has frees to come to */
};

struct known_pool {
    uint64_t key; /* the handle */
    struct pool *pool;
};
VC_TABLE(known, struct known_pool);

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the lists; never held across a call of the driver */
static struct pool *pools, *unsettled;

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    pools = unsettled = NULL; /* the parent's; a thread of it may hold their mutexes */
}
VC_AT_FORK(forget);

static bool attribute(CUmemoryPool handle, int which, void *value)
{
    return handle && vc_real.cuMemPoolGetAttribute && vc_real.cuMemPoolGetAttribute(handle, which, value) == CUDA_SUCCESS;
}

static bool read_pool(struct vc_meter *meter, struct vc_reading *reading)
{
    struct pool *pool = (struct pool *)meter;
    if (!attribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reading->reserved) ||
        !attribute(pool->handle, CU_MEMPOOL_ATTR_USED_MEM_CURRENT, &reading->used))
        reading->reserved = reading->used = vc_load(&pool->untold);
    return true;
}

static void trim_pool(struct vc_meter *meter)
{
    struct pool *pool = (struct pool *)meter;
    if (pool->handle && vc_real.cuMemPoolTrimTo)
        vc_real.cuMemPoolTrimTo(pool->handle, 0);
}

static bool is_told(const struct pool *pool)
{
    uint64_t bytes;
    return attribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes);
}

static struct pool *find(CUmemoryPool handle)
{
    struct known_pool found;
    return handle && vc_table_get(&known, (uint64_t)(uintptr_t)handle, &found) ? found.pool : NULL;
}

static void set_unsettled(struct pool *pool)
{
    pthread_mutex_lock(&mutex);
    if (!pool->is_unsettled) {
        pool->is_unsettled = true;
        pool->next_unsettled = unsettled;
        vc_store_release(&unsettled, pool);
    }
    pthread_mutex_unlock(&mutex);
}

static struct pool *add(CUmemoryPool handle, vc_cards cards)
{
    pthread_mutex_lock(&mutex);
    struct pool *pool = pools;
    while (pool && (pool->handle || pool->is_unsettled || pool->untold || pool->meter.charged))
        pool = pool->next;
    bool is_new = !pool;
    if (is_new && (pool = calloc(1, sizeof *pool))) {
        pthread_mutex_init(&pool->meter.mutex, NULL);
        pool->meter.read = read_pool;
        pool->meter.trim = trim_pool;
    }
    if (pool) {
        pool->meter.cards = cards;
        pool->is_foreign = pool->is_ours_to_destroy = pool->is_destroyed = false;
        pool->live = 0;
        struct known_pool record = {(uint64_t)(uintptr_t)handle, pool};
        bool recorded = vc_table_put(&known, &record);
        pool->handle = recorded ? handle : NULL;
        if (is_new) {
            pool->next = pools;
            vc_store_release(&pools, pool);
        }
        pool = recorded ? pool : NULL;
    }
    pthread_mutex_unlock(&mutex);
    return pool;
}

static bool is_on_card(int allocation, int type)
{
    return allocation == CU_MEM_ALLOCATION_TYPE_PINNED && type == CU_MEM_LOCATION_TYPE_DEVICE;
}

/* Memory of a location: on one card, on none of the share (`foreign`), or on the host; whatever else, perhaps on any card. */
static vc_cards cards_at(int allocation, int type, int id, bool *foreign)
{
    bool on_host = type == CU_MEM_LOCATION_TYPE_HOST || type == CU_MEM_LOCATION_TYPE_HOST_NUMA ||
                   type == CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
    *foreign = false;
    if (allocation == CU_MEM_ALLOCATION_TYPE_PINNED && on_host)
        return 0;
    if (!is_on_card(allocation, type))
        return vc_cards_all();
    int card = vc_card_of_device(id);
    *foreign = card < 0;
    return card < 0 ? 0 : 1u << card;
}

/* A pool that we did not see made. */
static struct pool *identify(CUmemoryPool handle)
{
    CUmemoryPool of_device;
    int count = 0, allocation = CU_MEM_ALLOCATION_TYPE_PINNED, type = CU_MEM_LOCATION_TYPE_INVALID, id = -1;
    bool foreign;
    if (vc_real.cuDeviceGetCount)
        vc_real.cuDeviceGetCount(&count);
    for (CUdevice device = 0; device < count && type == CU_MEM_LOCATION_TYPE_INVALID; device++) {
        if ((vc_real.cuDeviceGetDefaultMemPool && vc_real.cuDeviceGetDefaultMemPool(&of_device, device) == CUDA_SUCCESS &&
             of_device == handle)) {
            type = CU_MEM_LOCATION_TYPE_DEVICE;
            id = device;
        }
    }
    if (type == CU_MEM_LOCATION_TYPE_INVALID && attribute(handle, CU_MEMPOOL_ATTR_LOCATION_TYPE, &type)) {
        attribute(handle, CU_MEMPOOL_ATTR_LOCATION_ID, &id);
        attribute(handle, CU_MEMPOOL_ATTR_ALLOCATION_TYPE, &allocation);
    }
    vc_cards cards = cards_at(allocation, type, id, &foreign);
    struct pool *pool = add(handle, cards);
    if (pool) {
        pool->is_foreign = foreign;
        pool->is_on_card = is_on_card(allocation, type);
    }
    return pool;
}

/* Allocation. `call` allocates on `stream`; `undo` takes it back. */

typedef CUresult (*allocator)(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
typedef CUresult (*releaser)(CUdeviceptr, CUstream);

static const struct vc_source pools_source;

static bool record(struct pool *pool, CUdeviceptr pointer, uint64_t bytes)
{
    struct vc_allocation allocation = {.key = pointer, .bytes = bytes, .owner = pool, .source = &pools_source,
                                       .cards = pool->meter.cards, .kind = VC_MEMORY_OPAQUE};
    bool recorded = vc_account_record(&allocation);
    vc_add_relaxed(&pool->live, recorded ? bytes : 0);
    return recorded;
}

static CUresult allocate(struct pool *pool, CUdeviceptr *pointer, size_t bytes, CUstream stream, allocator call, releaser undo)
{
    struct vc_metered metered;
    uint64_t size = vc_round_up(bytes, VC__POOL_ALIGNMENT);
    if (!vc_meter_begin(&metered, &pool->meter, size, UINT64_MAX))
        return pool->is_on_card && vc_beyond_every_card(size) ? call(pointer, bytes, pool->handle, stream) : CUDA_ERROR_OUT_OF_MEMORY;
    bool told = is_told(pool);
    CUdeviceptr before = *pointer;
    CUresult result = call(pointer, bytes, pool->handle, stream);
    if (result == CUDA_SUCCESS && !told)
        vc_add(&pool->untold, size);
    bool fits = vc_meter_end(&metered);
    if (result != CUDA_SUCCESS) {
        set_unsettled(pool);
        return result;
    }
    if (fits && record(pool, *pointer, size))
        return CUDA_SUCCESS;
    undo(*pointer, stream);
    *pointer = before;
    if (!told)
        vc_sub(&pool->untold, size);
    vc_meter_trim(&pool->meter); /* what the driver keeps until the stream gets there is charged meanwhile, even over the limit */
    set_unsettled(pool);
    vc_refused(pool->meter.cards, size);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult from_pool(CUdeviceptr *pointer, size_t bytes, CUmemoryPool handle, CUstream stream, bool per_thread, allocator call,
                          releaser undo)
{
    if (!pointer || bytes == 0 || !handle || vc_stream_captures(vc_stream_handle(stream, per_thread)))
        return call(pointer, bytes, handle, stream); /* no memory is taken now, or none at all */
    if (vc_stream_pay(vc_stream_handle(stream, per_thread)) != CUDA_SUCCESS)
        return CUDA_ERROR_OUT_OF_MEMORY;
    struct pool *pool = find(handle);
    if (pool && pool->is_destroyed)
        return CUDA_ERROR_INVALID_VALUE;
    if (!pool && !(pool = identify(handle)))
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!pool->meter.cards && !pool->is_foreign)
        return call(pointer, bytes, handle, stream);
    return pool->is_foreign ? CUDA_ERROR_OUT_OF_MEMORY : allocate(pool, pointer, bytes, stream, call, undo);
}

CUresult vc_hook_cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return from_pool(pointer, bytes, pool, stream, false, vc_real.cuMemAllocFromPoolAsync, vc_real.cuMemFreeAsync);
}

CUresult vc_hook_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return from_pool(pointer, bytes, pool, stream, true, vc_real.cuMemAllocFromPoolAsync_ptsz, vc_real.cuMemFreeAsync_ptsz);
}

static CUresult call_default(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    (void)pool;
    return vc_real.cuMemAllocAsync(pointer, bytes, stream);
}

static CUresult call_default_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    (void)pool;
    return vc_real.cuMemAllocAsync_ptsz(pointer, bytes, stream);
}

/* The stream's device decides, not the current one. */
static CUresult from_default(CUdeviceptr *pointer, size_t bytes, CUstream stream, bool per_thread, allocator call, releaser undo)
{
    CUcontext context;
    CUdevice device;
    CUmemoryPool pool;
    if (!vc_stream_device(vc_stream_handle(stream, per_thread), &device, &context) || !vc_real.cuDeviceGetMemPool ||
        vc_real.cuDeviceGetMemPool(&pool, device) != CUDA_SUCCESS)
        return call(pointer, bytes, NULL, stream);
    int card = vc_card_of_device(device);
    if (card == VC_CARD_NONE || card == VC_CARD_LOST)
        return CUDA_ERROR_OUT_OF_MEMORY;
    return from_pool(pointer, bytes, pool, stream, per_thread, call, undo);
}

CUresult vc_hook_cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return from_default(pointer, bytes, stream, false, call_default, vc_real.cuMemFreeAsync);
}

CUresult vc_hook_cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return from_default(pointer, bytes, stream, true, call_default_ptsz, vc_real.cuMemFreeAsync_ptsz);
}

/* Freeing. */

static void gone(void *what)
{
    vc_charge_freed(what, CUDA_SUCCESS);
    free(what);
}

/* What is not of a pool, whose charge is what the driver says, goes when the stream gets there. */
static void depart(CUstream stream, const struct vc_allocation *freeing)
{
    struct vc_allocation *what = malloc(sizeof *what);
    if (!what)
        return; /* charged until the process ends */
    *what = *freeing;
    vc_depart(stream, gone, what);
}

static CUresult free_async(CUdeviceptr pointer, CUstream stream, bool per_thread, releaser call)
{
    struct vc_allocation freeing;
    CUstream handle = vc_stream_handle(stream, per_thread);
    if (vc_stream_captures(handle))
        return call(pointer, stream);
    bool is_known = vc_charge_take(pointer, &freeing);
    CUresult result = call(pointer, stream);
    if (is_known && result == CUDA_SUCCESS && freeing.source != &pools_source)
        depart(handle, &freeing);
    else if (is_known)
        vc_charge_freed(&freeing, result);
    return result;
}

CUresult vc_hook_cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, stream, false, vc_real.cuMemFreeAsync);
}

CUresult vc_hook_cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, stream, true, vc_real.cuMemFreeAsync_ptsz);
}

/* The pool's own life. */

/* It holds nothing any more and the application has destroyed it. */
static void end_pool(struct pool *pool)
{
    struct known_pool old;
    CUmemoryPool handle = __atomic_exchange_n(&pool->handle, NULL, __ATOMIC_ACQ_REL);
    if (!handle)
        return; /* another thread was here */
    vc_table_take(&known, (uint64_t)(uintptr_t)handle, &old); /* before the driver, who may give it again */
    vc_real.cuMemPoolDestroy(handle);
    vc_meter_settle(&pool->meter, NULL);
}

/* Look at one pool. Returns whether there is more to come. */
static bool look_at(struct pool *pool)
{
    struct vc_reading reading = {0};
    uint64_t threshold = 0;
    if (!pool->meter.cards)
        return false;
    if (pool->is_destroyed)
        vc_meter_trim(&pool->meter);
    bool settled = vc_meter_settle(&pool->meter, &reading);
    if (pool->is_destroyed && pool->handle && reading.used == 0 && reading.reserved == 0) {
        end_pool(pool);
        return false;
    }
    attribute(pool->handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &threshold);
    bool may_shrink = reading.reserved > vc_round_up(reading.used, VC_CHUNK) && reading.reserved > threshold;
    return !settled || may_shrink || reading.used > vc_load_relaxed(&pool->live);
}

static void freed(const struct vc_allocation *allocation)
{
    struct pool *pool = allocation->owner;
    if (vc_load(&pool->untold) > 0) {
        vc_sub(&pool->untold, allocation->bytes);
        vc_meter_settle(&pool->meter, NULL);
    }
    vc_sub(&pool->live, allocation->bytes);
    /* The last memory of a destroyed pool takes it along. */
    if (!pool->is_destroyed || look_at(pool))
        set_unsettled(pool);
}

static void settle(void)
{
    if (VC_LIKELY(!vc_load_relaxed(&unsettled)))
        return;
    pthread_mutex_lock(&mutex);
    struct pool *pool = unsettled;
    unsettled = NULL;
    pthread_mutex_unlock(&mutex);
    while (pool) {
        pthread_mutex_lock(&mutex);
        struct pool *next = pool->next_unsettled;
        pool->is_unsettled = false;
        pthread_mutex_unlock(&mutex);
        if (look_at(pool))
            set_unsettled(pool);
        pool = next;
    }
}

static void make_room(uint32_t card)
{
    settle();
    for (struct pool *pool = vc_load_acquire(&pools); pool; pool = pool->next) {
        if (pool->handle && pool->meter.charged > 0 && (pool->meter.cards >> card & 1))
            vc_meter_trim(&pool->meter);
    }
}

/* A reset empties pools; whatever the driver did, it says what they hold now. */
static void context_ended(CUcontext context)
{
    (void)context;
    for (struct pool *pool = vc_load_acquire(&pools); pool; pool = pool->next) {
        if (pool->handle && (pool->meter.charged > 0 || pool->is_destroyed) && look_at(pool))
            set_unsettled(pool);
    }
}

static const struct vc_source pools_source = {
    .make_room = make_room, .settle = settle, .freed = freed, .context_ended = context_ended};
VC_SOURCE(pools_source);

CUresult vc_hook_cuMemPoolCreate(CUmemoryPool *handle, const CUmemPoolProps *properties)
{
    bool foreign;
    CUresult result = vc_real.cuMemPoolCreate(handle, properties);
    if (result != CUDA_SUCCESS)
        return result;
    vc_cards cards = cards_at(properties->allocType, properties->location.type, properties->location.id, &foreign);
    struct pool *pool = add(*handle, cards);
    if (!pool) {
        vc_real.cuMemPoolDestroy(*handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    pool->is_foreign = foreign;
    pool->is_on_card = is_on_card(properties->allocType, properties->location.type);
    pool->is_ours_to_destroy = cards != 0;
    return result;
}

CUresult vc_hook_cuMemPoolTrimTo(CUmemoryPool handle, size_t keep_bytes)
{
    struct pool *pool = find(handle);
    if (pool && pool->is_destroyed)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = vc_real.cuMemPoolTrimTo(handle, keep_bytes);
    if (pool && result == CUDA_SUCCESS)
        vc_meter_settle(&pool->meter, NULL);
    return result;
}

/* The device goes back to its default pool, as the driver's own destruction does it. */
static void replace_as_current(CUmemoryPool handle)
{
    int count = 0;
    CUmemoryPool current;
    if (!vc_real.cuDeviceGetCount || !vc_real.cuDeviceGetMemPool || !vc_real.cuDeviceSetMemPool || !vc_real.cuDeviceGetDefaultMemPool)
        return;
    vc_real.cuDeviceGetCount(&count);
    for (CUdevice device = 0; device < count; device++) {
        if (vc_real.cuDeviceGetMemPool(&current, device) == CUDA_SUCCESS && current == handle &&
            vc_real.cuDeviceGetDefaultMemPool(&current, device) == CUDA_SUCCESS)
            vc_real.cuDeviceSetMemPool(device, current);
    }
}

CUresult vc_hook_cuMemPoolDestroy(CUmemoryPool handle)
{
    uint64_t none = 0;
    struct pool *pool = find(handle);
    struct known_pool old;
    struct vc_reading reading = {0};
    if (pool && pool->is_destroyed)
        return CUDA_ERROR_INVALID_VALUE;
    if (pool && pool->is_ours_to_destroy) {
        vc_meter_trim(&pool->meter);
        pool->meter.read(&pool->meter, &reading);
    }
    /* What is freed in a stream that has not got there is on the card, whether the driver counts it as used or not. */
    if (reading.reserved > 0) {
        pool->is_destroyed = true;
        replace_as_current(handle);
        if (vc_real.cuMemPoolSetAttribute)
            vc_real.cuMemPoolSetAttribute(handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &none);
        vc_meter_trim(&pool->meter);
        set_unsettled(pool);
        return CUDA_SUCCESS;
    }
    bool is_known = pool && vc_table_take(&known, (uint64_t)(uintptr_t)handle, &old);
    CUresult result = vc_real.cuMemPoolDestroy(handle);
    if (is_known && result != CUDA_SUCCESS) {
        vc_table_put(&known, &old);
    } else if (is_known) {
        vc_store_release(&pool->handle, NULL);
        vc_meter_settle(&pool->meter, NULL);
    }
    return result;
}
