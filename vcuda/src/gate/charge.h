/* What a process and its container are charged, and what of that others read: in the usage file, by siblings, by the arbiter.
 *
 * For the gate's own files: all of it with the gate's mutex held.
 */
#ifndef VC_GATE_CHARGE_H
#define VC_GATE_CHARGE_H

#include "gate/gate.h"

/* Charge so much; below zero: give it back. */
void vc_gate_charge(struct vc_gate *gate, int64_t ns);
/* … of which siblings charged `siblings_ns` before. */
void vc_gate_charge_beyond(struct vc_gate *gate, int64_t ns, uint64_t siblings_ns);

/* What siblings charged for us, and we while nobody looked, was for what is under way. */
void vc_gate_pay_owed(struct vc_gate *gate, struct vc_interval *interval);
/* Nobody looks: what is outstanding beyond its predicted finish has the card, as far as anybody knows. What its marks say settles that. */
void vc_gate_charge_unwatched(struct vc_gate *gate, uint64_t now_ns);

/* What is predicted now: see `packed_ns` and `later_ns`. */
static inline void vc_gate_predict(struct vc_gate *gate, uint64_t packed_ns, uint64_t later_ns)
{
    gate->packed_ns = packed_ns;
    gate->later_ns = later_ns;
    gate->finish_ns = vc_later(packed_ns, later_ns);
}

/* The container's predicted finish is the latest of its processes': lowered only by the process that set it. */
void vc_gate_publish(struct vc_gate *gate);
/* This process has work on the card, which siblings charge should it end. What is told first (publish) is until when it is paid for. Returns whether it rested before. */
bool vc_gate_open(struct vc_gate *gate);
/* … and has none any more, if so. */
void vc_gate_close_at_rest(struct vc_gate *gate, uint64_t now_ns);

#endif
