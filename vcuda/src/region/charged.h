/* What each process was charged of a card, kept by the kernel where no other process can change it.
 *
 * As a witness (witness.h) tells memory: a byte-range lock beyond the data, from the start of its slot's and card's range on, as long as the
 * GPU time that its owner was charged. Nobody but the owner can shorten it, so the arbiter adds up what all processes of a container were
 * charged, whatever the usage file says. It ends with its process; one that had to be opened again begins anew. */
#ifndef VC_CHARGED_H
#define VC_CHARGED_H

#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"

#define VC_CHARGED_UNIT_NS ((uint64_t)100000)
#define VC_CHARGED_STEP_NS ((uint64_t)1000000) /* told when so much more was charged */

/* Tell that this process was charged `ns` in all; it never tells less again. False: another process has locked our range. Pre: own slot;
 * one thread at a time. */
bool vc_charged_tell(struct vc_region *region, uint32_t card, uint64_t ns);

/* What the process in a slot has told, as others see it; usable with a read-only descriptor. 0: nobody is there. */
uint64_t vc_charged_read(int descriptor, uint32_t slot, uint32_t card);

/* How many leading slots may have told something; `known` of them at least. */
uint32_t vc_charged_slots(int descriptor, uint32_t known, uint32_t card);

#endif
