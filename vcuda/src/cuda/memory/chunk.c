/* How many small allocations lie in each chunk. */
#include "cuda/memory/chunk.h"

#include "base/table.h"

struct chunk {
    uint64_t key; /* address and kind */
    uint64_t count;
};
VC_TABLE(chunks, struct chunk);

static uint64_t first_of(const struct vc_range *range)
{
    return range->address / VC_CHUNK;
}

static uint64_t last_of(const struct vc_range *range)
{
    return (range->address + (range->bytes ? range->bytes - 1 : 0)) / VC_CHUNK;
}

static uint64_t key_of(const struct vc_range *range, uint64_t chunk)
{
    return (chunk + 1) * 4 + range->kind;
}

uint64_t vc_chunks_of(const struct vc_range *range)
{
    return (last_of(range) - first_of(range) + 1) * VC_CHUNK;
}

uint64_t vc_chunks_only(const struct vc_range *range)
{
    return first_of(range) == last_of(range) ? key_of(range, first_of(range)) : 0;
}

static enum vc_table_edit enter(void *record, void *is_new)
{
    struct chunk *chunk = record;
    *(bool *)is_new = ++chunk->count == 1;
    return VC_TABLE_KEEP;
}

static enum vc_table_edit leave(void *record, void *is_empty)
{
    struct chunk *chunk = record;
    *(bool *)is_empty = --chunk->count == 0;
    return chunk->count == 0 ? VC_TABLE_ERASE : VC_TABLE_KEEP;
}

bool vc_chunks_enter(const struct vc_range *range, uint64_t *taken)
{
    *taken = 0;
    for (uint64_t chunk = first_of(range); chunk <= last_of(range); chunk++) {
        bool is_new;
        if (!vc_table_edit(&chunks, key_of(range, chunk), true, enter, &is_new)) {
            while (chunk-- > first_of(range))
                vc_table_edit(&chunks, key_of(range, chunk), false, leave, &is_new);
            return false;
        }
        *taken += is_new ? VC_CHUNK : 0;
    }
    return true;
}

uint64_t vc_chunks_leave(const struct vc_range *range)
{
    uint64_t emptied = 0;
    for (uint64_t chunk = first_of(range); chunk <= last_of(range); chunk++) {
        bool is_empty = false;
        vc_table_edit(&chunks, key_of(range, chunk), false, leave, &is_empty);
        emptied += is_empty ? VC_CHUNK : 0;
    }
    return emptied;
}
