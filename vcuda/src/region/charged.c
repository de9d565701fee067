/* Telling and reading charges as the lengths of locks. */
#include "region/charged.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "region/descriptor.h"
#include "region/extent.h"

#define VC__CHARGES ((off_t)1 << 50) /* beyond the witnesses, before the extents */
#define VC__TIMES ((off_t)1 << 52)   /* beyond those, each kind's */
#define VC__FOUND ((off_t)1 << 58)   /* beyond the extents: more, then less */
#define VC__LENGTH_BITS 40           /* of units for one slot and card: three years of a card */

static const uint64_t MOST = (UINT64_C(1) << VC__LENGTH_BITS) - 1;

static off_t place_of(uint32_t slot, uint32_t card)
{
    return (off_t)(card * VC_MAX_SLOTS + slot) << VC__LENGTH_BITS;
}

static off_t start_of(uint32_t slot, uint32_t card)
{
    return VC__CHARGES + place_of(slot, card);
}

static off_t time_of(uint32_t slot, uint32_t card, enum vc_charged_time kind)
{
    return (VC__TIMES << (off_t)kind) + place_of(slot, card);
}

static off_t found_of(uint32_t slot, uint32_t card, bool less)
{
    return (VC__FOUND << less) + place_of(slot, card);
}

static uint32_t own_slot(const struct vc_region *region)
{
    return (uint32_t)(region->slot - region->usage->slots);
}

static int lock_length(int descriptor, off_t start, uint64_t length)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = (off_t)(length < MOST ? length : MOST)};
    return fcntl(descriptor, F_OFD_SETLK, &lock);
}

/* By its first byte, which one process has: further ones may have been locked to hide it. */
static uint64_t read_length(int descriptor, off_t start)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = start, .l_len = 1};
    if (fcntl(descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type == F_UNLCK)
        return 0;
    off_t end = start + ((off_t)1 << VC__LENGTH_BITS), until = lock.l_len == 0 ? end : lock.l_start + lock.l_len;
    return (uint64_t)((until < end ? until : end) - start);
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
        for (unsigned less = 0; less < 2; less++) {
            mine->found_before_ns[less][card] += mine->found_units[less][card] * VC_CHARGED_UNIT_NS;
            mine->found_units[less][card] = 0;
        }
        mine->open_ns[card] = 0;
        mine->since[card] = false;
    }
    mine->descriptor = vc_descriptor_open(&region->file);
    if (mine->descriptor >= 0)
        mine->page = vc_descriptor_pin(mine->descriptor);
    return mine->descriptor;
}

static bool is_refused(int failed)
{
    return failed != 0 && (errno == EAGAIN || errno == EACCES);
}

static bool tell(struct vc_region *region, uint32_t card, uint64_t ns)
{
    struct vc_charged *mine = &region->charged;
    if (ns < mine->before_ns[card] + mine->units[card] * VC_CHARGED_UNIT_NS + VC_CHARGED_STEP_NS)
        return !mine->locked_out;
    int descriptor = own_descriptor(region);
    if (descriptor < 0) /* the application did that to itself, it is no other process's doing */
        return !mine->locked_out;
    uint64_t units = (ns - mine->before_ns[card]) / VC_CHARGED_UNIT_NS;
    int failed = lock_length(descriptor, start_of(own_slot(region), card), units);
    if (failed == 0)
        mine->units[card] = units < MOST ? units : MOST;
    mine->locked_out = is_refused(failed);
    return !mine->locked_out;
}

bool vc_charged_tell(struct vc_region *region, uint32_t card, uint64_t ns)
{
    pthread_mutex_lock(&region->charged.mutex);
    bool told = tell(region, card, ns) && !region->charged.found_locked_out;
    pthread_mutex_unlock(&region->charged.mutex);
    return told;
}

static void tell_found(struct vc_region *region, uint32_t card, uint64_t ns, bool less)
{
    struct vc_charged *mine = &region->charged;
    if (ns < mine->found_before_ns[less][card] + (mine->found_units[less][card] + 1) * VC_CHARGED_UNIT_NS)
        return;
    int descriptor = own_descriptor(region);
    if (descriptor < 0)
        return;
    uint64_t units = (ns - mine->found_before_ns[less][card]) / VC_CHARGED_UNIT_NS;
    int failed = lock_length(descriptor, found_of(own_slot(region), card, less), units);
    if (failed == 0)
        mine->found_units[less][card] = units < MOST ? units : MOST;
    mine->found_locked_out = is_refused(failed);
}

bool vc_charged_tell_found(struct vc_region *region, uint32_t card, uint64_t more_ns, uint64_t less_ns)
{
    pthread_mutex_lock(&region->charged.mutex);
    tell_found(region, card, more_ns, false);
    if (!region->charged.found_locked_out)
        tell_found(region, card, less_ns, true);
    bool told = !region->charged.locked_out && !region->charged.found_locked_out;
    pthread_mutex_unlock(&region->charged.mutex);
    return told;
}

uint64_t vc_charged_found(int descriptor, uint32_t slot, uint32_t card, bool less)
{
    return read_length(descriptor, found_of(slot, card, less)) * VC_CHARGED_UNIT_NS;
}

uint64_t vc_charged_read(int descriptor, uint32_t slot, uint32_t card)
{
    return read_length(descriptor, start_of(slot, card)) * VC_CHARGED_UNIT_NS;
}

/* By which the process is told from the next one in its slot; and that it tells anything. */
static int tell_since(struct vc_region *region, uint32_t card, int descriptor, uint64_t now_ns)
{
    struct vc_charged *mine = &region->charged;
    int failed = mine->since[card] ? 0 : lock_length(descriptor, time_of(own_slot(region), card, VC_CHARGED_SINCE), now_ns / VC_CHARGED_TIME_NS);
    mine->since[card] = failed == 0;
    return failed;
}

static bool open_until(struct vc_region *region, uint32_t card, uint64_t now_ns)
{
    struct vc_charged *mine = &region->charged;
    mine->opens[card]++;
    if (mine->open_ns[card] != 0 && now_ns < mine->open_ns[card] + VC_CHARGED_LOOKED_NS)
        return true;
    int descriptor = own_descriptor(region);
    if (descriptor < 0)
        return true;
    int failed = tell_since(region, card, descriptor, now_ns);
    failed = failed ? failed : lock_length(descriptor, time_of(own_slot(region), card, VC_CHARGED_UNTIL), now_ns / VC_CHARGED_TIME_NS);
    if (failed == 0)
        mine->open_ns[card] = now_ns;
    return !is_refused(failed);
}

bool vc_charged_open(struct vc_region *region, uint32_t card, uint64_t now_ns)
{
    pthread_mutex_lock(&region->charged.mutex);
    bool told = open_until(region, card, now_ns);
    pthread_mutex_unlock(&region->charged.mutex);
    return told;
}

uint64_t vc_charged_opens(struct vc_region *region, uint32_t card)
{
    pthread_mutex_lock(&region->charged.mutex);
    uint64_t opens = region->charged.opens[card];
    pthread_mutex_unlock(&region->charged.mutex);
    return opens;
}

void vc_charged_close(struct vc_region *region, uint32_t card, uint64_t opens)
{
    struct vc_charged *mine = &region->charged;
    pthread_mutex_lock(&region->charged.mutex);
    if (mine->opens[card] == opens && mine->open_ns[card] != 0 && vc_descriptor_is_usage(&region->file, mine->descriptor)) {
        struct flock lock = {.l_type = F_UNLCK, .l_whence = SEEK_SET, .l_start = time_of(own_slot(region), card, VC_CHARGED_UNTIL), .l_len = (off_t)MOST};
        if (fcntl(mine->descriptor, F_OFD_SETLK, &lock) == 0)
            mine->open_ns[card] = 0;
    }
    pthread_mutex_unlock(&region->charged.mutex);
}

uint64_t vc_charged_time(int descriptor, uint32_t slot, uint32_t card, enum vc_charged_time kind)
{
    return read_length(descriptor, time_of(slot, card, kind)) * VC_CHARGED_TIME_NS;
}

void vc_charged_tell_asked(struct vc_region *region, uint32_t card, uint64_t at_ns, bool busy)
{
    pthread_mutex_lock(&region->charged.mutex);
    int descriptor = own_descriptor(region);
    if (descriptor >= 0 && tell_since(region, card, descriptor, at_ns) == 0) /* else what passes is charged, as where nobody asks */
        lock_length(descriptor, time_of(own_slot(region), card, busy ? VC_CHARGED_BUSY : VC_CHARGED_FREE), at_ns / VC_CHARGED_TIME_NS);
    pthread_mutex_unlock(&region->charged.mutex);
}

static uint32_t slots_from(int descriptor, uint32_t known, off_t first)
{
    struct flock found;
    off_t end = first + ((off_t)VC_MAX_SLOTS << VC__LENGTH_BITS);
    while (known < VC_MAX_SLOTS && vc_extent_find(descriptor, first + ((off_t)known << VC__LENGTH_BITS), end, &found))
        known = (uint32_t)((found.l_start + found.l_len - 1 - first) >> VC__LENGTH_BITS) + 1;
    return known;
}

/* Who tells anything has told that before. */
uint32_t vc_charged_slots(int descriptor, uint32_t known, uint32_t card)
{
    return slots_from(descriptor, slots_from(descriptor, known, start_of(0, card)), time_of(0, card, VC_CHARGED_SINCE));
}
