/* The overhead of a container: device memory that it uses beside its ledger (code loaded lazily, stacks), as measured from
 * outside. Whoever measures (gpu-manager, the keeper of `vcuda run`) writes it into the limits; the quota counts it. */
#ifndef VC_OVERHEAD_H
#define VC_OVERHEAD_H

#include "region/file.h"
#include "region/region.h"

/* Write the overhead of all cards of a limits file in place, under the file's seqlock, and count one more sample. Other
 * limit fields stay; serialised with vc_limits_update by flock. `count` must be the file's. Returns 0, or -1 with *error. */
int vc_overhead_write(const char *limits_path, const uint64_t *bytes, uint32_t count, struct vc_error *error);

/* Ask whoever measures for a sample of this container now, and wait for it: at most 20 ms, and not at all where nobody has
 * ever measured, where this process asked within the last 100 ms, or (`for_refusal`: what others hold may be less by now; else) where
 * it did nothing since that takes memory beside the ledger. For questions about free memory, which applications size their caches by,
 * and before overhead is the reason of a refusal. Any thread, no lock held. */
void vc_overhead_refresh(struct vc_region *region, uint32_t card, bool for_refusal);

#endif
