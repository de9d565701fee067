/* A process's own record of what it was given: pointer or handle → bytes, card, kind, owner.
 *
 * Sharded open addressing: a lookup takes one short mutex and, at any size, a probe or two. Thread-safe; no lock is
 * held when a function returns. To be right beside a driver that reuses addresses at once, take an entry out BEFORE
 * the driver frees (and put it back if the driver refuses), put it in AFTER the driver allocated. */
#ifndef VC_LEDGER_H
#define VC_LEDGER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define VC_LEDGER_SHARDS 64

struct vc_entry {
    uint64_t key; /* never 0 */
    uint64_t bytes;
    uint64_t owner; /* context or pool that the memory dies with; 0: none */
    int32_t card;
    uint32_t kind;
};

struct vc_ledger_shard {
    pthread_mutex_t mutex;
    struct vc_entry *entries; /* key 0: empty */
    size_t capacity;          /* a power of two, or 0 */
    size_t count;
} __attribute__((aligned(64)));

struct vc_ledger {
    struct vc_ledger_shard shards[VC_LEDGER_SHARDS];
};

#define VC_LEDGER_INITIALIZER \
    {.shards = {[0 ... VC_LEDGER_SHARDS - 1] = {.mutex = PTHREAD_MUTEX_INITIALIZER}}}

/* Add an entry, replacing one of the same key (its memory must be gone: the driver gave the address again). Returns
 * false, with nothing changed, if there is no host memory. */
bool vc_ledger_put(struct vc_ledger *ledger, const struct vc_entry *entry);

/* Remove the entry of `key` and return it; false: unknown. */
bool vc_ledger_take(struct vc_ledger *ledger, uint64_t key, struct vc_entry *entry);

/* Copy the entry of `key`; false: unknown. */
bool vc_ledger_get(struct vc_ledger *ledger, uint64_t key, struct vc_entry *entry);

/* Remove every entry for which `matches(entry, argument)`; return them in a malloc'ed array (free it) and their number.
 * NULL if there is none. If host memory is short, fewer are removed than match: call again until it returns NULL. */
struct vc_entry *vc_ledger_take_all(struct vc_ledger *ledger, bool (*matches)(const struct vc_entry *, const void *),
                                    const void *argument, size_t *count);

/* Use the ledger as counters: add `change` to the bytes of `key`, which starts at 0 and disappears at 0, and return the sum.
 * UINT64_MAX, with nothing changed, if there is no host memory. */
uint64_t vc_ledger_add(struct vc_ledger *ledger, uint64_t key, int64_t change);

/* Number of entries. */
size_t vc_ledger_count(struct vc_ledger *ledger);

/* Forget everything, also that a thread may hold a mutex: for a forked child, while it has one thread. */
void vc_ledger_reset(struct vc_ledger *ledger);

#endif
