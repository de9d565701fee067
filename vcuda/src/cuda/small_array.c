/* Small arrays, charged like an allocator that never moves them needs chunks at most.
 *
 * Arrays of one size class (the next power of two) need no more chunks than the most of them that lived at a time fill: a new
 * chunk is taken when all places of the others are used. How far frees have emptied chunks again can't be known without
 * addresses, so a class gives its chunks back when its last array is gone. */
#include "small_array.h"

#define VC__SMALLEST_SHIFT 9
#define VC__CLASSES 12

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct {
    uint64_t live;
    uint64_t chunks; /* reserved or committed */
} classes[VC_MAX_CARDS][VC__CLASSES];

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    for (int card = 0; card < VC_MAX_CARDS; card++) {
        for (int class = 0; class < VC__CLASSES; class++)
            classes[card][class].live = classes[card][class].chunks = 0;
    }
}

static void lock(void)
{
    static uint32_t watching;
    vc_region_get(); /* a forked child forgets first */
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    pthread_mutex_lock(&mutex);
}

static uint32_t class_of(uint64_t bytes)
{
    uint32_t class = 0;
    while (((uint64_t)1 << (VC__SMALLEST_SHIFT + class)) < bytes)
        class++;
    return class;
}

static uint64_t chunks_for(uint64_t live, uint32_t class)
{
    return vc_round_up(live << (VC__SMALLEST_SHIFT + class), VC_CHUNK) / VC_CHUNK;
}

static void release(int card, uint64_t chunks)
{
    if (chunks > 0)
        vc_quota_release(vc_region_get(), (uint32_t)card, chunks * VC_CHUNK, VC_QUOTA_PLAIN);
}

/* One is gone, or was begun and is not made. The chunk that it was to take is given up, unless others of its class count on it by now:
 * then it is the class's. `charge`: holds its reservation; NULL: that was refused. */
static void undo(int card, uint32_t class, bool took_chunk, const struct vc_charge *charge)
{
    uint64_t emptied = 0;
    lock();
    uint64_t live = --classes[card][class].live;
    bool give_up = took_chunk && (!charge || chunks_for(live, class) < classes[card][class].chunks);
    classes[card][class].chunks -= give_up;
    if (live == 0) {
        emptied = classes[card][class].chunks;
        classes[card][class].chunks = 0;
    }
    pthread_mutex_unlock(&mutex);
    if (charge && give_up)
        vc_charge_drop(charge);
    else if (charge && took_chunk)
        vc_quota_commit(charge->region, (uint32_t)card, charge->reserved, VC_QUOTA_PLAIN);
    release(card, emptied);
}

CUresult vc_small_array_begin(struct vc_charge *charge, uint64_t bytes)
{
    uint32_t class = class_of(bytes);
    int card = vc_card_of_current(vc_region_get(), NULL);
    uint64_t more = 0;
    if (card >= 0) {
        lock();
        classes[card][class].live++;
        uint64_t wanted = chunks_for(classes[card][class].live, class);
        if (wanted > classes[card][class].chunks) {
            classes[card][class].chunks = wanted;
            more = VC_CHUNK;
        }
        pthread_mutex_unlock(&mutex);
    }
    CUresult result = vc_charge_current(charge, more);
    if (result != CUDA_SUCCESS && card >= 0)
        undo(card, class, more > 0, NULL);
    return result;
}

void vc_small_array_freed(const struct vc_entry *entry)
{
    undo(entry->card, class_of(entry->bytes), false, NULL);
}

bool vc_small_array_keep(struct vc_charge *charge, uint64_t bytes, const void *handle)
{
    if (charge->card < 0)
        return true;
    uint32_t class = class_of(bytes);
    lock(); /* one that this one counted on may have been refused meanwhile */
    bool short_of = charge->reserved == 0 && chunks_for(classes[charge->card][class].live, class) > classes[charge->card][class].chunks;
    classes[charge->card][class].chunks += short_of;
    pthread_mutex_unlock(&mutex);
    if (short_of && !vc_charge_resize(charge, VC_CHUNK)) {
        undo(charge->card, class, true, NULL);
        return false;
    }
    if (!vc_charge_record_array(charge, bytes, handle)) {
        vc_small_array_drop(charge, bytes);
        return false;
    }
    if (charge->reserved > 0)
        vc_quota_commit(charge->region, (uint32_t)charge->card, charge->reserved, VC_QUOTA_PLAIN);
    return true;
}

void vc_small_array_drop(struct vc_charge *charge, uint64_t bytes)
{
    if (charge->card >= 0)
        undo(charge->card, class_of(bytes), charge->reserved > 0, charge);
}
