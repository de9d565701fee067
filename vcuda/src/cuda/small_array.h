/* Arrays that share a chunk with others: without an address nobody can tell with which. */
#ifndef VC_SMALL_ARRAY_H
#define VC_SMALL_ARRAY_H

#include "charge.h"

/* Up to this, arrays share chunks. */
#define VC_SMALL_ARRAY ((uint64_t)1 << 20)

/* Reserve for an array of so many bytes in the current context: a chunk, or nothing. As vc_charge_current. */
CUresult vc_small_array_begin(struct vc_charge *charge, uint64_t bytes);

/* The driver made it: record it. False (no host memory): nothing is charged, the caller destroys it and refuses. */
bool vc_small_array_keep(struct vc_charge *charge, uint64_t bytes, const void *handle);

/* The driver did not make it. */
void vc_small_array_drop(struct vc_charge *charge, uint64_t bytes);

/* One was destroyed: for charge.c. */
void vc_small_array_freed(const struct vc_entry *entry);

#endif
