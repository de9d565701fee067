/* Work whose process stopped or ended before it was paid for: the others of its container pay.
 *
 * A process sets its bit in vc_card_usage.open_slots while it has work on the card whose end nobody has seen. Its slot's
 * predicted_finish_ns says until when that is paid for, but for the last unpaid_ns; as long as the process runs its helper moves it on, or takes the bit away.
 * Who finds it standing still charges the time that passed and moves it on instead. No lock; what is lost where a process is killed
 * between two steps is one such charge.
 */
#ifndef VC_ABANDONED_H
#define VC_ABANDONED_H

#include <stdbool.h>
#include <stdint.h>

#include "region/abi.h"

enum {
    VC_ABANDONED_AFTER_NS = 10000000, /* a helper that runs is never so late … on a quiet machine; else its process has it settled later */
    VC_ABANDONED_UNPROBED_NS = 100000000, /* so long what passes waits for who asks the card; else all of it is charged */
    VC_ABANDONED_UNKNOWN_NS = 1000000000, /* without an arbiter nobody knows when a process ended: at most so much later */
};
/* Nobody sees a stopped process's work end: so much is charged until it runs again, or its container would wait for ever. */
#define VC_ABANDONED_MOST_NS UINT64_C(5000000000)

/* In vc_slot_card.others_then_ns: the process waited for all that it had on the card, and launched nothing since. */
#define VC_ALL_DONE UINT64_MAX

void vc_abandoned_open(struct vc_card_usage *usage, uint32_t slot);
void vc_abandoned_close(struct vc_card_usage *usage, uint32_t slot);

static inline bool vc_abandoned_is_open(const struct vc_card_usage *usage, uint32_t slot)
{
    return __atomic_load_n(&usage->open_slots[slot / 64], __ATOMIC_ACQUIRE) >> slot % 64 & 1;
}

/* Processes that stand still, or ended, at the same time have the card in turns, with those that go on: what passes is charged once. That time is charged
 * to somebody now; returns what of it was not before. The container remembers the latest stretches: of one that ended it is known later than what others, which
 * began behind it, were charged meanwhile. */
uint64_t vc_abandoned_cover(struct vc_paid *paid, uint64_t from_ns, uint64_t until_ns);

/* Until when a stopped process is to be charged now, if until `known_ns` it is known that it has to be. */
uint64_t vc_abandoned_known_until(const struct vc_usage *usage, uint32_t card, uint32_t slot, uint64_t known_ns, uint64_t now_ns);

/* The card was free at `free_ns`: what slot `slot` has not paid for until then it did not have. Nothing where it waited for all that it had. */
void vc_abandoned_excuse(const struct vc_limits *limits, struct vc_usage *usage, uint32_t card, uint32_t slot, uint64_t free_ns);

/* Take over what slot `slot` has not paid for until `now_ns`, or until its process ended (`gone`); returns the GPU time to be charged. */
uint64_t vc_abandoned_take(const struct vc_limits *limits, struct vc_usage *usage, uint32_t card, uint32_t slot, uint64_t now_ns,
                           bool gone);

#endif
