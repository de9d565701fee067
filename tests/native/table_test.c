/* The table: what was put in is found, taken once, edited, counted, and survives growth and threads; a fork's reset empties it. */
#include <pthread.h>

#include "base/table.h"
#include "check.h"

#define LIVE 20000
#define THREADS 4

struct item {
    uint64_t key;
    uint64_t bytes;
    uint64_t owner;
};
VC_TABLE(items, struct item);

struct counter {
    uint64_t key;
    uint64_t count;
};
VC_TABLE(counters, struct counter);

static uint64_t key_of(uint64_t thread, uint64_t index)
{
    return 0x7f0000000000u + thread * 0x100000000u + index * 512;
}

static enum vc_table_edit add(void *record, void *change)
{
    struct counter *counter = record;
    counter->count += (uint64_t) * (int64_t *)change;
    return counter->count == 0 ? VC_TABLE_ERASE : VC_TABLE_KEEP;
}

static void *churn(void *argument)
{
    uint64_t thread = (uint64_t)(uintptr_t)argument;
    struct item item;
    int64_t one = 1;
    for (uint64_t index = 0; index < LIVE; index++) {
        item = (struct item){.key = key_of(thread, index), .bytes = index, .owner = thread};
        CHECK(vc_table_put(&items, &item));
        CHECK(vc_table_edit(&counters, index % 100 + 1, true, add, &one));
        if (index % 3 == 0) {
            CHECK(vc_table_take(&items, key_of(thread, index / 3), &item));
            CHECK(item.bytes == index / 3);
        }
    }
    return NULL;
}

static bool owned_by(const void *item, const void *owner)
{
    return ((const struct item *)item)->owner == (uint64_t)(uintptr_t)owner;
}

/* What a reset leaves to a forked child stays allocated on purpose. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:vc_table_";
}

int main(void)
{
    pthread_t threads[THREADS];
    for (uintptr_t thread = 0; thread < THREADS; thread++)
        pthread_create(&threads[thread], NULL, churn, (void *)thread);
    for (int thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);

    size_t taken_each = (LIVE + 2) / 3;
    CHECK(vc_table_count(&items) == THREADS * (LIVE - taken_each));
    struct item item;
    CHECK(!vc_table_get(&items, key_of(0, 0), &item));
    CHECK(vc_table_get(&items, key_of(3, LIVE - 1), &item) && item.bytes == LIVE - 1);
    CHECK(!vc_table_take(&items, 0, &item));

    size_t count;
    struct item *of_two = vc_table_take_all(&items, owned_by, (void *)2, &count);
    CHECK(count == LIVE - taken_each);
    for (size_t index = 0; index < count; index++)
        CHECK(of_two[index].owner == 2);
    free(of_two);
    for (uint64_t index = taken_each; index < LIVE; index++) {
        CHECK(!vc_table_get(&items, key_of(2, index), &item));
        CHECK(vc_table_get(&items, key_of(1, index), &item) && item.bytes == index);
    }

    struct counter counter;
    int64_t back = -(LIVE / 100 * THREADS), one = 1;
    CHECK(vc_table_count(&counters) == 100);
    CHECK(vc_table_get(&counters, 7, &counter) && counter.count == LIVE / 100 * THREADS);
    CHECK(vc_table_edit(&counters, 7, false, add, &back)); /* to 0: erased */
    CHECK(!vc_table_edit(&counters, 7, false, add, &one));
    CHECK(vc_table_count(&counters) == 99);

    vc_fork_forget();
    CHECK(vc_table_count(&items) == 0 && vc_table_count(&counters) == 0);
    CHECK(vc_table_edit(&counters, 7, true, add, &one) && vc_table_get(&counters, 7, &counter) && counter.count == 1);
    return broken != 0;
}
