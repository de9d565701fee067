/* Small arrays, charged like an allocator that never moves them can need chunks at most.
 *
 * Arrays of one shape have one size, unknown to us but no more than our estimate. An allocator takes a new chunk when all places for that
 * size are used, so arrays of one shape make it take no more chunks than the most of them that lived at a time fill. What a
 * shape does not need any more stays charged as a loose chunk, since others may lie in it; so does a chunk that small
 * allocations or other arrays have left, which may have been shared with one. But never more chunks than arrays: each lies in one. */
#include "cuda/memory/small_array.h"

#include <string.h>

#define VC__SMALLEST 512u
#define VC__SHAPES 64 /* at a time; arrays of further ones have a chunk each: shape 0 */

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint64_t live;   /* all */
    uint64_t chunks; /* reserved or committed: of all shapes, and loose */
    struct {
        uint64_t name; /* hash of the shape */
        uint64_t live, chunks;
    } shapes[VC__SHAPES];
} cards[VC_MAX_CARDS];

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    memset(cards, 0, sizeof cards);
}

static void lock(void)
{
    static uint32_t watching;
    vc_region_get(); /* a forked child forgets first */
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    pthread_mutex_lock(&mutex);
}

/* Pre: locked. Two shapes of one name would be taken for one: names are 64 bits. */
static uint32_t find_shape(int card, uint64_t name)
{
    uint32_t unused = 0;
    for (uint32_t shape = 1; shape < VC__SHAPES; shape++) {
        if (cards[card].shapes[shape].live == 0)
            unused = shape;
        else if (cards[card].shapes[shape].name == name)
            return shape;
    }
    cards[card].shapes[unused].name = name;
    return unused;
}

static uint64_t chunks_for(uint64_t live, uint32_t shape, uint64_t bytes)
{
    uint64_t place = VC__SMALLEST; /* the next power of two */
    while (place < bytes)
        place *= 2;
    return shape == 0 ? live : vc_round_up(live * place, VC_CHUNK) / VC_CHUNK;
}

/* Pre: locked. One array less; returns the chunks that are no longer needed, of which the caller gives up the charge. */
static uint64_t leave(int card, uint32_t shape)
{
    uint64_t live = --cards[card].shapes[shape].live, all = --cards[card].live;
    if (cards[card].shapes[shape].chunks > live)
        cards[card].shapes[shape].chunks = live; /* the rest is loose */
    uint64_t excess = cards[card].chunks > all ? cards[card].chunks - all : 0;
    cards[card].chunks -= excess;
    return excess;
}

static void release(int card, uint64_t chunks)
{
    if (chunks > 0)
        vc_quota_release(vc_region_get(), (uint32_t)card, chunks * VC_CHUNK, VC_QUOTA_PLAIN);
}

/* Pre: locked. Count one more of the shape, if that takes no chunk or `with_chunk`; `counted` says so. Returns whether it took one. */
static bool enter(struct vc_small_array *made, int card, uint64_t name, bool with_chunk)
{
    made->shape = find_shape(card, name);
    uint64_t live = cards[card].shapes[made->shape].live + 1;
    bool more = chunks_for(live, made->shape, made->bytes) > cards[card].shapes[made->shape].chunks;
    made->counted = with_chunk || !more;
    if (made->counted) {
        cards[card].live++;
        cards[card].shapes[made->shape].live = live;
        cards[card].shapes[made->shape].chunks += more;
        cards[card].chunks += more;
    }
    return made->counted && more;
}

CUresult vc_small_array_begin(struct vc_small_array *made, struct vc_charge *charge, uint64_t bytes, uint64_t name)
{
    *made = (struct vc_small_array){.bytes = bytes};
    CUresult result = vc_charge_current(charge, 0);
    if (result != CUDA_SUCCESS || charge->card < 0)
        return result;
    lock();
    enter(made, charge->card, name, false);
    pthread_mutex_unlock(&mutex);
    if (made->counted)
        return CUDA_SUCCESS;
    result = vc_charge_current(charge, VC_CHUNK);
    if (result != CUDA_SUCCESS || charge->card < 0)
        return result;
    lock();
    bool took = enter(made, charge->card, name, true);
    pthread_mutex_unlock(&mutex);
    /* From here on the chunk is the shape's, whatever becomes of this array. */
    if (took)
        vc_quota_commit(charge->region, (uint32_t)charge->card, VC_CHUNK, VC_QUOTA_PLAIN);
    else
        vc_charge_drop(charge);
    return CUDA_SUCCESS;
}

bool vc_small_array_keep(const struct vc_small_array *made, const struct vc_charge *charge, const void *handle)
{
    if (!made->counted || vc_charge_record_array(charge, made->shape, handle))
        return true;
    vc_small_array_drop(made, charge);
    return false;
}

void vc_small_array_drop(const struct vc_small_array *made, const struct vc_charge *charge)
{
    if (!made->counted) {
        vc_charge_drop(charge);
        return;
    }
    lock();
    uint64_t excess = leave(charge->card, made->shape);
    pthread_mutex_unlock(&mutex);
    release(charge->card, excess);
}

void vc_small_array_freed(const struct vc_entry *entry)
{
    lock();
    uint64_t excess = leave(entry->card, (uint32_t)entry->bytes);
    pthread_mutex_unlock(&mutex);
    release(entry->card, excess);
}

bool vc_small_array_takes_over(int card)
{
    lock();
    bool takes = cards[card].chunks < cards[card].live;
    cards[card].chunks += takes;
    pthread_mutex_unlock(&mutex);
    return takes;
}
