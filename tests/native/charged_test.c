/* What a process tells of its charges: read by others from what it locks, kept over closed descriptors, and never changed by others. */
#include <fcntl.h>

#include "base/clock.h"
#include "check.h"
#include "region/charged.h"
#include "region/descriptor.h"
#include "region/slot.h"

#define MS UINT64_C(1000000)
#define SIXTY_DAYS (60 * 86400 * (1000 * MS))

static char *folder;

static int reader(void)
{
    char path[300];
    snprintf(path, sizeof path, "%s/usage", folder);
    return open(path, O_RDONLY | O_CLOEXEC);
}

static uint64_t told(uint32_t slot, uint32_t card)
{
    int other = reader();
    uint64_t ns = vc_charged_read(other, slot, card);
    close(other);
    return ns;
}

static uint32_t slots(uint32_t known)
{
    int other = reader();
    uint32_t count = vc_charged_slots(other, known, 0);
    close(other);
    return count;
}

static void follows_what_is_charged(struct vc_region *region)
{
    CHECK(vc_region_slot(region) == &region->usage->slots[0]);
    CHECK(told(0, 0) == 0 && slots(0) == 1 && slots(3) == 3);
    CHECK(vc_charged_tell(region, 0, MS - 1) && told(0, 0) == 0);
    CHECK(vc_charged_tell(region, 0, 5 * MS + 1) && told(0, 0) == 5 * MS);
    CHECK(vc_charged_tell(region, 0, 5 * MS + 2) && told(0, 0) == 5 * MS);
    CHECK(vc_charged_tell(region, 0, 4 * MS) && told(0, 0) == 5 * MS);
    CHECK(vc_charged_tell(region, 0, SIXTY_DAYS) && told(0, 0) == SIXTY_DAYS);
    CHECK(slots(0) == 1 && told(1, 0) == 0 && told(0, 1) == 0);
}

static uint64_t found(uint32_t slot, bool less)
{
    int other = reader();
    uint64_t ns = vc_charged_found(other, slot, 0, less);
    close(other);
    return ns;
}

static void tells_what_samples_found(struct vc_region *region)
{
    CHECK(vc_charged_tell_found(region, 0, MS / 20, 0) && found(0, false) == 0 && found(0, true) == 0);
    CHECK(vc_charged_tell_found(region, 0, 5 * MS, 3 * MS) && found(0, false) == 5 * MS && found(0, true) == 3 * MS);
    CHECK(vc_charged_tell_found(region, 0, 5 * MS, 4 * MS) && found(0, false) == 5 * MS && found(0, true) == 4 * MS);
    CHECK(told(0, 0) == SIXTY_DAYS && found(1, false) == 0 && slots(0) == 1);
}

static uint64_t said(uint32_t slot, enum vc_charged_time kind)
{
    int other = reader();
    uint64_t ns = vc_charged_time(other, slot, 0, kind);
    close(other);
    return ns;
}

/* That it has work on the card, and until when all that it had is told. */
static void says_that_it_has_work(struct vc_region *region)
{
    uint64_t at = SIXTY_DAYS, opens;
    CHECK(said(0, VC_CHARGED_UNTIL) == 0 && said(0, VC_CHARGED_SINCE) == 0);
    CHECK(vc_charged_open(region, 0, at + 1) && said(0, VC_CHARGED_UNTIL) == at && said(0, VC_CHARGED_SINCE) == at);
    CHECK(slots(0) == 1 && said(1, VC_CHARGED_UNTIL) == 0);
    CHECK(vc_charged_open(region, 0, at + MS) && said(0, VC_CHARGED_UNTIL) == at); /* not each time */
    CHECK(vc_charged_open(region, 0, at + 3 * MS) && said(0, VC_CHARGED_UNTIL) == at + 3 * MS && said(0, VC_CHARGED_SINCE) == at);
    opens = vc_charged_opens(region, 0);
    CHECK(vc_charged_open(region, 0, at + 4 * MS)); /* another thread begins */
    vc_charged_close(region, 0, opens);
    CHECK(said(0, VC_CHARGED_UNTIL) == at + 3 * MS);
    vc_charged_close(region, 0, vc_charged_opens(region, 0));
    CHECK(said(0, VC_CHARGED_UNTIL) == 0 && said(0, VC_CHARGED_SINCE) == at);
    CHECK(vc_charged_open(region, 0, at + 5 * MS) && said(0, VC_CHARGED_UNTIL) == at + 5 * MS && said(0, VC_CHARGED_SINCE) == at);
    vc_charged_tell_asked(region, 0, at + 7 * MS, true);
    vc_charged_tell_asked(region, 0, at + 9 * MS, false);
    CHECK(said(0, VC_CHARGED_BUSY) == at + 7 * MS && said(0, VC_CHARGED_FREE) == at + 9 * MS && told(0, 0) == 0);
}

/* As applications do that become daemons: what was told ended with the description, and is not told again. */
static void begins_anew_without_its_descriptors(struct vc_region *region)
{
    uint64_t before = SIXTY_DAYS;
    for (int descriptor = 3; descriptor < 1024; descriptor++)
        close(descriptor);
    CHECK(told(0, 0) == before); /* a mapping keeps it */
    CHECK(vc_charged_tell(region, 0, before + 3 * MS) && told(0, 0) == 3 * MS);
    CHECK(vc_charged_tell(region, 0, before + 7 * MS) && told(0, 0) == 7 * MS);
    CHECK(vc_charged_tell_found(region, 0, 6 * MS, 4 * MS) && found(0, false) == MS && found(0, true) == 0);
    CHECK(vc_charged_open(region, 0, before + 20 * MS) && said(0, VC_CHARGED_UNTIL) == before + 20 * MS && said(0, VC_CHARGED_SINCE) == before + 20 * MS);
}

static bool lock_range(int descriptor, uint64_t slot, uint64_t from, uint64_t units)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)((UINT64_C(1) << 50) + (slot << 40) + from), .l_len = (off_t)units};
    return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

/* In a sibling: what the first one told can't be changed, nor hidden behind further locks; who is hindered knows. */
static void nobody_else_changes_it(void)
{
    struct vc_region *region = region_at(folder);
    int other = open(region->file.path, O_RDWR | O_CLOEXEC);
    CHECK(vc_region_slot(region) == &region->usage->slots[1]);
    CHECK(!lock_range(other, 0, 0, 1) && lock_range(other, 0, 1000000, 5));
    CHECK(told(0, 0) == 7 * MS);
    CHECK(vc_charged_tell(region, 0, 2 * MS) && lock_range(other, 1, 30, 1));
    CHECK(!vc_charged_tell(region, 0, 4 * MS) && !vc_charged_tell(region, 0, 4 * MS) && told(1, 0) == 2 * MS && slots(0) == 2);
    close(other);
    CHECK(vc_charged_tell(region, 0, 5 * MS) && told(1, 0) == 5 * MS);
    CHECK(said(0, VC_CHARGED_UNTIL) == SIXTY_DAYS + 20 * MS && said(1, VC_CHARGED_UNTIL) == 0);
    other = open(region->file.path, O_RDWR | O_CLOEXEC);
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)((UINT64_C(1) << 52) + (UINT64_C(1) << 40)), .l_len = 1};
    CHECK(fcntl(other, F_OFD_SETLK, &whole) == 0 && !vc_charged_open(region, 0, 30 * MS));
    close(other);
    CHECK(vc_charged_open(region, 0, 31 * MS) && said(1, VC_CHARGED_UNTIL) == 31 * MS);
    other = open(region->file.path, O_RDWR | O_CLOEXEC);
    whole.l_start = (off_t)((UINT64_C(1) << 58) + (UINT64_C(1) << 40));
    CHECK(fcntl(other, F_OFD_SETLK, &whole) == 0 && !vc_charged_tell_found(region, 0, 2 * MS, 0) && !vc_charged_tell(region, 0, 5 * MS));
    close(other);
    CHECK(vc_charged_tell_found(region, 0, 2 * MS, 0) && vc_charged_tell(region, 0, 5 * MS) && found(1, false) == 2 * MS);
}

/* What a child inherited is its parent's, and ends with that one. */
static void a_child_keeps_nothing_of_it(void)
{
    int to_child[2], from_child[2];
    char byte;
    CHECK(pipe(to_child) == 0 && pipe(from_child) == 0);
    pid_t parent = fork();
    if (parent == 0) {
        struct vc_region *region = region_at(folder);
        CHECK(vc_region_slot(region) == &region->usage->slots[1]);
        CHECK(vc_charged_tell(region, 0, 2 * MS) && told(1, 0) == 2 * MS);
        pid_t child = fork();
        if (child == 0) {
            close(to_child[1]);
            (void)!write(from_child[1], "x", 1);
            (void)!read(to_child[0], &byte, 1);
            _exit(0);
        }
        _exit(broken != 0);
    }
    join(parent);
    CHECK(read(from_child[0], &byte, 1) == 1);
    CHECK(told(1, 0) == 0);
    close(to_child[1]);
}

int main(void)
{
    folder = make_region(1 << 30);
    struct vc_region *region = region_at(folder);
    CHECK(vc_region_slot(region) == &region->usage->slots[0]);
    says_that_it_has_work(region);
    follows_what_is_charged(region);
    tells_what_samples_found(region);
    begins_anew_without_its_descriptors(region);
    pid_t sibling = fork();
    if (sibling == 0) {
        nobody_else_changes_it();
        _exit(broken != 0);
    }
    join(sibling);
    a_child_keeps_nothing_of_it();
    remove_region(folder);
    return broken != 0;
}
