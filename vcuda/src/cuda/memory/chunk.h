/* Chunks that small allocations share.
 *
 * The driver's heaps take memory from the card in chunks of 2 MiB. So a small allocation is charged the chunk that its address
 * lies in, once for all that lie there, and the chunk is released with the last of them: exact whatever the driver's own
 * rules are, and without asking it. Each kind of memory has chunks of its own. */
#ifndef VC_CHUNK_H
#define VC_CHUNK_H

#include <stdbool.h>
#include <stdint.h>

/* The driver takes memory from the card in pieces of this size; smaller allocations share one. */
#define VC_CHUNK ((uint64_t)2 << 20)

/* A range of addresses in memory of one kind (below 4). */
struct vc_range {
    uint64_t address, bytes;
    uint32_t kind;
};

/* Bytes of all chunks that a range touches. */
uint64_t vc_chunks_of(const struct vc_range *range);

/* A name, never 0, of the only chunk that a range lies in; 0: it touches several. */
uint64_t vc_chunks_only(const struct vc_range *range);

/* Enter a small allocation into its chunks; `taken`: the bytes of those that are new. False (no host memory): nothing is entered. */
bool vc_chunks_enter(const struct vc_range *range, uint64_t *taken);

/* The opposite; returns the bytes of those that are empty now. */
uint64_t vc_chunks_leave(const struct vc_range *range);

#endif
