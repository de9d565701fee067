/* What each process was charged of a card, kept by the kernel where no other process can change it.
 *
 * As a witness (witness.h) tells memory: a byte-range lock beyond the data, from the start of its slot's and card's range on, as long as the
 * GPU time that its owner was charged. Nobody but the owner can shorten it, so the arbiter adds up what all processes of a container were
 * charged, whatever the usage file says. It ends with its process; one that had to be opened again begins anew.
 *
 * By two more it tells what samples found beyond that (gate/sample.h), so that what several processes found counts together.
 *
 * Further ones tell until when that is all that the process had of the card, as long as it has work there; since when it does so, which tells it
 * from the next one in its slot; and what the card said when it was asked for what stopped siblings left. Their lengths are times, in ms. */
#ifndef VC_CHARGED_H
#define VC_CHARGED_H

#include <stdbool.h>
#include <stdint.h>

#include "region/region.h"

#define VC_CHARGED_UNIT_NS ((uint64_t)100000)
#define VC_CHARGED_STEP_NS ((uint64_t)1000000) /* told when so much more was charged */
#define VC_CHARGED_TIME_NS ((uint64_t)1000000)
#define VC_CHARGED_LOOKED_NS ((uint64_t)2000000) /* told when so much has passed since */

/* Tell that this process was charged `ns` in all; it never tells less again. False: another process has locked our range. Pre: own slot. */
bool vc_charged_tell(struct vc_region *region, uint32_t card, uint64_t ns);

/* … that samples found more than that in all, and less; neither ever falls. False as above. */
bool vc_charged_tell_found(struct vc_region *region, uint32_t card, uint64_t more_ns, uint64_t less_ns);

/* What the process in a slot has told, as others see it; usable with a read-only descriptor. 0: nobody is there. */
uint64_t vc_charged_read(int descriptor, uint32_t slot, uint32_t card);
uint64_t vc_charged_found(int descriptor, uint32_t slot, uint32_t card, bool less);

/* Tell that this process has work on the card, and has told what it had until `now_ns`: before it launches any, and again while it has. False as above. */
bool vc_charged_open(struct vc_region *region, uint32_t card, uint64_t now_ns);
/* … that it has none any more, unless vc_charged_open was called since vc_charged_opens said `opens`. */
void vc_charged_close(struct vc_region *region, uint32_t card, uint64_t opens);
uint64_t vc_charged_opens(struct vc_region *region, uint32_t card);

/* What else is told, by a time; 0: nothing. */
enum vc_charged_time {
    VC_CHARGED_UNTIL, /* it has work on the card, and told all that it had of it until then */
    VC_CHARGED_SINCE, /* the first time that it told any of these: another process in that slot tells another */
    VC_CHARGED_FREE,  /* the card had nothing of stopped siblings then … */
    VC_CHARGED_BUSY,  /* … or had */
};
uint64_t vc_charged_time(int descriptor, uint32_t slot, uint32_t card, enum vc_charged_time kind);

/* The card was asked at `at_ns`. */
void vc_charged_tell_asked(struct vc_region *region, uint32_t card, uint64_t at_ns, bool busy);

/* How many leading slots may have told something; `known` of them at least. */
uint32_t vc_charged_slots(int descriptor, uint32_t known, uint32_t card);

#endif
