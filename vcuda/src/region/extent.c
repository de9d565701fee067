/* Locks on extents: asked for, told, counted. */
#include "region/extent.h"

#include <fcntl.h>

#define VC__HELD ((off_t)1 << 56) /* beyond the witnesses; then slot, card, chunk */
#define VC__ENDED ((off_t)1 << 57) /* beyond those; then slot, chunk: what was is next to what was, so the kernel keeps few of them */
#define VC__CHUNK_BITS 40         /* of one slot's and card's extents: more than numbers */
#define VC__MOST_QUESTIONS 4096   /* more locks than processes have were made to hide behind */

static struct flock range(short type, off_t start, off_t bytes)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = start, .l_len = bytes};
}

static off_t place_of(uint32_t slot, uint32_t card, uint64_t chunk)
{
    return VC__HELD + ((off_t)(slot * VC_MAX_CARDS + card) << VC__CHUNK_BITS) + (off_t)chunk;
}

bool vc_extent_set(int descriptor, short type, const struct vc_extent *extent)
{
    for (uint32_t card = 0; extent->cards >> card; card++) {
        struct flock lock = range(type, place_of(extent->slot, card, extent->first), (off_t)extent->chunks);
        if ((extent->cards >> card & 1) && fcntl(descriptor, F_OFD_SETLK, &lock) != 0)
            return false;
    }
    return true;
}

bool vc_extent_find(int descriptor, off_t start, off_t end, struct flock *found)
{
    *found = range(F_WRLCK, start, end - start);
    if (fcntl(descriptor, F_OFD_GETLK, found) != 0)
        *found = range(F_WRLCK, start, end - start); /* unknown: as much as can be */
    else if (found->l_type == F_UNLCK)
        return false;
    off_t until = found->l_len == 0 || found->l_start + found->l_len > end ? end : found->l_start + found->l_len;
    found->l_start = found->l_start > start ? found->l_start : start;
    found->l_len = until - found->l_start;
    return true;
}

/* How much of the range others lock; several may lock the same. */
static uint64_t locked(int descriptor, off_t start, off_t end, unsigned *questions)
{
    struct flock found;
    if (start >= end || !vc_extent_find(descriptor, start, end, &found))
        return 0;
    if (++*questions > VC__MOST_QUESTIONS)
        return (uint64_t)(end - start);
    return (uint64_t)found.l_len + locked(descriptor, start, found.l_start, questions) +
           locked(descriptor, found.l_start + found.l_len, end, questions);
}

bool vc_extent_is_held(int descriptor, const struct vc_extent *extent)
{
    struct flock found;
    for (uint32_t card = 0; extent->cards >> card; card++) {
        off_t start = place_of(extent->slot, card, extent->first);
        if ((extent->cards >> card & 1) && vc_extent_find(descriptor, start, start + (off_t)extent->chunks, &found))
            return true;
    }
    return false;
}

static off_t end_of(const struct vc_extent *extent)
{
    return VC__ENDED + ((off_t)extent->slot << VC__CHUNK_BITS) + (off_t)extent->first;
}

bool vc_extent_end(int descriptor, const struct vc_extent *extent)
{
    struct flock lock = range(F_WRLCK, end_of(extent), (off_t)extent->chunks);
    return fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
}

bool vc_extent_has_ended(int descriptor, const struct vc_extent *extent)
{
    struct flock found;
    return vc_extent_find(descriptor, end_of(extent), end_of(extent) + (off_t)extent->chunks, &found);
}

bool vc_extent_any(int descriptor, uint32_t slot)
{
    struct flock found;
    return vc_extent_find(descriptor, place_of(slot, 0, 0), place_of(slot + 1, 0, 0), &found);
}

uint64_t vc_extent_bytes(int descriptor, uint32_t slot, uint32_t card)
{
    unsigned questions = 0;
    uint64_t chunks = locked(descriptor, place_of(slot, card, 0), place_of(slot, card + 1, 0), &questions);
    return chunks > UINT64_MAX / VC_EXTENT_CHUNK ? UINT64_MAX : chunks * VC_EXTENT_CHUNK;
}
