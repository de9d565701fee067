/* Extents: memory of one process that others may hold, as byte ranges of the usage file that those who hold it lock. See shared.h. */
#ifndef VC_EXTENT_H
#define VC_EXTENT_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#include "region/abi.h"

#define VC_EXTENT_CHUNK ((uint64_t)2 << 20)
#define VC_EXTENT_BITS 30 /* of a chunk's number: as many are shared by a process in its life */

struct flock;
struct vc_region;

struct vc_extent {
    struct vc_region *region;
    uint32_t slot;
    uint32_t cards; /* of the region, on which it lies */
    uint64_t first, chunks;
};

/* What this process holds. */
struct vc_hold {
    struct vc_hold *next;
    struct vc_extent extent;
    uint32_t tag; /* of the slot, which stays its owner's so long */
    uint64_t count;
};

/* Lock it (F_RDLCK) or let go of it (F_UNLCK), by this description of the usage file. */
bool vc_extent_set(int descriptor, short type, const struct vc_extent *extent);

/* Whether another description's owner holds some of it. Errors count as held. */
bool vc_extent_is_held(int descriptor, const struct vc_extent *extent);

/* Its owner says that it is no more, by this description, or asks whether that was said by another. Errors count as said. */
bool vc_extent_end(int descriptor, const struct vc_extent *extent);
bool vc_extent_has_ended(int descriptor, const struct vc_extent *extent);

/* Whether another one holds anything that the slot's process owned. Errors count as held. */
bool vc_extent_any(int descriptor, uint32_t slot);

/* Bytes on a card, of what the slot's process owned, that others hold. */
uint64_t vc_extent_bytes(int descriptor, uint32_t slot, uint32_t card);

/* Some lock of others between two places; `found` is clipped to them. Errors count as locked. */
bool vc_extent_find(int descriptor, off_t start, off_t end, struct flock *found);

#endif
