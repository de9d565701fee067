/* The union of the intervals during which one process kept the card busy, over all its streams. */
#ifndef VC_GATE_BUSY_H
#define VC_GATE_BUSY_H

#include <stdint.h>

enum { VC_BUSY_SEGMENTS = 64 };

/* Sorted, disjoint. When full, the oldest is forgotten: an interval that comes so late pays for it again. */
struct vc_busy {
    unsigned count;
    struct {
        uint64_t from_ns, to_ns;
    } segments[VC_BUSY_SEGMENTS];
    /* Where others' slices may be inside and each interval is charged its estimate at most: what was covered beyond that and paid by nobody,
     * and what intervals were spared of theirs because others had covered their time before. */
    uint64_t unpaid_ns, spared_ns;
};

/* Add [from, to) and return the part of it, in ns, that was not covered yet: so overlapping streams pay once. */
uint64_t vc_busy_add(struct vc_busy *busy, uint64_t from_ns, uint64_t to_ns);

/* How much of [from, to) is not covered yet. `*until_ns`: where `most_ns` of that have passed; `to_ns` if there is not more. */
uint64_t vc_busy_fresh(const struct vc_busy *busy, uint64_t from_ns, uint64_t to_ns, uint64_t most_ns, uint64_t *until_ns);

#endif
