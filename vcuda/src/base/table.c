/* Sharded hash table with linear probing and backward-shift deletion: no tombstones, so it never slows down with age. */
#include "base/table.h"

#include <stdlib.h>
#include <string.h>

#include "base/atomic.h"
#include "base/clock.h"

#define VC__FIRST_CAPACITY 64
#define VC__SPINS 128
#define VC__PAUSE_NS 20000

_Static_assert(VC_TABLE_SHARDS == 64, "shard_of takes six bits");

/* Addresses are multiples of 256 or more: mix before using any bits (Fibonacci hashing, folded). */
static uint64_t hash_of(uint64_t key)
{
    uint64_t hash = key * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 32);
}

static struct vc_table_shard *shard_of(struct vc_table *table, uint64_t hash)
{
    /* The top bits: places within a shard come from others, or all records of a shard would crowd in a few. */
    return &table->shards[hash >> 58];
}

/* Held for a probe, seldom for a table's growth: a plain store lets it go, where a mutex takes a second locked instruction and two calls. */
static void lock(struct vc_table_shard *shard)
{
    for (unsigned attempt = 1; __atomic_exchange_n(&shard->locked, 1, __ATOMIC_ACQUIRE); attempt++) {
        if (attempt % VC__SPINS == 0)
            vc_sleep_ns(VC__PAUSE_NS); /* its holder may not be running */
        else
            vc_cpu_relax();
    }
}

static void unlock(struct vc_table_shard *shard)
{
    vc_store_release(&shard->locked, 0);
}

static char *record_at(const struct vc_table *table, const struct vc_table_shard *shard, size_t place)
{
    return shard->records + place * table->record_bytes;
}

static uint64_t key_at(const struct vc_table *table, const struct vc_table_shard *shard, size_t place)
{
    uint64_t key;
    memcpy(&key, record_at(table, shard, place), sizeof key);
    return key;
}

/* The place of `key`, or the empty place where it belongs. Pre: capacity > count. */
static size_t find(const struct vc_table *table, const struct vc_table_shard *shard, uint64_t key, uint64_t hash)
{
    size_t place = hash & (shard->capacity - 1);
    for (;;) {
        uint64_t there = key_at(table, shard, place);
        if (there == 0 || there == key)
            return place;
        place = (place + 1) & (shard->capacity - 1);
    }
}

static bool grow(const struct vc_table *table, struct vc_table_shard *shard)
{
    struct vc_table_shard larger = {.capacity = shard->capacity ? shard->capacity * 2 : VC__FIRST_CAPACITY};
    larger.records = calloc(larger.capacity, table->record_bytes);
    if (!larger.records)
        return false;
    for (size_t place = 0; place < shard->capacity; place++) {
        uint64_t key = key_at(table, shard, place);
        if (key != 0)
            memcpy(record_at(table, &larger, find(table, &larger, key, hash_of(key))), record_at(table, shard, place),
                   table->record_bytes);
    }
    free(shard->records);
    shard->records = larger.records;
    shard->capacity = larger.capacity;
    return true;
}

static bool has_room(const struct vc_table *table, struct vc_table_shard *shard)
{
    return (shard->count + 1) * 4 <= shard->capacity * 3 || grow(table, shard);
}

/* Close the gap at `place`: move back every follower that may stand nearer to its home. */
static void erase(const struct vc_table *table, struct vc_table_shard *shard, size_t place)
{
    const uint64_t none = 0;
    size_t mask = shard->capacity - 1, gap = place;
    for (size_t next = (place + 1) & mask; key_at(table, shard, next) != 0; next = (next + 1) & mask) {
        size_t home = hash_of(key_at(table, shard, next)) & mask;
        if (((next - home) & mask) >= ((next - gap) & mask)) {
            memcpy(record_at(table, shard, gap), record_at(table, shard, next), table->record_bytes);
            gap = next;
        }
    }
    memcpy(record_at(table, shard, gap), &none, sizeof none);
    shard->count--;
}

bool vc_table_put(struct vc_table *table, const void *record)
{
    uint64_t key;
    memcpy(&key, record, sizeof key);
    uint64_t hash = hash_of(key);
    struct vc_table_shard *shard = shard_of(table, hash);
    lock(shard);
    bool fits = has_room(table, shard);
    if (fits) {
        size_t place = find(table, shard, key, hash);
        shard->count += key_at(table, shard, place) == 0;
        memcpy(record_at(table, shard, place), record, table->record_bytes);
    }
    unlock(shard);
    return fits;
}

static bool look_up(struct vc_table *table, uint64_t key, void *record, bool remove)
{
    if (key == 0)
        return false;
    uint64_t hash = hash_of(key);
    struct vc_table_shard *shard = shard_of(table, hash);
    bool found = false;
    lock(shard);
    if (shard->count > 0) {
        size_t place = find(table, shard, key, hash);
        found = key_at(table, shard, place) == key;
        if (found)
            memcpy(record, record_at(table, shard, place), table->record_bytes);
        if (found && remove)
            erase(table, shard, place);
    }
    unlock(shard);
    return found;
}

bool vc_table_take(struct vc_table *table, uint64_t key, void *record)
{
    return look_up(table, key, record, true);
}

bool vc_table_get(struct vc_table *table, uint64_t key, void *record)
{
    return look_up(table, key, record, false);
}

bool vc_table_edit(struct vc_table *table, uint64_t key, bool create, enum vc_table_edit (*edit)(void *record, void *argument),
                   void *argument)
{
    if (key == 0)
        return false;
    uint64_t hash = hash_of(key);
    struct vc_table_shard *shard = shard_of(table, hash);
    bool there = false;
    lock(shard);
    if (shard->count > 0 || create) {
        there = !create || has_room(table, shard);
        size_t place = there ? find(table, shard, key, hash) : 0;
        if (there && key_at(table, shard, place) == 0) {
            there = create;
            if (create) {
                memset(record_at(table, shard, place), 0, table->record_bytes);
                memcpy(record_at(table, shard, place), &key, sizeof key);
                shard->count++;
            }
        }
        if (there && edit(record_at(table, shard, place), argument) == VC_TABLE_ERASE)
            erase(table, shard, place);
    }
    unlock(shard);
    return there;
}

void *vc_table_take_all(struct vc_table *table, bool (*matches)(const void *record, const void *argument), const void *argument,
                        size_t *count)
{
    char *taken = NULL;
    size_t room = 0;
    *count = 0;
    for (size_t index = 0; index < VC_TABLE_SHARDS; index++) {
        struct vc_table_shard *shard = &table->shards[index];
        lock(shard);
        for (size_t place = 0; place < shard->capacity;) {
            if (key_at(table, shard, place) == 0 || !matches(record_at(table, shard, place), argument)) {
                place++;
                continue;
            }
            if (*count == room) {
                size_t larger = room ? room * 2 : 64;
                char *moved = realloc(taken, larger * table->record_bytes);
                if (!moved)
                    break;
                taken = moved;
                room = larger;
            }
            memcpy(taken + (*count)++ * table->record_bytes, record_at(table, shard, place), table->record_bytes);
            erase(table, shard, place); /* a follower may have moved here: look at this place again */
        }
        unlock(shard);
    }
    return taken;
}

size_t vc_table_count(struct vc_table *table)
{
    size_t count = 0;
    for (size_t index = 0; index < VC_TABLE_SHARDS; index++) {
        lock(&table->shards[index]);
        count += table->shards[index].count;
        unlock(&table->shards[index]);
    }
    return count;
}

void vc_table_reset(struct vc_table *table)
{
    for (size_t index = 0; index < VC_TABLE_SHARDS; index++) {
        struct vc_table_shard *shard = &table->shards[index];
        unlock(shard);
        /* The records stay allocated: a thread of the parent may have been in the middle of changing them. */
        shard->records = NULL;
        shard->capacity = shard->count = 0;
    }
}
