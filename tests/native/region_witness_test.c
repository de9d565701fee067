/* The witness: as long as what is held, kept over closed descriptors, and stronger than what stands in the file. */
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>

#include "base/clock.h"
#include "check.h"
#include "region/descriptor.h"
#include "region/slot.h"
#include "region/witness.h"

#define MIB ((uint64_t)1 << 20)
#define LIMIT (16384 * MIB)

static char *folder;

static uint64_t seen(const struct vc_region *region, uint32_t slot)
{
    int other = open(region->file.path, O_RDONLY | O_CLOEXEC);
    uint64_t bytes = vc_witness_read(other, slot, 0);
    close(other);
    return bytes;
}

static void follows_what_is_held(struct vc_region *region)
{
    CHECK(vc_quota_reserve(region, 0, 1));
    CHECK(seen(region, 0) == 2 * MIB);
    CHECK(vc_quota_reserve(region, 0, 100 * MIB));
    CHECK(seen(region, 0) == 102 * MIB);
    vc_quota_rollback(region, 0, 14 * MIB);
    CHECK(seen(region, 0) == 102 * MIB); /* the slack */
    vc_quota_rollback(region, 0, 4 * MIB);
    CHECK(seen(region, 0) == 84 * MIB);
    CHECK(seen(region, 1) == 0);
}

/* As applications do that become daemons. */
static void outlives_its_descriptors(struct vc_region *region)
{
    for (int descriptor = 3; descriptor < 1024; descriptor++)
        close(descriptor);
    CHECK(seen(region, 0) == 84 * MIB);
    CHECK(vc_quota_reserve(region, 0, 10 * MIB));
    CHECK(seen(region, 0) == 94 * MIB);
    vc_quota_rollback(region, 0, 90 * MIB);
    CHECK(seen(region, 0) == 4 * MIB);
    CHECK(vc_quota_reserve(region, 0, 90 * MIB));
}

/* In a sibling, while we hold 92 MiB and a byte. */
static void believes_the_witness(void)
{
    struct vc_region *region = region_at(folder);
    struct vc_slot_card *other = &region->usage->slots[0].cards[0];
    CHECK(vc_quota_reserve(region, 0, 2 * MIB));
    uint64_t said = other->reserved_bytes;
    vc_store(&other->reserved_bytes, 0);
    CHECK(!vc_quota_reserve(region, 0, 4 * MIB));
    CHECK(region->usage->account_damaged == 1);
    CHECK(seen(region, 1) == 2 * MIB && region->held_bytes[0] == 2 * MIB);
    vc_store(&other->reserved_bytes, said - VC_WITNESS_SLACK);
    CHECK(vc_quota_reserve(region, 0, 4 * MIB)); /* as much may be on its way */
    vc_store(&other->reserved_bytes, said);
    region->usage->slot_high_water = 0;
    CHECK(!vc_quota_reserve(region, 0, LIMIT - 90 * MIB));
    region->usage->slot_high_water = 2;
}

static void believes_itself(struct vc_region *region)
{
    uint64_t *said = &region->slot->cards[0].reserved_bytes, before = *said;
    vc_store(said, 0);
    CHECK(!vc_quota_reserve(region, 0, 1));
    CHECK(*said == before && region->damaged);
    CHECK(!vc_quota_reserve(region, 0, 1)); /* and so it stays */
}

static void a_locked_range_refuses(void)
{
    struct vc_region *region = region_at(folder);
    CHECK(vc_region_slot(region) == &region->usage->slots[1]);
    int other = open(region->file.path, O_RDWR | O_CLOEXEC);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)1 << 40};
    struct flock own = lock;
    own.l_start += (off_t)1 << 24; /* of slot 1 */
    CHECK(fcntl(other, F_OFD_SETLK, &own) == 0);
    CHECK(!vc_quota_reserve(region, 0, 1));
    CHECK(vc_region_slot(region)->cards[0].reserved_bytes == 0 && region->held_bytes[0] == 0);
    close(other);
    CHECK(vc_quota_reserve(region, 0, 1));
}

static int mappings(void)
{
    FILE *maps = fopen("/proc/self/maps", "re");
    int lines = 0, byte;
    while ((byte = fgetc(maps)) != EOF)
        lines += byte == '\n';
    fclose(maps);
    return lines;
}

/* The process for which there is no slot asks again and again. */
static void a_failing_claim_leaves_nothing(void)
{
    struct vc_region *region = region_at(folder);
    int other = open(region->file.path, O_RDWR | O_CLOEXEC), before = 0;
    struct flock all = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = VC_USAGE_FILE_BYTES + 1, .l_len = VC_MAX_SLOTS};
    CHECK(fcntl(other, F_OFD_SETLK, &all) == 0);
    for (int attempt = 0; attempt < 20; attempt++) {
        CHECK(!vc_quota_reserve(region, 0, 1));
        vc_sleep_ns(11000000);
        if (attempt == 0)
            before = mappings();
    }
    CHECK(region->usage->slot_shortage == 20 && mappings() == before);
    close(other);
    CHECK(vc_quota_reserve(region, 0, 1));
}

static void *takes_and_gives_back(void *region)
{
    uint64_t live[64], end = vc_now_ns() + 1500000000u;
    unsigned count = 0, chance = (unsigned)getpid() * 31u + (unsigned)(uintptr_t)pthread_self();
    while (vc_now_ns() < end || count > 0) {
        chance = chance * 1103515245u + 12345u;
        unsigned drawn = chance >> 8;
        sched_yield(); /* so that threads are interrupted in the middle */
        if (count < 64 && drawn % 10 < 6 && vc_now_ns() < end) {
            live[count] = (drawn % 24 + 1) * MIB;
            CHECK(vc_quota_reserve(region, 0, live[count]));
            count++;
        } else if (count > 0) {
            unsigned place = drawn % count;
            vc_quota_rollback(region, 0, live[place]);
            live[place] = live[--count];
        }
    }
    return NULL;
}

/* What one thread gives back while another witnesses is lowered too: else the siblings call each other liars. */
static void siblings_with_threads_believe_each_other(void)
{
    pid_t siblings[3];
    for (int i = 0; i < 3; i++) {
        siblings[i] = fork();
        if (siblings[i] != 0)
            continue;
        struct vc_region *region = region_at(folder);
        pthread_t second;
        pthread_create(&second, NULL, takes_and_gives_back, region);
        takes_and_gives_back(region);
        pthread_join(second, NULL);
        CHECK(seen(region, (uint32_t)(region->slot - region->usage->slots)) <= VC_WITNESS_SLACK);
        _exit(broken != 0);
    }
    for (int i = 0; i < 3; i++)
        join(siblings[i]);
}

static void in_a_child(void (*body)(void))
{
    pid_t child = fork();
    if (child == 0) {
        body();
        _exit(broken != 0);
    }
    join(child);
}

int main(void)
{
    folder = make_region(LIMIT);
    struct vc_region *region = region_at(folder);
    follows_what_is_held(region);
    outlives_its_descriptors(region);
    in_a_child(believes_the_witness);
    in_a_child(a_locked_range_refuses);
    in_a_child(a_failing_claim_leaves_nothing);
    siblings_with_threads_believe_each_other();
    believes_itself(region);
    remove_region(folder);
    return broken != 0;
}
