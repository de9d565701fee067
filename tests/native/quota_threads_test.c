/* Threads of one process share its slot: never over the limit, nothing left, no refusal while there is room. */
#include <pthread.h>

#include "check.h"

#define LIMIT 1000u
#define THREADS 4
#define ROUNDS 3000

static struct vc_region *region;
static uint64_t held;

static void *take_and_give(void *argument)
{
    unsigned int seed = (unsigned int)(uintptr_t)argument;
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % 600;
        if (!vc_quota_reserve(region, 0, bytes))
            continue;
        CHECK(vc_add(&held, bytes) <= LIMIT);
        if (rand_r(&seed) % 8 == 0) {
            vc_sub(&held, bytes);
            vc_quota_rollback(region, 0, bytes);
            continue;
        }
        vc_quota_commit(region, 0, bytes, VC_QUOTA_PLAIN);
        vc_sub(&held, bytes);
        vc_quota_release(region, 0, bytes, VC_QUOTA_PLAIN);
    }
    return NULL;
}

/* Four that fit together must all be served, however they collide. */
static void *quarter(void *argument)
{
    (void)argument;
    for (int round = 0; round < ROUNDS; round++) {
        bool served = vc_quota_reserve(region, 0, LIMIT / THREADS);
        CHECK(served);
        if (served)
            vc_quota_rollback(region, 0, LIMIT / THREADS);
    }
    return NULL;
}

static void run(void *(*body)(void *))
{
    pthread_t threads[THREADS];
    for (uintptr_t thread = 0; thread < THREADS; thread++)
        pthread_create(&threads[thread], NULL, body, (void *)(thread + 1));
    for (int thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);
}

int main(void)
{
    char *folder = make_region(LIMIT);
    region = region_at(folder);
    CHECK(region->state == VC_REGION_ENFORCED);
    run(take_and_give);
    run(quarter);
    CHECK(vc_quota_used(region, 0) == 0);
    CHECK(region->slot->cards[0].reserved_bytes == 0);
    CHECK(region->usage->cards[0].memory_peak_bytes <= LIMIT);
    CHECK(!vc_quota_reserve(region, 0, LIMIT + 1));
    CHECK(!vc_quota_reserve(region, 0, UINT64_MAX));
    CHECK(vc_quota_reserve(region, 0, LIMIT));
    CHECK(!vc_quota_reserve(region, 0, 1));
    /* Who asks for too much reserves it until he is refused: no peak, when another one charges what the driver has taken already. */
    vc_quota_commit(region, 0, LIMIT, VC_QUOTA_PLAIN);
    region->usage->slot_high_water = 6;
    region->usage->slots[5].cards[0].reserved_bytes = 600;
    vc_quota_charge(region, 0, 10, VC_QUOTA_PLAIN);
    CHECK(region->usage->cards[0].memory_peak_bytes == LIMIT + 10);
    region->usage->slots[5].cards[0].reserved_bytes = 0;
    vc_quota_release(region, 0, LIMIT + 10, VC_QUOTA_PLAIN);
    /* All that is left, for what nobody knows the size of. */
    CHECK(vc_quota_reserve(region, 0, LIMIT / 4));
    CHECK(vc_quota_reserve_rest(region, 0) == LIMIT - LIMIT / 4);
    CHECK(vc_quota_reserve_rest(region, 0) == 0);
    vc_quota_rollback(region, 0, LIMIT);
    remove_region(folder);
    return broken != 0;
}
