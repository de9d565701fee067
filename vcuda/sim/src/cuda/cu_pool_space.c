/* How a pool gets, divides and gives back the card's memory: two models of what CUDA leaves to the driver.
 *
 * CUDA documents neither the unit in which a pool grows nor what it keeps. `even` (the default): it grows by 32 MiB, what it
 * has is one sum, and it gives back to 2 MiB. `ragged`: it grows by segments of odd sizes, allocations lie in one segment each,
 * only a segment without any goes back, and a synchronisation may leave one behind. Drawn from a seed: the same calls find
 * the same sizes.
 */
#include "cu_pool.h"

#include <stdlib.h>
#include <string.h>

#define EVEN_GROWTH (32ull << 20)
#define RAGGED_UNIT 4096ull

typedef struct gap {
    struct gap *next;
    size_t offset, bytes;
} gap;

typedef struct cu_segment {
    struct cu_segment *next;
    size_t bytes, taken;
    gap *gaps; /* by offset */
} segment;

static uint64_t draw(CUmemoryPool pool)
{
    pool->random ^= pool->random << 13;
    pool->random ^= pool->random >> 7;
    pool->random ^= pool->random << 17;
    return pool->random;
}

void cu_space_begin(CUmemoryPool pool, int lazily)
{
    static uint64_t pools_made;
    const sim_card_config *config = &cu_process.state->config.cards[cu_process.devices[pool->device].card];
    uint64_t seed = config->pool_seed;
    pool->ragged = config->ragged_pools;
    const char *named = secure_getenv("VCUDA_SIM_POOLS");
    if (named && !strncmp(named, "even", 4))
        pool->ragged = 0;
    if (named && !strncmp(named, "ragged", 6)) {
        pool->ragged = 1;
        seed = named[6] == ':' ? strtoull(named + 7, NULL, 10) : seed;
    }
    pool->random = (seed + 1) * 0x9e3779b97f4a7c15ull + (lazily ? ~(uint64_t)pool->device : ++pools_made) * 0xbf58476d1ce4e5b9ull;
    pool->random |= 1;
}

uint64_t cu_space_counted(const struct CUmemPoolHandle_st *pool, uint64_t bytes)
{
    return pool->graph ? cu_up(bytes, CU_CHUNK) : cu_up(bytes, pool->ragged ? RAGGED_UNIT : CU_POOL_UNIT);
}

/* ---- gaps of a segment ---- */

static int take_gap(segment *from, size_t bytes, cu_extent *extent)
{
    for (gap **link = &from->gaps; *link; link = &(*link)->next) {
        gap *one = *link;
        if (one->bytes < bytes)
            continue;
        *extent = (cu_extent){from, one->offset, bytes};
        one->offset += bytes;
        one->bytes -= bytes;
        if (!one->bytes) {
            *link = one->next;
            free(one);
        }
        from->taken += bytes;
        return 0;
    }
    return -1;
}

static void give_gap(segment *to, size_t offset, size_t bytes)
{
    gap **link = &to->gaps, *before = NULL;
    while (*link && (*link)->offset < offset) {
        before = *link;
        link = &(*link)->next;
    }
    gap *after = *link;
    to->taken -= bytes;
    if (before && before->offset + before->bytes == offset) {
        before->bytes += bytes;
        if (after && before->offset + before->bytes == after->offset) {
            before->bytes += after->bytes;
            before->next = after->next;
            free(after);
        }
    } else if (after && offset + bytes == after->offset) {
        after->offset = offset;
        after->bytes += bytes;
    } else {
        gap *made = malloc(sizeof *made);
        if (!made)
            return; /* never used again: only the process's own loss */
        *made = (gap){after, offset, bytes};
        *link = made;
    }
}

/* ---- the pool ---- */

static uint64_t cell(CUmemoryPool pool, size_t bytes)
{
    return cu_space_counted(pool, bytes);
}

int cu_space_take(CUmemoryPool pool, size_t bytes, cu_extent *extent)
{
    const uint64_t wanted = cell(pool, bytes);
    if (!pool->ragged) {
        if (wanted > pool->reserved - pool->taken)
            return -1;
        *extent = (cu_extent){NULL, 0, wanted};
    } else {
        segment *one = pool->segments;
        while (one && take_gap(one, wanted, extent))
            one = one->next;
        if (!one)
            return -1;
    }
    pool->taken += wanted;
    return 0;
}

void cu_space_give(CUmemoryPool pool, const cu_extent *extent)
{
    pool->taken -= extent->bytes;
    if (extent->segment)
        give_gap(extent->segment, extent->offset, extent->bytes);
}

static CUresult charge(CUmemoryPool pool, uint64_t bytes)
{
    return pool->place == CU_POOL_ON_CARD ? cu_charge(pool->device, bytes) : CUDA_SUCCESS;
}

static CUresult add_segment(CUmemoryPool pool, uint64_t bytes)
{
    segment *made = calloc(1, sizeof *made);
    gap *all = malloc(sizeof *all);
    const CUresult bad = made && all ? charge(pool, bytes) : CUDA_ERROR_OUT_OF_MEMORY;
    if (bad) {
        free(made);
        free(all);
        return bad;
    }
    *all = (gap){NULL, 0, bytes};
    *made = (segment){.next = pool->segments, .bytes = bytes, .gaps = all};
    pool->segments = made;
    pool->reserved += bytes;
    return CUDA_SUCCESS;
}

static CUresult grow_ragged(CUmemoryPool pool, uint64_t wanted)
{
    static const int more_chunks[] = {0, 1, 3, 5, 9, 17, 22, 35};
    const uint64_t least = cu_up(wanted, CU_CHUNK);
    const uint64_t more = (uint64_t)more_chunks[draw(pool) % (sizeof more_chunks / sizeof *more_chunks)] * CU_CHUNK;
    const uint64_t room = pool->props.maxSize ? pool->props.maxSize : UINT64_MAX;
    if (pool->reserved + least > room)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult bad = more && pool->reserved + least + more <= room ? add_segment(pool, least + more) : CUDA_ERROR_OUT_OF_MEMORY;
    if (bad)
        bad = add_segment(pool, least);
    return bad;
}

static CUresult grow_even(CUmemoryPool pool, uint64_t wanted)
{
    const uint64_t missing = pool->taken + wanted - pool->reserved;
    if (pool->props.maxSize && pool->taken + wanted > pool->props.maxSize)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t more = cu_up(missing, EVEN_GROWTH);
    CUresult bad = charge(pool, more);
    if (bad) { /* a trim may have shrunk this very pool: count again, and take no more than needed */
        more = pool->taken + wanted > pool->reserved ? cu_up(pool->taken + wanted - pool->reserved, CU_CHUNK) : 0;
        bad = more ? charge(pool, more) : CUDA_SUCCESS;
    }
    pool->reserved += bad ? 0 : more;
    return bad;
}

CUresult cu_space_grow(CUmemoryPool pool, size_t bytes)
{
    const CUresult bad = pool->ragged ? grow_ragged(pool, cell(pool, bytes)) : grow_even(pool, cell(pool, bytes));
    pool->reserved_high = pool->reserved > pool->reserved_high ? pool->reserved : pool->reserved_high;
    return bad;
}

static uint64_t release_segments(CUmemoryPool pool, uint64_t keep)
{
    uint64_t released = 0;
    for (segment **link = &pool->segments; *link;) {
        segment *one = *link;
        if (one->taken || pool->reserved - released < keep + one->bytes) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        released += one->bytes;
        free(one->gaps); /* an empty segment has one gap */
        free(one);
    }
    return released;
}

uint64_t cu_space_release(CUmemoryPool pool, uint64_t keep)
{
    uint64_t released = 0;
    if (pool->place == CU_POOL_MANAGED)
        return 0; /* each allocation is by itself: nothing is ever idle */
    if (pool->ragged) {
        released = release_segments(pool, keep);
    } else {
        const uint64_t taken = cu_up(pool->taken, CU_CHUNK), wanted = cu_up(keep, CU_CHUNK);
        const uint64_t floor = wanted > taken ? wanted : taken;
        released = floor < pool->reserved ? pool->reserved - floor : 0;
    }
    pool->reserved -= released;
    if (released && pool->place == CU_POOL_ON_CARD)
        cu_discharge(pool->device, released);
    return released;
}
