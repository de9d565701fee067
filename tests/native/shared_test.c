/* Names of shared extents: who looks for another name finds nothing, however many are published. */
#include "check.h"
#include "region/shared.h"
#include "region/slot.h"

#define PUBLISHED 64u
#define OTHERS (1u << 16) /* with the 20 bits of a name's place alone about four of them are found */

static char *folder;

static uint64_t name_of(uint32_t number)
{
    return UINT64_C(0xcbf29ce484222325) * (number + 1);
}

/* A process that publishes, and goes on when told. */
static void publish(int ready, int go)
{
    struct vc_region *region = vc_region_get_at(folder);
    struct vc_extent extents[PUBLISHED];
    char byte = 0;
    for (uint32_t number = 0; number < PUBLISHED; number++) {
        CHECK(vc_shared_new(region, 1, VC_EXTENT_CHUNK, &extents[number]));
        CHECK(vc_shared_publish(region, name_of(number), &extents[number]));
    }
    CHECK(write(ready, &byte, 1) == 1 && read(go, &byte, 1) == 1);
    for (uint32_t number = 0; number < PUBLISHED; number += 2)
        vc_shared_withdraw(region, name_of(number), &extents[number]);
    CHECK(vc_shared_end(region, &extents[3]));  /* nobody holds it */
    CHECK(!vc_shared_end(region, &extents[5])); /* the parent does */
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

int main(void)
{
    int ready[2], go[2];
    char byte = 0;
    folder = make_region(1000);
    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    pid_t child = fork();
    if (child == 0)
        publish(ready[1], go[0]);
    struct vc_region *region = vc_region_get_at(folder);
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(found(region, 0, PUBLISHED) == PUBLISHED);
    CHECK(found(region, PUBLISHED, PUBLISHED + OTHERS) == 0);
    struct vc_extent held[PUBLISHED];
    for (uint32_t number = 3; number < 9; number += 2)
        CHECK(vc_shared_find(region, name_of(number), &held[number]));
    uint32_t tag = vc_slot_tag(region, held[3].slot);
    CHECK(vc_region_slot(region) && vc_shared_hold(region, &held[5], tag));
    CHECK(write(go[1], &byte, 1) == 1 && read(ready[0], &byte, 1) == 1);
    CHECK(found(region, 0, PUBLISHED) == PUBLISHED / 2);
    CHECK(!vc_shared_hold(region, &held[3], tag)); /* what has ended is nobody's any more */
    CHECK(vc_shared_hold(region, &held[7], tag));
    CHECK(write(go[1], &byte, 1) == 1);
    join(child);
    CHECK(found(region, 0, PUBLISHED) == 0);
    remove_region(folder);
    return broken != 0;
}
