/* A hash table of records of one type, found by the key that each begins with.
 *
 * Sharded open addressing: a look-up takes one short lock and, at any size, a probe or two. Thread-safe; no lock is
 * held when a function returns. To be right beside a driver that reuses addresses at once, take a record out BEFORE
 * the driver frees (and put it back if the driver refuses), put it in AFTER the driver allocated. */
#ifndef VC_TABLE_H
#define VC_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/fork.h"

#define VC_TABLE_SHARDS 64

struct vc_table_shard {
    uint32_t locked;
    char *records;   /* a key of 0: empty */
    size_t capacity; /* a power of two, or 0 */
    size_t count;
} __attribute__((aligned(64)));

struct vc_table {
    size_t record_bytes;
    struct vc_table_shard shards[VC_TABLE_SHARDS];
};

/* A table `name` of records of `type`, whose first member is `uint64_t key`, never 0. A forked child has it empty. */
#define VC_TABLE(name, type)                                                                         \
    _Static_assert(offsetof(type, key) == 0 && sizeof(((type *)0)->key) == 8, "a record begins with its key"); \
    static struct vc_table name = {.record_bytes = sizeof(type)};                                    \
    static void vc__forget_##name(void)                                                              \
    {                                                                                                \
        vc_table_reset(&name);                                                                       \
    }                                                                                                \
    VC_AT_FORK(vc__forget_##name)

/* Add a record, replacing one of the same key (its memory must be gone: the driver gave the address again). Returns
 * false, with nothing changed, if there is no host memory. A record that was just taken out always has room. */
bool vc_table_put(struct vc_table *table, const void *record);

/* Remove the record of `key` and copy it to `record`; false: unknown. */
bool vc_table_take(struct vc_table *table, uint64_t key, void *record);

/* Copy the record of `key`; false: unknown. */
bool vc_table_get(struct vc_table *table, uint64_t key, void *record);

/* What an edit leaves behind. */
enum vc_table_edit { VC_TABLE_KEEP, VC_TABLE_ERASE };

/* Change the record of `key` in place, under the lock; one that is not there is made of zeros first if `create` says so. False:
 * there is none, or no host memory for it; `edit` was not called. */
bool vc_table_edit(struct vc_table *table, uint64_t key, bool create, enum vc_table_edit (*edit)(void *record, void *argument),
                   void *argument);

/* Remove every record for which `matches(record, argument)`; return them in a malloc'ed array (free it) and their number.
 * NULL if there is none. If host memory is short, fewer are removed than match. */
void *vc_table_take_all(struct vc_table *table, bool (*matches)(const void *record, const void *argument), const void *argument,
                        size_t *count);

/* Number of records. */
size_t vc_table_count(struct vc_table *table);

/* Forget everything, also that a thread may hold a mutex: for a forked child, while it has one thread. */
void vc_table_reset(struct vc_table *table);

#endif
