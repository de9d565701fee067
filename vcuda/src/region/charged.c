/* Telling and reading charges as the lengths of locks. */
#include "region/charged.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "region/descriptor.h"
#include "region/extent.h"

#define VC__CHARGES ((off_t)1 << 50) /* beyond the witnesses, before the extents */
#define VC__LENGTH_BITS 40           /* of units for one slot and card: three years of a card */

static off_t start_of(uint32_t slot, uint32_t card)
{
    return VC__CHARGES + ((off_t)(card * VC_MAX_SLOTS + slot) << VC__LENGTH_BITS);
}

/* What the old description told ended with it, or stays with whom its descriptor was inherited by. */
static int own_descriptor(struct vc_region *region)
{
    struct vc_charged *mine = &region->charged;
    if (vc_descriptor_is_usage(&region->file, mine->descriptor))
        return mine->descriptor;
    vc_descriptor_unpin(mine->page);
    mine->page = NULL;
    for (uint32_t card = 0; card < VC_MAX_CARDS; card++) {
        mine->before_ns[card] += mine->units[card] * VC_CHARGED_UNIT_NS;
        mine->units[card] = 0;
    }
    mine->descriptor = vc_descriptor_open(&region->file);
    if (mine->descriptor >= 0)
        mine->page = vc_descriptor_pin(mine->descriptor);
    return mine->descriptor;
}

bool vc_charged_tell(struct vc_region *region, uint32_t card, uint64_t ns)
{
    struct vc_charged *mine = &region->charged;
    if (ns < mine->before_ns[card] + mine->units[card] * VC_CHARGED_UNIT_NS + VC_CHARGED_STEP_NS)
        return !mine->locked_out;
    int descriptor = own_descriptor(region);
    if (descriptor < 0) /* the application did that to itself, it is no other process's doing */
        return !mine->locked_out;
    uint64_t units = (ns - mine->before_ns[card]) / VC_CHARGED_UNIT_NS, most = (UINT64_C(1) << VC__LENGTH_BITS) - 1;
    struct flock lock = {.l_type = F_WRLCK,
                         .l_whence = SEEK_SET,
                         .l_start = start_of((uint32_t)(region->slot - region->usage->slots), card),
                         .l_len = (off_t)(units < most ? units : most)};
    int failed = fcntl(descriptor, F_OFD_SETLK, &lock);
    if (failed == 0)
        mine->units[card] = units;
    mine->locked_out = failed != 0 && (errno == EAGAIN || errno == EACCES);
    return !mine->locked_out;
}

uint64_t vc_charged_read(int descriptor, uint32_t slot, uint32_t card)
{
    /* By its first byte, which one process has: further ones may have been locked to hide it. */
    off_t start = start_of(slot, card);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = 1};
    if (fcntl(descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type == F_UNLCK)
        return 0;
    off_t end = start_of(slot + 1, card), until = lock.l_len == 0 ? end : lock.l_start + lock.l_len;
    return (uint64_t)((until < end ? until : end) - start) * VC_CHARGED_UNIT_NS;
}

uint32_t vc_charged_slots(int descriptor, uint32_t known, uint32_t card)
{
    struct flock found;
    while (known < VC_MAX_SLOTS && vc_extent_find(descriptor, start_of(known, card), start_of(VC_MAX_SLOTS, card), &found))
        known = (uint32_t)((found.l_start + found.l_len - 1 - start_of(0, card)) >> VC__LENGTH_BITS) + 1;
    return known;
}
