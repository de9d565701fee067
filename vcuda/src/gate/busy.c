/* A short sorted list of disjoint busy segments; new intervals come nearly in order of their end. */
#include "gate/busy.h"

#include <stdbool.h>
#include <string.h>

static uint64_t overlap(uint64_t a_from, uint64_t a_to, uint64_t b_from, uint64_t b_to)
{
    uint64_t from = a_from > b_from ? a_from : b_from;
    uint64_t to = a_to < b_to ? a_to : b_to;
    return to > from ? to - from : 0;
}

static void forget_oldest(struct vc_busy *busy)
{
    busy->count--;
    memmove(&busy->segments[0], &busy->segments[1], busy->count * sizeof busy->segments[0]);
}

uint64_t vc_busy_add(struct vc_busy *busy, uint64_t from_ns, uint64_t to_ns)
{
    if (to_ns <= from_ns)
        return 0;
    uint64_t fresh = to_ns - from_ns;
    uint64_t merged_from = from_ns, merged_to = to_ns;
    unsigned kept = 0, place = 0;
    for (unsigned i = 0; i < busy->count; i++) {
        uint64_t from = busy->segments[i].from_ns, to = busy->segments[i].to_ns;
        fresh -= overlap(from_ns, to_ns, from, to);
        if (to < from_ns || from > to_ns) { /* apart: keep */
            if (to < from_ns)
                place = kept + 1;
            busy->segments[kept++] = busy->segments[i];
            continue;
        }
        merged_from = from < merged_from ? from : merged_from;
        merged_to = to > merged_to ? to : merged_to;
    }
    busy->count = kept;
    if (busy->count == VC_BUSY_SEGMENTS) {
        if (place == 0) /* older than everything remembered: it would be the first to be forgotten */
            return fresh;
        forget_oldest(busy);
        place--;
    }
    memmove(&busy->segments[place + 1], &busy->segments[place], (busy->count - place) * sizeof busy->segments[0]);
    busy->segments[place].from_ns = merged_from;
    busy->segments[place].to_ns = merged_to;
    busy->count++;
    return fresh;
}

uint64_t vc_busy_fresh(const struct vc_busy *busy, uint64_t from_ns, uint64_t to_ns, uint64_t most_ns, uint64_t *until_ns)
{
    uint64_t fresh = 0, at = from_ns;
    *until_ns = to_ns;
    for (unsigned i = 0; i <= busy->count && at < to_ns; i++) {
        bool last = i == busy->count || busy->segments[i].from_ns >= to_ns;
        uint64_t next = last ? to_ns : busy->segments[i].from_ns, gap = next > at ? next - at : 0;
        if (*until_ns == to_ns && fresh + gap >= most_ns)
            *until_ns = at + most_ns - fresh;
        fresh += gap;
        if (last)
            break;
        at = busy->segments[i].to_ns > at ? busy->segments[i].to_ns : at;
    }
    return fresh;
}
