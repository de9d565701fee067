/* Sharded hash map with linear probing and backward-shift deletion: no tombstones, so it never slows down with age. */
#include "base/ledger.h"

#include <stdlib.h>
#include <string.h>

#define VC__FIRST_CAPACITY 64

_Static_assert(VC_LEDGER_SHARDS == 64, "shard_of takes six bits");

/* Addresses are multiples of 256 or more: mix before using any bits (Fibonacci hashing, folded). */
static uint64_t hash_of(uint64_t key)
{
    uint64_t hash = key * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 32);
}

static struct vc_ledger_shard *shard_of(struct vc_ledger *ledger, uint64_t hash)
{
    /* The top bits: places within a shard come from others, or all entries of a shard would crowd in a few. */
    return &ledger->shards[hash >> 58];
}

/* The place of `key`, or the empty place where it belongs. Pre: capacity > count. */
static size_t find(const struct vc_ledger_shard *shard, uint64_t key, uint64_t hash)
{
    size_t place = hash & (shard->capacity - 1);
    while (shard->entries[place].key != 0 && shard->entries[place].key != key)
        place = (place + 1) & (shard->capacity - 1);
    return place;
}

static bool grow(struct vc_ledger_shard *shard)
{
    struct vc_ledger_shard larger = *shard;
    larger.capacity = shard->capacity ? shard->capacity * 2 : VC__FIRST_CAPACITY;
    larger.entries = calloc(larger.capacity, sizeof *larger.entries);
    if (!larger.entries)
        return false;
    for (size_t place = 0; place < shard->capacity; place++) {
        const struct vc_entry *entry = &shard->entries[place];
        if (entry->key != 0)
            larger.entries[find(&larger, entry->key, hash_of(entry->key))] = *entry;
    }
    free(shard->entries);
    shard->entries = larger.entries;
    shard->capacity = larger.capacity;
    return true;
}

/* Close the gap at `place`: move back every follower that may stand nearer to its home. */
static void erase(struct vc_ledger_shard *shard, size_t place)
{
    size_t mask = shard->capacity - 1, gap = place;
    for (size_t next = (place + 1) & mask; shard->entries[next].key != 0; next = (next + 1) & mask) {
        size_t home = hash_of(shard->entries[next].key) & mask;
        if (((next - home) & mask) >= ((next - gap) & mask)) {
            shard->entries[gap] = shard->entries[next];
            gap = next;
        }
    }
    shard->entries[gap].key = 0;
    shard->count--;
}

bool vc_ledger_put(struct vc_ledger *ledger, const struct vc_entry *entry)
{
    uint64_t hash = hash_of(entry->key);
    struct vc_ledger_shard *shard = shard_of(ledger, hash);
    pthread_mutex_lock(&shard->mutex);
    bool fits = (shard->count + 1) * 4 <= shard->capacity * 3 || grow(shard);
    if (fits) {
        size_t place = find(shard, entry->key, hash);
        shard->count += shard->entries[place].key == 0;
        shard->entries[place] = *entry;
    }
    pthread_mutex_unlock(&shard->mutex);
    return fits;
}

static bool look_up(struct vc_ledger *ledger, uint64_t key, struct vc_entry *entry, bool remove)
{
    if (key == 0)
        return false;
    uint64_t hash = hash_of(key);
    struct vc_ledger_shard *shard = shard_of(ledger, hash);
    bool found = false;
    pthread_mutex_lock(&shard->mutex);
    if (shard->count > 0) {
        size_t place = find(shard, key, hash);
        found = shard->entries[place].key == key;
        if (found) {
            *entry = shard->entries[place];
            if (remove)
                erase(shard, place);
        }
    }
    pthread_mutex_unlock(&shard->mutex);
    return found;
}

bool vc_ledger_take(struct vc_ledger *ledger, uint64_t key, struct vc_entry *entry)
{
    return look_up(ledger, key, entry, true);
}

bool vc_ledger_get(struct vc_ledger *ledger, uint64_t key, struct vc_entry *entry)
{
    return look_up(ledger, key, entry, false);
}

uint64_t vc_ledger_add(struct vc_ledger *ledger, uint64_t key, int64_t change)
{
    uint64_t hash = hash_of(key), sum = UINT64_MAX;
    struct vc_ledger_shard *shard = shard_of(ledger, hash);
    pthread_mutex_lock(&shard->mutex);
    if ((shard->count + 1) * 4 <= shard->capacity * 3 || grow(shard)) {
        size_t place = find(shard, key, hash);
        struct vc_entry *entry = &shard->entries[place];
        if (entry->key == 0) {
            *entry = (struct vc_entry){.key = key};
            shard->count++;
        }
        sum = entry->bytes += (uint64_t)change;
        if (sum == 0)
            erase(shard, place);
    }
    pthread_mutex_unlock(&shard->mutex);
    return sum;
}

struct vc_entry *vc_ledger_take_all(struct vc_ledger *ledger, bool (*matches)(const struct vc_entry *, const void *),
                                    const void *argument, size_t *count)
{
    struct vc_entry *taken = NULL;
    size_t room = 0;
    *count = 0;
    for (size_t index = 0; index < VC_LEDGER_SHARDS; index++) {
        struct vc_ledger_shard *shard = &ledger->shards[index];
        pthread_mutex_lock(&shard->mutex);
        for (size_t place = 0; place < shard->capacity;) {
            if (shard->entries[place].key == 0 || !matches(&shard->entries[place], argument)) {
                place++;
                continue;
            }
            if (*count == room) {
                size_t larger = room ? room * 2 : 64;
                struct vc_entry *moved = realloc(taken, larger * sizeof *moved);
                if (!moved)
                    break;
                taken = moved;
                room = larger;
            }
            taken[(*count)++] = shard->entries[place];
            erase(shard, place); /* a follower may have moved here: look at this place again */
        }
        pthread_mutex_unlock(&shard->mutex);
    }
    return taken;
}

size_t vc_ledger_count(struct vc_ledger *ledger)
{
    size_t count = 0;
    for (size_t index = 0; index < VC_LEDGER_SHARDS; index++) {
        pthread_mutex_lock(&ledger->shards[index].mutex);
        count += ledger->shards[index].count;
        pthread_mutex_unlock(&ledger->shards[index].mutex);
    }
    return count;
}

void vc_ledger_reset(struct vc_ledger *ledger)
{
    for (size_t index = 0; index < VC_LEDGER_SHARDS; index++) {
        struct vc_ledger_shard *shard = &ledger->shards[index];
        pthread_mutex_init(&shard->mutex, NULL);
        /* The table itself stays allocated: a thread of the parent may have been in the middle of changing it. */
        shard->entries = NULL;
        shard->capacity = shard->count = 0;
    }
}
