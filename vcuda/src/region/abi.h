/* The region's layout as C sees it: `vcuda/abi/region.abi` with guards, the magic and proof that no offset moved. A process may have
 * several regions open (regions.h); the layout knows nothing of that.
 *
 * Rules of the ABI: append-only. A new field takes the place of a reserved word, is zero in older files, and raises
 * VC_ABI_MINOR; nothing ever moves. A file of another VC_ABI_MAJOR is refused. */
#ifndef VC_ABI_H
#define VC_ABI_H

#include <stddef.h>
#include <stdint.h>

#include "region.abi"

/* First eight bytes of both files, not NUL-terminated. */
#define VC_MAGIC "VCUDARGN"

/* In vc_card_usage.began_ns: not yet, as far as is known; the bits below say since when it waits. */
#define VC_NOT_BEGUN (UINT64_C(1) << 63)
/* … or its streams have something else to do first, as was seen then: it may begin at any time. */
#define VC_BEHIND (UINT64_C(1) << 62)
/* … or nothing is known of it yet, but that something of unknown cost was launched then. */
#define VC_UNTOLD (UINT64_C(1) << 61)
/* In vc_card_usage.refill_ns, of a lease holder that waits: its next operation does not fit into what is left of the lease. */
#define VC_NOTHING_FITS INT64_C(-1)
/* … of one that does not wait: it is done, and will not launch anything soon. */
#define VC_HAS_LEFT INT64_C(-2)

#define VC__OFFSET(type, field, offset) \
    _Static_assert(offsetof(struct type, field) == (offset), "ABI: " #type "." #field " moved")
#define VC__SIZE(type, bytes) _Static_assert(sizeof(struct type) == (bytes), "ABI: size of " #type " changed")

VC__SIZE(vc_header, 64);
VC__OFFSET(vc_header, instance, 32);

VC__SIZE(vc_card_limit, 256);
VC__OFFSET(vc_card_limit, memory_bytes, 48);
VC__OFFSET(vc_card_limit, cores, 64);
VC__OFFSET(vc_card_limit, minor, 80);
VC__OFFSET(vc_card_limit, context_bytes, 88);
VC__OFFSET(vc_card_limit, physical_bytes, 96);
VC__OFFSET(vc_card_limit, overhead_samples, 104);
VC__OFFSET(vc_card_limit, granted_ppm, 120);
VC__OFFSET(vc_card_limit, lease_sequence, 128);
VC__OFFSET(vc_card_limit, others_gpu_ns, 160);
VC__OFFSET(vc_card_limit, alive_ns, 176);
VC__OFFSET(vc_card_limit, closed_until_ns, 184);
VC__OFFSET(vc_card_limit, told_ns, 192);
VC__OFFSET(vc_card_limit, saved_ns, 200);
VC__OFFSET(vc_card_limit, others_still_ns, 208);
VC__OFFSET(vc_card_limit, unsaid_ns, 216);
VC__OFFSET(vc_card_limit, all_until_ns, 224);
VC__OFFSET(vc_card_limit, doubt, 240);

VC__SIZE(vc_limits, 192 + 16 * 256 + 128 * 8);
VC__OFFSET(vc_limits, sequence, 64);
VC__OFFSET(vc_limits, usage_inode, 80);
VC__OFFSET(vc_limits, arbiter_heartbeat_ns, 128);
VC__OFFSET(vc_limits, cards, 192);
VC__OFFSET(vc_limits, ended_ns, 192 + 16 * 256);

VC__SIZE(vc_card_usage, 256);
VC__OFFSET(vc_card_usage, memory_refusals, 40);
VC__OFFSET(vc_card_usage, wake_futex, 76);
VC__OFFSET(vc_card_usage, unknown_symbols, 80);
VC__OFFSET(vc_card_usage, waiting_until_ns, 96);
VC__OFFSET(vc_card_usage, oversold_allocations, 112);
VC__OFFSET(vc_card_usage, turn, 120);
VC__OFFSET(vc_card_usage, began_ns, 128);
VC__OFFSET(vc_card_usage, open_slots, 136);
VC__OFFSET(vc_card_usage, all_for_ns, 168);
VC__OFFSET(vc_card_usage, doubt, 176);
VC__OFFSET(vc_card_usage, unpaid_ns, 184);
VC__OFFSET(vc_card_usage, all_until_ns, 192);
VC__OFFSET(vc_card_usage, surprises, 200);
VC__OFFSET(vc_card_usage, beyond_ns, 208);

VC__SIZE(vc_slot_card, 128);
VC__OFFSET(vc_slot_card, gpu_ns, 32);
VC__OFFSET(vc_slot_card, generation, 64);
VC__OFFSET(vc_slot_card, oversold_bytes, 80);
VC__OFFSET(vc_slot_card, served_ns, 96);
VC__OFFSET(vc_slot_card, owed_ns, 104);

VC__SIZE(vc_slot, 128 + 16 * 128);
VC__OFFSET(vc_slot, pid, 4);
VC__OFFSET(vc_slot, flags, 48);
VC__OFFSET(vc_slot, unpaid_ns, 56);
VC__OFFSET(vc_slot, cards, 128);

VC__SIZE(vc_name, 16);

VC__SIZE(vc_paid, 256);
VC__OFFSET(vc_paid, late_gpu_ns, 240);

VC__OFFSET(vc_usage, slot_high_water, 64);
VC__OFFSET(vc_usage, limits_impossible, 88);
VC__OFFSET(vc_usage, account_damaged, 96);
VC__OFFSET(vc_usage, cards, 128);
VC__OFFSET(vc_usage, slots, 128 + 16 * 256);
VC__OFFSET(vc_usage, names, 128 + 16 * 256 + 128 * (128 + 16 * 128));
VC__OFFSET(vc_usage, paid, 128 + 16 * 256 + 128 * (128 + 16 * 128) + 6144 * 16);

_Static_assert(sizeof(struct vc_limits) <= VC_LIMITS_FILE_BYTES, "limits do not fit into their file");
_Static_assert(sizeof(struct vc_usage) <= VC_USAGE_FILE_BYTES, "usage does not fit into its file");

#undef VC__OFFSET
#undef VC__SIZE

#endif
