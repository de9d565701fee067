/* Arrays that share a chunk with others: without an address nobody can tell with which. */
#ifndef VC_SMALL_ARRAY_H
#define VC_SMALL_ARRAY_H

#include "cuda/memory/charge.h"

/* Up to this, arrays share chunks. */
#define VC_SMALL_ARRAY ((uint64_t)1 << 20)

/* One that is being made. */
struct vc_small_array {
    uint64_t bytes;
    uint32_t shape;
    bool counted; /* false: not charged by us */
};

/* Charge an array of so many bytes in the current context: a chunk, or nothing. `name` is the same for arrays of one shape
 * only. As vc_charge_current. */
CUresult vc_small_array_begin(struct vc_small_array *made, struct vc_charge *charge, uint64_t bytes, uint64_t name);

/* The driver made it: record it. False (no host memory): nothing is charged, the caller destroys it and refuses. */
bool vc_small_array_keep(const struct vc_small_array *made, const struct vc_charge *charge, const void *handle);

/* The driver did not make it. */
void vc_small_array_drop(const struct vc_small_array *made, const struct vc_charge *charge);

/* One was destroyed: for charge.c. */
void vc_small_array_freed(const struct vc_entry *entry);

/* A chunk that other memory leaves may be shared with an array: true if its charge is the arrays' from now on. */
bool vc_small_array_takes_over(int card);

#endif
