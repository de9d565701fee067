/* Pools of stream-ordered memory.
 *
 * The mutex of one pool is held across the driver's allocation from it (the driver serialises them too): between
 * reading what the pool has reserved and charging it, no other thread may make it grow. */
#include "cuda/memory/pool.h"

#include <stdlib.h>

#include "cuda/memory/charge.h"

#define VC__POOL_ALIGNMENT 512u /* of sizes within a pool */
#define VC__GROWTHS_TO_LEARN 8u

struct pool {
    struct pool *next; /* the list only grows; a destroyed pool's record is used again */
    pthread_mutex_t mutex;
    CUmemoryPool handle; /* NULL: free record */
    uint64_t serial;     /* names the pool in the ledger: handles come back */
    int card;            /* VC_CARD_NONE: a pool of host memory, not charged */
    uint64_t charged;    /* bytes of it that are committed in the quota */
    uint64_t live;       /* bytes allocated from it and not freed */
};

static struct pool *pools; /* pushed with compare-and-swap */
static pthread_mutex_t creation = PTHREAD_MUTEX_INITIALIZER;
static uint64_t next_serial = 1;
/* The largest steps that a driver is known to let a pool grow by, until this driver shows smaller ones. */
static uint64_t growth_unit = (uint64_t)32 << 20;
static uint32_t unsettled; /* something was freed asynchronously since all charges were brought up to date */

static void forget(void)
{
    pools = NULL; /* the parent's; a thread of it may hold their mutexes */
    pthread_mutex_init(&creation, NULL);
    unsettled = 0;
}

static struct pool *find_handle(CUmemoryPool handle)
{
    for (struct pool *pool = vc_load_acquire(&pools); pool; pool = pool->next) {
        if (vc_load_acquire(&pool->handle) == handle)
            return pool;
    }
    return NULL;
}

static struct pool *find_or_add(CUmemoryPool handle, int card)
{
    struct pool *pool = find_handle(handle);
    if (pool)
        return pool;
    static uint32_t watching;
    if (__atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    pthread_mutex_lock(&creation);
    pool = find_handle(handle);
    if (!pool) {
        pool = find_handle(NULL);
        bool reused = pool != NULL;
        if (!pool)
            pool = calloc(1, sizeof *pool);
        if (pool) {
            if (!reused)
                pthread_mutex_init(&pool->mutex, NULL);
            pool->serial = next_serial++;
            pool->card = card;
            pool->charged = pool->live = 0;
            vc_store_release(&pool->handle, handle);
            if (!reused) {
                pool->next = pools;
                vc_store_release(&pools, pool);
            }
        }
    }
    pthread_mutex_unlock(&creation);
    return pool;
}

/* What the pool has reserved of the card. Older drivers without the attribute: what we know to be allocated. */
static uint64_t reserved_now(const struct pool *pool)
{
    uint64_t bytes = 0;
    if (!vc_real.cuMemPoolGetAttribute ||
        vc_real.cuMemPoolGetAttribute(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &bytes) != CUDA_SUCCESS)
        return pool->live;
    return bytes;
}

/* Pre: the pool's mutex is held. Lower the charge to what is reserved; return the bytes that became free. */
static uint64_t lower_charge(struct vc_region *region, struct pool *pool)
{
    uint64_t now = reserved_now(pool);
    if (now >= pool->charged)
        return 0;
    uint64_t less = pool->charged - now;
    vc_quota_release(region, (uint32_t)pool->card, less, VC_QUOTA_PLAIN);
    pool->charged = now;
    return less;
}

bool vc_pools_make_room(uint32_t card)
{
    struct vc_region *region = vc_region_get();
    uint64_t freed = 0;
    for (struct pool *pool = vc_load_acquire(&pools); pool; pool = pool->next) {
        /* Another thread inside this pool's allocation: what it holds is not idle. Our own: see allocate(). */
        if (pool->card != (int)card || pthread_mutex_trylock(&pool->mutex) != 0)
            continue;
        if (pool->handle) {
            if (pool->charged > pool->live && vc_real.cuMemPoolTrimTo)
                vc_real.cuMemPoolTrimTo(pool->handle, 0);
            freed += lower_charge(region, pool);
        }
        pthread_mutex_unlock(&pool->mutex);
    }
    return freed > 0;
}

void vc_pools_settle(void)
{
    if (VC_LIKELY(!vc_load_relaxed(&unsettled)) || !__atomic_exchange_n(&unsettled, 0, __ATOMIC_ACQ_REL))
        return;
    struct vc_region *region = vc_region_get();
    for (struct pool *pool = vc_load_acquire(&pools); pool; pool = pool->next) {
        pthread_mutex_lock(&pool->mutex);
        if (pool->handle && pool->card >= 0) {
            lower_charge(region, pool);
            if (pool->charged > pool->live)
                vc_store_relaxed(&unsettled, 1); /* not given back yet: look again later */
        }
        pthread_mutex_unlock(&pool->mutex);
    }
}

typedef CUresult (*allocator)(CUdeviceptr *, size_t, CUmemoryPool, CUstream);

/* Learn from a growth that was seen: pools grow in powers of two that only shrink in our view. One smaller growth may be
 * two changes at once (another thread's synchronisation gave something back); many in a row are the driver's way. */
static void learn_unit(uint64_t growth)
{
    static uint32_t in_a_row;
    uint64_t unit = growth & -growth;
    if (unit < VC_CHUNK || unit >= vc_load_relaxed(&growth_unit))
        vc_store_relaxed(&in_a_row, 0);
    else if (vc_add_relaxed(&in_a_row, 1) >= VC__GROWTHS_TO_LEARN)
        vc_store_relaxed(&growth_unit, unit);
}

/* Pre: pool->mutex held, `held` bytes are reserved in the quota for this allocation. Charge what the pool has really
 * grown by. False: it grew beyond the limit. */
static bool true_up(struct vc_region *region, struct pool *pool, uint64_t held)
{
    uint64_t now = reserved_now(pool);
    uint64_t growth = now > pool->charged ? now - pool->charged : 0;
    if (growth > held && !vc_quota_reserve(region, (uint32_t)pool->card, growth - held))
        return false;
    if (growth < held)
        vc_quota_rollback(region, (uint32_t)pool->card, held - growth);
    if (growth > 0) {
        vc_quota_commit(region, (uint32_t)pool->card, growth, VC_QUOTA_PLAIN);
        learn_unit(growth);
    }
    pool->charged += growth;
    lower_charge(region, pool);
    return true;
}

/* Pre: the pool's mutex is held. An allocation was taken back, but the driver keeps its memory until the stream got there:
 * charge what the pool has, even over the limit, until it is settled. */
static void charge_rest(struct vc_region *region, struct pool *pool)
{
    uint64_t now = reserved_now(pool);
    if (now <= pool->charged)
        return;
    vc_quota_charge(region, (uint32_t)pool->card, now - pool->charged, VC_QUOTA_PLAIN);
    pool->charged = now;
    vc_store_relaxed(&unsettled, 1);
}

/* What the pool may have to take from the card to serve `bytes`. Pre: its mutex is held. */
static uint64_t expected_growth(const struct pool *pool, uint64_t bytes)
{
    uint64_t wanted = bytes > UINT64_MAX - pool->live ? UINT64_MAX : pool->live + bytes;
    return wanted > pool->charged ? vc_round_up(wanted - pool->charged, vc_load_relaxed(&growth_unit)) : 0;
}

/* Pre: the pool's mutex is held. Reserve what it may grow by; *held is that. Before refusing, what this pool and others
 * hold idle is given back. */
static bool reserve_growth(struct vc_region *region, struct pool *pool, uint64_t bytes, uint64_t *held)
{
    if (pool->charged > pool->live)
        lower_charge(region, pool); /* what the driver has given back since it may have to take again */
    *held = expected_growth(pool, bytes);
    if (*held == 0 || vc_quota_reserve(region, (uint32_t)pool->card, *held))
        return true;
    vc_pools_make_room((uint32_t)pool->card);
    *held = expected_growth(pool, bytes);
    return *held == 0 || vc_quota_reserve(region, (uint32_t)pool->card, *held);
}

/* Allocate from a pool of the share. `call` allocates from `handle` on `stream`, `undo` takes it back. */
static CUresult allocate(int card, CUmemoryPool handle, CUdeviceptr *pointer, size_t bytes, CUstream stream, allocator call,
                         CUresult (*undo)(CUdeviceptr, CUstream))
{
    struct vc_region *region = vc_region_get();
    struct pool *pool = find_or_add(handle, card);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t held, size = vc_round_up(bytes, VC__POOL_ALIGNMENT);
    pthread_mutex_lock(&pool->mutex);
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!reserve_growth(region, pool, size, &held)) {
        vc_quota_refused(region, (uint32_t)card);
    } else if ((result = call(pointer, bytes, handle, stream)) != CUDA_SUCCESS) {
        vc_quota_rollback(region, (uint32_t)card, held);
    } else if (!true_up(region, pool, held)) {
        undo(*pointer, stream);
        vc_quota_rollback(region, (uint32_t)card, held);
        vc_real.cuMemPoolTrimTo(handle, 0);
        charge_rest(region, pool);
        vc_quota_refused(region, (uint32_t)card);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (bytes > 0 && !vc_charge_record_pooled(*pointer, size, pool->serial, card)) {
        undo(*pointer, stream);
        vc_store_relaxed(&unsettled, 1); /* what it took for this is charged until the driver has given it back */
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        pool->live += size;
    }
    pthread_mutex_unlock(&pool->mutex);
    return result;
}

/* The pool a plain cuMemAllocAsync takes from, and its card. VC_CARD_UNKNOWN: let the driver answer. */
static int default_pool(CUmemoryPool *pool)
{
    CUdevice device;
    int card = vc_card_of_current(vc_region_get(), NULL);
    if (card == VC_CARD_NONE || card == VC_CARD_UNKNOWN)
        return card;
    if (!vc_real.cuDeviceGetMemPool || vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS ||
        vc_real.cuDeviceGetMemPool(pool, device) != CUDA_SUCCESS)
        return VC_CARD_UNKNOWN;
    return card;
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

static CUresult from_default(CUdeviceptr *pointer, size_t bytes, CUstream stream, allocator call,
                             CUresult (*undo)(CUdeviceptr, CUstream))
{
    CUmemoryPool pool = NULL;
    int card = default_pool(&pool);
    if (card == VC_CARD_NONE)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (card == VC_CARD_UNKNOWN)
        return call(pointer, bytes, pool, stream);
    return allocate(card, pool, pointer, bytes, stream, call, undo);
}

CUresult vc_hook_cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return from_default(pointer, bytes, stream, call_default, vc_real.cuMemFreeAsync);
}

CUresult vc_hook_cuMemAllocAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return from_default(pointer, bytes, stream, call_default_ptsz, vc_real.cuMemFreeAsync_ptsz);
}

/* A pool that we saw being made has its card; any other (a device's default pool) is taken to be the current card's. */
static CUresult from_pool(CUdeviceptr *pointer, size_t bytes, CUmemoryPool handle, CUstream stream, allocator call,
                          CUresult (*undo)(CUdeviceptr, CUstream))
{
    struct pool *pool = handle ? find_handle(handle) : NULL;
    if (pool && pool->card < 0)
        return call(pointer, bytes, handle, stream);
    int card = pool ? pool->card : vc_card_of_current(vc_region_get(), NULL);
    if (card == VC_CARD_NONE)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (card == VC_CARD_UNKNOWN || !handle)
        return call(pointer, bytes, handle, stream);
    return allocate(card, handle, pointer, bytes, stream, call, undo);
}

CUresult vc_hook_cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return from_pool(pointer, bytes, pool, stream, vc_real.cuMemAllocFromPoolAsync, vc_real.cuMemFreeAsync);
}

CUresult vc_hook_cuMemAllocFromPoolAsync_ptsz(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    return from_pool(pointer, bytes, pool, stream, vc_real.cuMemAllocFromPoolAsync_ptsz, vc_real.cuMemFreeAsync_ptsz);
}

static CUresult free_async(CUdeviceptr pointer, CUstream stream, CUresult (*call)(CUdeviceptr, CUstream))
{
    struct vc_freeing freeing;
    bool known = vc_charge_take(pointer, &freeing);
    CUresult result = call(pointer, stream);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}

CUresult vc_hook_cuMemFreeAsync(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, stream, vc_real.cuMemFreeAsync);
}

CUresult vc_hook_cuMemFreeAsync_ptsz(CUdeviceptr pointer, CUstream stream)
{
    return free_async(pointer, stream, vc_real.cuMemFreeAsync_ptsz);
}

void vc_pool_freed(const struct vc_entry *entry)
{
    struct vc_region *region = vc_region_get();
    for (struct pool *pool = vc_load_acquire(&pools); pool; pool = pool->next) {
        if (pool->serial != entry->owner || pool->card != entry->card)
            continue;
        pthread_mutex_lock(&pool->mutex);
        bool alive = pool->handle && pool->serial == entry->owner;
        if (alive) {
            pool->live -= entry->bytes;
            if (lower_charge(region, pool) == 0 || pool->charged > pool->live)
                vc_store_relaxed(&unsettled, 1); /* the driver keeps it until the stream got there */
        }
        pthread_mutex_unlock(&pool->mutex);
        if (alive)
            return;
    }
    /* Its pool was destroyed while this was in use: the memory was charged to itself since then. */
    vc_quota_release(region, (uint32_t)entry->card, entry->bytes, VC_QUOTA_PLAIN);
}

CUresult vc_hook_cuMemPoolCreate(CUmemoryPool *handle, const CUmemPoolProps *properties)
{
    CUresult result = vc_real.cuMemPoolCreate(handle, properties);
    if (result != CUDA_SUCCESS)
        return result;
    bool on_device = properties->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    int card = on_device ? vc_card_of_device(vc_region_get(), properties->location.id) : VC_CARD_NONE;
    if (on_device && card < 0)
        return result; /* not of the share: what is taken from it is refused then */
    if (!find_or_add(*handle, card)) {
        vc_real.cuMemPoolDestroy(*handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return result;
}

CUresult vc_hook_cuMemPoolTrimTo(CUmemoryPool handle, size_t keep_bytes)
{
    CUresult result = vc_real.cuMemPoolTrimTo(handle, keep_bytes);
    struct pool *pool = handle ? find_handle(handle) : NULL;
    if (pool && result == CUDA_SUCCESS) {
        pthread_mutex_lock(&pool->mutex);
        if (pool->handle == handle && pool->card >= 0)
            lower_charge(vc_region_get(), pool);
        pthread_mutex_unlock(&pool->mutex);
    }
    return result;
}

CUresult vc_hook_cuMemPoolDestroy(CUmemoryPool handle)
{
    struct pool *pool = handle ? find_handle(handle) : NULL;
    if (!pool)
        return vc_real.cuMemPoolDestroy(handle);
    pthread_mutex_lock(&pool->mutex);
    CUresult result = vc_real.cuMemPoolDestroy(handle);
    if (result == CUDA_SUCCESS && pool->handle == handle) {
        /* What is still in use lives on and is charged to itself; the rest is gone. */
        uint64_t kept = pool->live < pool->charged ? pool->live : pool->charged;
        if (pool->charged > kept)
            vc_quota_release(vc_region_get(), (uint32_t)pool->card, pool->charged - kept, VC_QUOTA_PLAIN);
        pool->charged = pool->live = 0;
        vc_store_release(&pool->handle, NULL);
    }
    pthread_mutex_unlock(&pool->mutex);
    return result;
}
