/* Memory that processes of a container share: whose it is, and who else holds it.
 *
 * The kernel keeps these books, as locks on the usage file that end with the processes that hold them. Every shared object has an extent,
 * numbered by chunks, that its owner (the process that was charged for it) uses for nothing else. Who holds the object beside its owner
 * locks the extent: so long it stays charged in the owner's slot, when he lets go of it or ends, it and nothing else of his.
 *
 * An owner also publishes extents under names, which others find. Any thread. In a region that is not ENFORCED nothing is shared. */
#ifndef VC_SHARED_H
#define VC_SHARED_H

#include "region/extent.h"
#include "region/region.h"

/* An extent of this process's own in the region that was never given. False: it has no slot there, or too many were given. */
bool vc_shared_new(struct vc_region *region, uint32_t cards, uint64_t bytes, struct vc_extent *extent);

/* An extent of our own is no more: nobody can hold it from now on. False: another process does, or it can't be said. */
bool vc_shared_end(const struct vc_extent *extent);

/* Hold what another process owns, undone by as many lets. False: its owner is gone, by the slot's tag (slot.h), has ended it, or it is our
 * own. */
bool vc_shared_hold(const struct vc_extent *extent, uint32_t tag);
void vc_shared_let(const struct vc_extent *extent);

/* What was held on more cards than it lies on is held on those of `extent` alone from now on. */
void vc_shared_narrow(const struct vc_extent *extent);

/* Whether another process holds some of what we own. Errors count as held. */
bool vc_shared_is_held(const struct vc_extent *extent);

/* Name an extent that lies on one card; the name is any number of which few are alike. False: it can't be. */
bool vc_shared_publish(uint64_t name, const struct vc_extent *extent);
void vc_shared_withdraw(uint64_t name, const struct vc_extent *extent);
/* What another process has published in the region; false: nobody, or several. */
bool vc_shared_find(struct vc_region *region, uint64_t name, struct vc_extent *extent);

#endif
