/* Slots: claiming one by an OFD lock, telling whether another's owner lives, freeing those of the dead. */
#ifndef VC_SLOT_H
#define VC_SLOT_H

#include "base/process.h"
#include "region/region.h"

/* Whether the owner of a slot still holds memory. `locked`: someone holds the slot's lock.
 *
 * The lock lives in a mapping of the file and in its descriptor, so it ends with exit and with exec, not with close. Forked
 * children inherit the descriptor, as they inherit the card's files: both keep what they hold until the last child has
 * ended, called exec or closed them. Where the slot says that its mapping can't hold the lock (overlayfs maps another file
 * than it locks), an application that closes all descriptors loses it while it lives: then only a process that is gone
 * makes the slot dead. */
bool vc_slot_alive(const struct vc_identity *self, const struct vc_slot *slot, bool locked);

/* Claim a free or dead slot, lowest first, and fill in who we are. Pre: region->slow_mutex held, region->usage shared,
 * no slot claimed. Returns it, or NULL: all are taken. */
struct vc_slot *vc_slot_claim(struct vc_region *region);

/* Whether another process holds the lock of this slot; usable with a read-only descriptor. Errors count as held. */
bool vc_slot_locked(int descriptor, uint32_t index);

/* The slot of this process, claimed at the first call; NULL in ABSENT and DAMAGED, or when all VC_MAX_SLOTS are taken by
 * live processes (tried again at later calls, at most every 10 ms). Only this process writes to it, so plain counters
 * are updated by atomic adds without a lock; other processes and the manager read them at any time. */
struct vc_slot *vc_region_slot(struct vc_region *region);

/* GPU time to be charged now for what other processes of this container left on a card when they stopped or ended (abandoned.h).
 * `known_ns`: what passed until then is known not to have been free. `*dead_ns`: what of it was left by those that ended; `*standing`: whether one is stopped. Cheap where there is nothing. Pre: card < region->card_count. */
uint64_t vc_slots_abandoned(struct vc_region *region, uint32_t card, uint64_t now_ns, uint64_t known_ns, uint64_t *dead_ns, bool *standing);

/* What stopped processes left on the card was over at `free_ns`: until then nothing is charged for them any more. Returns whether there may be such. */
bool vc_slots_excuse(struct vc_region *region, uint32_t card, uint64_t free_ns);

/* A number that tells the process that holds a slot now from all others, of this container or another, as far as 20 bits can. */
#define VC_TAG_BITS 20
uint32_t vc_slot_tag(const struct vc_region *region, uint32_t index);

/* A descriptor of the usage file that is surely still that file, or -1. Pre: region->slow_mutex held. */
int vc_slots_descriptor(struct vc_region *region);

/* One process of the container at a time: it measures what a context takes of the card. False: nobody else has ended his turn in 20 s, or
 * the account can't be reached. One thread of a process at a time. */
bool vc_slots_take_turn(struct vc_region *region, uint32_t card);
void vc_slots_end_turn(struct vc_region *region, uint32_t card);

/* Free the slots of dead processes but for what others hold (extent.h); return of how many something was freed. */
uint32_t vc_slots_reap(struct vc_region *region);

#endif
