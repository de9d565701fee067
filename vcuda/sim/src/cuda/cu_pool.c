/* Memory pools: made, destroyed, asked and told; stream-ordered allocation from them. */
#include <stdlib.h>
#include <unistd.h>

#include "cu_capture.h"
#include "cu_pool.h"

static CUmemoryPool pools; /* under cu_lock, as all of this */

static CUmemoryPool make_pool(int device, const CUmemPoolProps *props, cu_pool_place place, int lazily)
{
    CUmemoryPool pool = calloc(1, sizeof *pool);
    if (!pool)
        return NULL;
    pool->magic = CU_MAGIC_POOL;
    pool->device = device;
    pool->alive = 1;
    pool->place = place;
    pool->props = *props;
    pool->reuse[0] = pool->reuse[1] = pool->reuse[2] = 1;
    pool->shared_fd = -1;
    cu_space_begin(pool, lazily);
    pool->next = pools;
    pools = pool;
    return pool;
}

/* The structs of the last pools that ended stay readable, so that a stale handle is refused. */
static void bury(CUmemoryPool pool)
{
    enum { REMEMBERED = 1024 };
    static CUmemoryPool graves[REMEMBERED];
    static unsigned next;
    CUmemoryPool *link = &pools;
    while (*link != pool)
        link = &(*link)->next;
    *link = pool->next;
    if (pool->shared_fd >= 0)
        close(pool->shared_fd);
    pool->magic = 0;
    free(graves[next]);
    graves[next] = pool;
    next = (next + 1) % REMEMBERED;
}

static void end_if_over(CUmemoryPool pool)
{
    if (pool->alive)
        return;
    cu_space_release(pool, 0);
    if (!pool->blocks)
        bury(pool);
}

static CUmemoryPool lazily(CUmemoryPool *place, int device)
{
    const CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                  .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    if (!*place)
        *place = make_pool(device, &props, CU_POOL_ON_CARD, 1);
    return *place;
}

CUmemoryPool cu_pool_default(int device)
{
    return lazily(&cu_process.devices[device].default_pool, device);
}

CUmemoryPool cu_pool_graph(int device)
{
    CUmemoryPool pool = lazily(&cu_process.devices[device].graph_pool, device);
    if (pool) {
        pool->graph = 1;
        pool->threshold = UINT64_MAX; /* kept until cuDeviceGraphMemTrim */
    }
    return pool;
}

CUmemoryPool cu_pool_imported(int device, int fd)
{
    const CUmemPoolProps props = {.allocType = CU_MEM_ALLOCATION_TYPE_PINNED,
                                  .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                  .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    CUmemoryPool pool = make_pool(device, &props, CU_POOL_ON_HOST, 0); /* what pays is the exporter's */
    if (!pool) {
        close(fd);
        return NULL;
    }
    pool->imported = 1;
    pool->shared_fd = fd;
    return pool;
}

uint64_t cu_pools_trim(int device)
{
    uint64_t released = 0;
    cu_order_settle();
    cu_physical_sweep();
    for (CUmemoryPool pool = pools; pool; pool = pool->next)
        if (pool->device == device && pool->place == CU_POOL_ON_CARD)
            released += cu_space_release(pool, 0);
    return released;
}

void cu_pools_settle(int device)
{
    pthread_mutex_lock(&cu_lock);
    cu_order_settle();
    cu_physical_sweep();
    for (CUmemoryPool pool = pools; pool; pool = pool->next)
        if (pool->device == device && pool->reserved > pool->threshold)
            cu_space_release(pool, pool->threshold);
    pthread_mutex_unlock(&cu_lock);
}

void cu_pool_forget(cu_block *block)
{
    CUmemoryPool pool = block->pool;
    pool->used -= block->counted;
    pool->blocks--;
    if (pool->place == CU_POOL_MANAGED)
        pool->reserved -= block->extent.bytes;
    else if (!pool->imported)
        cu_space_give(pool, &block->extent);
    end_if_over(pool);
}

static void count(CUmemoryPool pool, cu_block *block)
{
    block->counted = block->extent.bytes;
    pool->used += block->counted;
    pool->used_high = pool->used > pool->used_high ? pool->used : pool->used_high;
}

/* Managed memory of a pool: each allocation is by itself, where the pool prefers it to be. */
static CUresult allocate_managed(CUmemoryPool pool, size_t bytes, cu_block **block)
{
    const size_t whole = cu_up(bytes, CU_CHUNK);
    const int on_card = pool->props.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    CUresult bad = on_card ? cu_place(NULL, pool->device, whole, CU_BLOCK_MANAGED, 1, block) : CUDA_ERROR_OUT_OF_MEMORY;
    if (bad)
        bad = cu_place(NULL, pool->device, whole, CU_BLOCK_MANAGED, 0, block);
    if (bad)
        return bad;
    (*block)->extent.bytes = whole;
    (*block)->flags = 1; /* attached globally */
    pool->reserved += whole;
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    return CUDA_SUCCESS;
}

/* By the order of the programming guide: what is free, what this stream or one that it follows gives back, more memory of the
 * card, what another stream gives back after a wait. */
static CUresult allocate_divided(CUmemoryPool pool, size_t bytes, CUstream stream, cu_block **block)
{
    cu_extent extent;
    if (cu_space_take(pool, bytes, &extent) && cu_order_reuse(pool, bytes, stream, 0, &extent)) {
        const CUresult bad = cu_space_grow(pool, bytes);
        if (bad ? !pool->reuse[2] || cu_order_reuse(pool, bytes, stream, 1, &extent)
                : cu_space_take(pool, bytes, &extent))
            return bad ? bad : CUDA_ERROR_OUT_OF_MEMORY;
    }
    const CUresult bad = cu_place(NULL, pool->device, bytes, CU_BLOCK_POOL, 0, block);
    if (bad)
        cu_space_give(pool, &extent);
    else
        (*block)->extent = extent;
    return bad;
}

static CUresult allocate_now(CUmemoryPool pool, size_t bytes, CUstream stream, CUdeviceptr *pointer)
{
    cu_block *block;
    pthread_mutex_lock(&cu_lock);
    cu_order_settle();
    CUresult bad = bytes > (1ull << 46)            ? CUDA_ERROR_OUT_OF_MEMORY
                   : pool->place == CU_POOL_MANAGED ? allocate_managed(pool, bytes, &block)
                                                    : allocate_divided(pool, bytes, stream, &block);
    if (!bad) {
        block->pool = pool;
        pool->blocks++;
        count(pool, block);
        *pointer = block->start;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

static CUmemoryPool ending;

static void end_if_from(cu_block *block)
{
    if (block->pool != ending && (block->kind != CU_BLOCK_GRAPH || ending != cu_process.devices[block->device].graph_pool))
        return;
    cu_order_forget(block);
    block->held = 0;
    block->uses = block->uses > 0;
    cu_block_end(block);
}

void cu_pools_reset(int device)
{
    cu_device *found = &cu_process.devices[device];
    for (CUmemoryPool pool = pools, next; pool; pool = next) {
        next = pool->next;
        if (pool->device != device || pool->place == CU_POOL_ON_HOST)
            continue;
        const int kept = pool == found->default_pool || pool->graph;
        ending = pool;
        pool->alive = 1; /* until it is empty */
        cu_each_block(NULL, end_if_from);
        pool->alive = kept;
        pool->threshold = pool->graph ? pool->threshold : 0;
        cu_space_release(pool, 0);
        end_if_over(pool);
    }
    found->current_pool = NULL;
}

/* ---- the API ---- */

CUresult cu_pool_of(CUmemoryPool pool)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return pool && pool->magic == CU_MAGIC_POOL && pool->alive && !pool->graph ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !pointer)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    if (!bytes) {
        *pointer = 0;
        return CUDA_SUCCESS;
    }
    bad = pool && pool->imported ? CUDA_ERROR_INVALID_VALUE : cu_alloc_fault(stream->ctx);
    if (bad)
        return bad;
    if (stream->capture) {
        cu_work work = {.kind = CU_GRAPH_NODE_TYPE_MEM_ALLOC};
        work.alloc.bytesize = bytes;
        work.alloc.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        work.alloc.poolProps.location = pool ? pool->props.location
                                             : (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, stream->ctx->device};
        return cu_capture_alloc(stream, &work, pointer);
    }
    bad = cu_capture_implicit(stream);
    if (bad)
        return bad;
    if (!pool) {
        pthread_mutex_lock(&cu_lock);
        pool = cu_process.devices[stream->ctx->device].current_pool;
        if (!pool)
            pool = cu_pool_default(stream->ctx->device);
        pthread_mutex_unlock(&cu_lock);
    }
    return pool ? allocate_now(pool, bytes, stream, pointer) : CUDA_ERROR_OUT_OF_MEMORY;
}

CU_EXPORT CUresult cuMemAllocAsync(CUdeviceptr *pointer, size_t bytes, CUstream stream)
{
    return allocate(pointer, bytes, NULL, stream);
}

CU_EXPORT CUresult cuMemAllocFromPoolAsync(CUdeviceptr *pointer, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    const CUresult bad = cu_pool_of(pool);
    return bad ? bad : allocate(pointer, bytes, pool, stream);
}

CU_EXPORT CUresult cuMemFreeAsync(CUdeviceptr pointer, CUstream handle)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad || !pointer)
        return bad;
    if (stream->capture)
        return cu_capture_add(stream, &(cu_work){.kind = CU_GRAPH_NODE_TYPE_MEM_FREE, .free = pointer}, NULL);
    bad = cu_capture_implicit(stream);
    return bad ? bad : cu_free_block(pointer, stream);
}

/* Which device a pool at the location is told of as, and where its memory lies. */
static CUresult place_of(const CUmemPoolProps *props, int *device, cu_pool_place *place)
{
    cu_device *found;
    const int managed = (int)props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    *device = 0;
    *place = managed ? CU_POOL_MANAGED : CU_POOL_ON_HOST;
    switch ((int)props->location.type) {
    case CU_MEM_LOCATION_TYPE_NONE: /* no preference: only managed pools know it */
        return managed ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    case CU_MEM_LOCATION_TYPE_HOST:
        return props->handleTypes ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN: /* one domain per card: the card itself */
        if (managed || props->location.id >> 8)
            return CUDA_ERROR_INVALID_VALUE;
        *place = CU_POOL_ON_CARD;
        *device = props->location.id & 0xff;
        return cu_device_of(*device, &found);
    case CU_MEM_LOCATION_TYPE_DEVICE:
        *place = managed ? CU_POOL_MANAGED : CU_POOL_ON_CARD;
        *device = props->location.id;
        return cu_device_of(*device, &found);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

CU_EXPORT CUresult cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    cu_pool_place place;
    int device;
    CUresult bad = cu_initialised();
    if (bad || !pool || !props)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int managed = (int)props->allocType == CU_MEM_ALLOCATION_TYPE_MANAGED;
    if (((int)props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED && !managed) ||
        (managed && (props->handleTypes || props->maxSize)))
        return CUDA_ERROR_INVALID_VALUE;
    if ((int)props->handleTypes > CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED;
    bad = place_of(props, &device, &place);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    *pool = make_pool(device, props, place, 0);
    if (*pool && (int)props->location.type == CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN)
        (*pool)->props.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, device}; /* as documented for one domain */
    pthread_mutex_unlock(&cu_lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Memory that is still in use stays valid; its pool ends with it. */
CU_EXPORT CUresult cuMemPoolDestroy(CUmemoryPool pool)
{
    const CUresult bad = cu_pool_of(pool);
    if (bad)
        return bad;
    cu_device *device = &cu_process.devices[pool->device];
    if (pool == device->default_pool || pool == device->graph_pool)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    cu_order_settle();
    pool->alive = 0;
    if (device->current_pool == pool)
        device->current_pool = NULL;
    end_if_over(pool);
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    const CUresult bad = cu_pool_of(pool);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    if (!pool->ragged) /* frees that no synchronisation has seen "can count as outstanding": in one model they do */
        cu_order_settle();
    cu_space_release(pool, keep);
    pthread_mutex_unlock(&cu_lock);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    const CUresult bad = cu_pool_of(pool);
    if (bad || !value)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int number = (int)attribute;
    pthread_mutex_lock(&cu_lock);
    if (!pool->ragged)
        cu_order_settle();
    const uint64_t counts[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    pthread_mutex_unlock(&cu_lock);
    if (number >= 1 && number <= 3)
        *(int *)value = pool->reuse[number - 1];
    else if (number >= 4 && number <= 8)
        *(cuuint64_t *)value = counts[number - 4];
    else
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CUresult bad = cu_pool_of(pool);
    if (bad || !value)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int number = (int)attribute;
    pthread_mutex_lock(&cu_lock);
    if (number >= 1 && number <= 3)
        pool->reuse[number - 1] = *(const int *)value;
    else if (number == 4)
        pool->threshold = *(const cuuint64_t *)value;
    else if (number == 6 && *(const cuuint64_t *)value == 0)
        pool->reserved_high = pool->reserved;
    else if (number == 8 && *(const cuuint64_t *)value == 0)
        pool->used_high = pool->used;
    else
        bad = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    cu_device *found;
    CUresult bad = cu_pool_of(pool);
    if (bad || (!map && count))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; !bad && i < count; i++) {
        const int on_card = (int)map[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE;
        if (on_card)
            bad = cu_device_of(map[i].location.id, &found);
        if (bad || !on_card || map[i].location.id == pool->device)
            continue;
        pool->reached_by &= ~(1u << map[i].location.id);
        pool->reached_by |= (map[i].flags != 0 ? 1u : 0u) << map[i].location.id;
    }
    return bad;
}

CU_EXPORT CUresult cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
    const CUresult bad = cu_pool_of(pool);
    if (bad || !flags || !location)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int own = pool->place == CU_POOL_ON_CARD && location->id == pool->device;
    const int reached = location->id >= 0 && location->id < SIM_MAX_CARDS && (pool->reached_by >> location->id & 1);
    *flags = own || reached ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : 0;
    return CUDA_SUCCESS;
}

static CUresult device_pool(CUmemoryPool *pool, CUdevice device, int want_default)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad || !pool)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    *pool = !want_default && found->current_pool ? found->current_pool : cu_pool_default(device);
    pthread_mutex_unlock(&cu_lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CU_EXPORT CUresult cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    return device_pool(pool, device, 1);
}

CU_EXPORT CUresult cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    return device_pool(pool, device, 0);
}

CU_EXPORT CUresult cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    cu_device *found;
    CUresult bad = cu_device_of(device, &found);
    if (!bad)
        bad = cu_pool_of(pool);
    if (bad || pool->device != device || pool->place != CU_POOL_ON_CARD || pool->imported)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    found->current_pool = pool;
    return CUDA_SUCCESS;
}
