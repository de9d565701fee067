/* Small arrays, charged like an allocator that never moves them can need chunks at most.
 *
 * Arrays of one size class make an allocator take no more chunks than the most of them that lived at a time fill: it takes a new one
 * when all places are used. A class has the same power of two for the least that its arrays can take and for the most, and texels of one
 * size: an H100 keeps those of different sizes in different chunks. What a class does not need any more stays charged as a loose chunk, since others may
 * lie in it; so does a chunk that small allocations or larger arrays have left, which may have been shared with one. But never more
 * chunks than arrays: each lies in one. */
#include "cuda/memory/small_array.h"

#include <string.h>

#define VC__SMALLEST 512u
#define VC__SIZES 12 /* 512 bytes to 1 MiB */
#define VC__TEXELS 5 /* of 1 to 16 bytes */
#define VC__CLASSES (VC__TEXELS * VC__SIZES * VC__SIZES)

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint64_t live;   /* all */
    uint64_t chunks; /* reserved or committed: of all classes, and loose */
    struct {
        uint64_t live, chunks;
    } classes[VC__CLASSES];
} cards[VC_MAX_PROCESS_CARDS];

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    memset(cards, 0, sizeof cards);
}
VC_AT_FORK(forget);

static uint32_t card_of(vc_cards set)
{
    return (uint32_t)__builtin_ctz(set);
}

static uint32_t power_of(uint64_t bytes)
{
    uint32_t power = 0;
    while (((uint64_t)VC__SMALLEST << power) < bytes)
        power++;
    return power;
}

static uint32_t class_of(uint64_t texel, uint64_t least, uint64_t most)
{
    uint32_t kind = 0;
    while (kind + 1 < VC__TEXELS && UINT64_C(1) << kind < texel)
        kind++;
    return (kind * VC__SIZES + power_of(least < most ? least : most)) * VC__SIZES + power_of(most);
}

/* The most that an array of the class takes. */
static uint64_t place_of(uint32_t size_class)
{
    return (uint64_t)VC__SMALLEST << size_class % VC__SIZES;
}

/* Pre: locked. One array less; returns the chunks that are no longer needed, of which the caller gives up the charge. */
static uint64_t leave(uint32_t card, uint32_t size_class)
{
    uint64_t live = --cards[card].classes[size_class].live, all = --cards[card].live;
    if (cards[card].classes[size_class].chunks > live)
        cards[card].classes[size_class].chunks = live; /* the rest is loose */
    uint64_t excess = cards[card].chunks > all ? cards[card].chunks - all : 0;
    cards[card].chunks -= excess;
    return excess;
}

static void leave_and_release(uint32_t card, uint32_t size_class)
{
    pthread_mutex_lock(&mutex);
    uint64_t excess = leave(card, size_class);
    pthread_mutex_unlock(&mutex);
    if (excess > 0)
        vc_cards_release(1u << card, excess * VC_CHUNK, VC_QUOTA_PLAIN);
}

/* Count one more of the class, if that takes no chunk or `with_chunk`; `counted` says so. Returns whether it took one. */
static bool enter(struct vc_small_array *made, uint32_t card, bool with_chunk)
{
    pthread_mutex_lock(&mutex);
    uint64_t live = cards[card].classes[made->size_class].live + 1;
    uint64_t needed = vc_round_up(live * place_of(made->size_class), VC_CHUNK) / VC_CHUNK;
    bool more = needed > cards[card].classes[made->size_class].chunks;
    made->counted = with_chunk || !more;
    if (made->counted) {
        cards[card].live++;
        cards[card].classes[made->size_class].live = live;
        cards[card].classes[made->size_class].chunks += more;
        cards[card].chunks += more;
    }
    pthread_mutex_unlock(&mutex);
    return made->counted && more;
}

CUresult vc_small_array_begin(struct vc_small_array *made, struct vc_charge *charge, uint64_t texel, uint64_t least,
                              uint64_t most)
{
    *made = (struct vc_small_array){.size_class = class_of(texel, least, most)};
    CUresult result = vc_charge_current(charge, 0);
    if (result != CUDA_SUCCESS || !charge->cards)
        return result;
    enter(made, card_of(charge->cards), false);
    if (made->counted)
        return CUDA_SUCCESS;
    result = vc_charge_current(charge, VC_CHUNK);
    if (result != CUDA_SUCCESS || !charge->cards)
        return result;
    /* From here on the chunk is the class's, whatever becomes of this array. */
    if (enter(made, card_of(charge->cards), true))
        vc_cards_commit(charge->cards, VC_CHUNK, VC_QUOTA_PLAIN);
    else
        vc_charge_drop(charge);
    return CUDA_SUCCESS;
}

static void freed(const struct vc_allocation *array)
{
    leave_and_release(card_of(array->cards), (uint32_t)array->bytes);
}

static bool takes_chunk(uint32_t card)
{
    pthread_mutex_lock(&mutex);
    bool takes = cards[card].chunks < cards[card].live;
    cards[card].chunks += takes;
    pthread_mutex_unlock(&mutex);
    return takes;
}

static const struct vc_source small_arrays = {.freed = freed, .takes_chunk = takes_chunk};
VC_SOURCE(small_arrays);

bool vc_small_array_keep(const struct vc_small_array *made, const struct vc_charge *charge, const void *handle)
{
    struct vc_allocation array = {.key = (uint64_t)(uintptr_t)handle, .bytes = made->size_class,
                                  .context = charge->context, .source = &small_arrays, .cards = charge->cards,
                                  .kind = VC_MEMORY_OPAQUE};
    if (!made->counted || vc_account_record(&array))
        return true;
    vc_small_array_drop(made, charge);
    return false;
}

void vc_small_array_drop(const struct vc_small_array *made, const struct vc_charge *charge)
{
    if (made->counted)
        leave_and_release(card_of(charge->cards), made->size_class);
    else
        vc_charge_drop(charge);
}
