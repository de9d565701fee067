/* The ledger: what was put in is found, taken once, counted, and survives growth and threads. */
#include <pthread.h>

#include "check.h"
#include "base/ledger.h"

#define LIVE 20000
#define THREADS 4

static struct vc_ledger ledger = VC_LEDGER_INITIALIZER;

static uint64_t key_of(uint64_t thread, uint64_t index)
{
    return 0x7f0000000000u + thread * 0x100000000u + index * 512;
}

static void *churn(void *argument)
{
    uint64_t thread = (uint64_t)(uintptr_t)argument;
    struct vc_entry entry;
    for (uint64_t index = 0; index < LIVE; index++) {
        entry = (struct vc_entry){.key = key_of(thread, index), .bytes = index, .owner = thread};
        CHECK(vc_ledger_put(&ledger, &entry));
        if (index % 3 == 0) {
            CHECK(vc_ledger_take(&ledger, key_of(thread, index / 3), &entry));
            CHECK(entry.bytes == index / 3);
        }
    }
    return NULL;
}

static bool owned_by(const struct vc_entry *entry, const void *owner)
{
    return entry->owner == (uint64_t)(uintptr_t)owner;
}

int main(void)
{
    pthread_t threads[THREADS];
    for (uintptr_t thread = 0; thread < THREADS; thread++)
        pthread_create(&threads[thread], NULL, churn, (void *)thread);
    for (int thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);

    size_t taken_each = (LIVE + 2) / 3;
    CHECK(vc_ledger_count(&ledger) == THREADS * (LIVE - taken_each));
    struct vc_entry entry;
    CHECK(!vc_ledger_get(&ledger, key_of(0, 0), &entry));
    CHECK(vc_ledger_get(&ledger, key_of(3, LIVE - 1), &entry) && entry.bytes == LIVE - 1);
    CHECK(!vc_ledger_take(&ledger, 0, &entry));

    size_t count;
    struct vc_entry *of_two = vc_ledger_take_all(&ledger, owned_by, (void *)2, &count);
    CHECK(count == LIVE - taken_each);
    for (size_t index = 0; index < count; index++)
        CHECK(of_two[index].owner == 2);
    free(of_two);
    for (uint64_t index = taken_each; index < LIVE; index++) {
        CHECK(!vc_ledger_get(&ledger, key_of(2, index), &entry));
        CHECK(vc_ledger_get(&ledger, key_of(1, index), &entry) && entry.bytes == index);
    }

    static struct vc_ledger counters = VC_LEDGER_INITIALIZER;
    CHECK(vc_ledger_add(&counters, 7, 1) == 1);
    CHECK(vc_ledger_add(&counters, 7, 1) == 2);
    CHECK(vc_ledger_add(&counters, 7, -2) == 0);
    CHECK(vc_ledger_count(&counters) == 0);
    return broken != 0;
}
