/* Names of shared extents: who looks for another name finds nothing, however many are published; a name costs the kernel nothing, and
 * counts as long as its process lives. */
#include "check.h"

#include <sys/stat.h>
#include <sys/sysmacros.h>

#include "region/shared.h"
#include "region/slot.h"

#define PUBLISHED 4096u
#define OTHERS (1u << 16)

static char *folder;

static uint64_t name_of(uint32_t number)
{
    return UINT64_C(0xcbf29ce484222325) * (number + 1);
}

static struct vc_extent publish_one(struct vc_region *region, uint32_t number)
{
    struct vc_extent extent;
    CHECK(vc_shared_new(region, 1, VC_EXTENT_CHUNK, &extent));
    CHECK(vc_shared_publish(name_of(number), &extent));
    return extent;
}

/* A process that publishes, and goes on when told. */
static void publish(int ready, int go)
{
    struct vc_region *region = region_at(folder);
    static struct vc_extent extents[PUBLISHED];
    char byte = 0;
    for (uint32_t number = 0; number < PUBLISHED; number++)
        extents[number] = publish_one(region, number);
    CHECK(write(ready, &byte, 1) == 1 && read(go, &byte, 1) == 1);
    for (uint32_t number = 0; number < PUBLISHED; number += 2)
        vc_shared_withdraw(name_of(number), &extents[number]);
    CHECK(vc_shared_end(&extents[3]));  /* nobody holds it */
    CHECK(!vc_shared_end(&extents[5])); /* the parent does */
    CHECK(write(ready, &byte, 1) == 1 && read(go, &byte, 1) == 1);
    _exit(broken != 0);
}

static uint32_t found(struct vc_region *region, uint32_t from, uint32_t until)
{
    uint32_t count = 0;
    struct vc_extent extent;
    for (uint32_t number = from; number < until; number++)
        count += vc_shared_find(region, name_of(number), &extent);
    return count;
}

/* Of the usage file, in all processes; the kernel looks at each of them at each question about one. */
static unsigned locks(void)
{
    char path[300], line[256], identity[64];
    struct stat status;
    unsigned count = 0;
    snprintf(path, sizeof path, "%s/usage", folder);
    CHECK(stat(path, &status) == 0);
    snprintf(identity, sizeof identity, " %02x:%02x:%lu ", major(status.st_dev), minor(status.st_dev), (unsigned long)status.st_ino);
    FILE *all = fopen("/proc/locks", "re");
    CHECK(all != NULL);
    while (all && fgets(line, sizeof line, all))
        count += strstr(line, identity) != NULL;
    if (all)
        fclose(all);
    return count;
}

/* What a dead process published is written over by the living, and only that. */
static void fill(struct vc_region *region)
{
    struct vc_extent extent;
    uint32_t count = 0;
    CHECK(vc_shared_new(region, 1, VC_EXTENT_CHUNK, &extent));
    while (count < 2 * VC_MAX_NAMES && vc_shared_publish(name_of(count), &extent))
        count++;
    CHECK(count > VC_MAX_NAMES * 3 / 4 && count <= VC_MAX_NAMES);
    CHECK(found(region, 0, count) == 0); /* our own */
    pid_t child = fork();
    if (child == 0) {
        struct vc_region *mine = region_at(folder);
        CHECK(vc_region_slot(mine) && found(mine, 0, count) == count);
        _exit(broken != 0);
    }
    join(child);
}

/* A process that owns one shared chunk, and dies when told; the slot that it had. */
static void own(int told, int go)
{
    char byte;
    struct vc_extent extent = publish_one(region_at(folder), 0);
    CHECK(write(told, &extent, sizeof extent) == sizeof extent && read(go, &byte, 1) == 1);
    _exit(broken != 0);
}

static bool finds_a_slot(void)
{
    pid_t child = fork();
    if (child == 0)
        _exit(vc_region_slot(region_at(folder)) != NULL);
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) && WEXITSTATUS(status) == 1;
}

/* A dead owner's slot is nobody else's while somebody holds what he owned: as many processes fewer, and not one more. */
static void keep_slots(struct vc_region *region)
{
    enum { FREE = VC_MAX_SLOTS - 1 /* without ours */ };
    struct vc_extent extents[FREE];
    int told[2], go[2];
    char byte = 0;
    CHECK(pipe(told) == 0 && pipe(go) == 0 && vc_region_slot(region));
    for (int number = 0; number < FREE; number++) {
        CHECK(number % 16 != 0 || finds_a_slot());
        pid_t child = fork();
        if (child == 0)
            own(told[1], go[0]);
        CHECK(read(told[0], &extents[number], sizeof extents[number]) == sizeof extents[number]);
        extents[number].region = region;
        CHECK(vc_shared_hold(&extents[number], vc_slot_tag(region, extents[number].slot)));
        CHECK(write(go[1], &byte, 1) == 1);
        join(child);
    }
    CHECK(!finds_a_slot());
    vc_shared_let(&extents[7]);
    bool found = false;
    for (uint64_t until = vc_now_ns() + 10000000000u; !found && vc_now_ns() < until;)
        found = finds_a_slot();
    CHECK(found);
    for (int number = 0; number < FREE; number++)
        vc_shared_let(&extents[number]);
}

int main(void)
{
    int ready[2], go[2];
    char byte = 0;
    folder = make_region(1000);
    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    pid_t child = fork();
    if (child == 0)
        publish(ready[1], go[0]);
    struct vc_region *region = region_at(folder);
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(locks() < 16);
    CHECK(found(region, 0, PUBLISHED) == PUBLISHED);
    CHECK(found(region, PUBLISHED, PUBLISHED + OTHERS) == 0);
    struct vc_extent held[9];
    for (uint32_t number = 3; number < 9; number += 2)
        CHECK(vc_shared_find(region, name_of(number), &held[number]));
    uint32_t tag = vc_slot_tag(region, held[3].slot);
    CHECK(vc_region_slot(region) && vc_shared_hold(&held[5], tag));
    struct vc_extent mine = publish_one(region, 7), again;
    CHECK(vc_shared_find(region, name_of(7), &again) && again.slot == held[7].slot); /* another's, never our own */
    CHECK(write(go[1], &byte, 1) == 1 && read(ready[0], &byte, 1) == 1);
    CHECK(found(region, 0, PUBLISHED) == PUBLISHED / 2);
    CHECK(!vc_shared_hold(&held[3], tag)); /* what has ended is nobody's any more */
    CHECK(vc_shared_hold(&held[7], tag));
    CHECK(write(go[1], &byte, 1) == 1);
    join(child);
    CHECK(found(region, 0, PUBLISHED) == 0);
    vc_shared_withdraw(name_of(7), &mine);
    fill(region);
    vc_shared_let(&held[5]);
    vc_shared_let(&held[7]);
    keep_slots(region);
    remove_region(folder);
    return broken != 0;
}
