/* Arrays that share a chunk with others: without an address nobody can tell with which. */
#ifndef VC_SMALL_ARRAY_H
#define VC_SMALL_ARRAY_H

#include "cuda/memory/account.h"

/* Up to this, arrays share chunks. */
#define VC_SMALL_ARRAY ((uint64_t)1 << 20)

/* One that is being made. */
struct vc_small_array {
    uint32_t size_class;
    bool counted; /* false: not charged by us */
};

/* Charge an array of between `least` and `most` bytes, with texels of so many bytes, in the current context: a chunk, or nothing. As
 * vc_charge_current. */
CUresult vc_small_array_begin(struct vc_small_array *made, struct vc_charge *charge, uint64_t texel, uint64_t least, uint64_t most);

/* The driver made it: record it. False (no host memory): nothing is charged, the caller destroys it and refuses. */
bool vc_small_array_keep(const struct vc_small_array *made, const struct vc_charge *charge, const void *handle);

/* The driver did not make it. */
void vc_small_array_drop(const struct vc_small_array *made, const struct vc_charge *charge);

#endif
