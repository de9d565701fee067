/* One gate with limits and usage of its own, for the programs that test its rules. */
#ifndef GATE_FIXTURE_H
#define GATE_FIXTURE_H

#include <string.h>

#include "gate/bucket.h"
#include "gate/gate.h"
#include "gate/lane.h"
#include "gate/sample.h"
#include "gate_check.h"
#include "region/abandoned.h"

static struct vc_limits limits;
static struct vc_card_usage usage;
static struct vc_slot_card slot;
static struct vc_gate gate;
static struct vc_gate_answer answer __attribute__((unused));
static bool opened __attribute__((unused));
static const uint64_t T = 1000 * MS;
extern uint64_t vc_test_ticks;

static inline void start(uint32_t cores, uint32_t core_limit, uint32_t flags)
{
    memset(&limits, 0, sizeof limits);
    memset(&usage, 0, sizeof usage);
    memset(&slot, 0, sizeof slot);
    limits.cards[0].cores = cores;
    limits.cards[0].core_limit = core_limit;
    limits.cards[0].flags = flags;
    vc_gate_init(&gate, &limits, &limits.cards[0], &usage, &slot);
}

static inline void lease(uint64_t now, uint64_t end, uint64_t clock)
{
    limits.arbiter_heartbeat_ns = now;
    limits.cards[0].granted_ppm = limits.cards[0].core_limit * 10000;
    limits.cards[0].lease_sequence = 7;
    limits.cards[0].lease_end_ns = end;
    limits.cards[0].lease_clock_ns = clock;
}

static inline enum vc_gate_reason ask(uint64_t now, uint64_t cost)
{
    vc_gate_enter(&gate, now, cost, 0, &answer);
    return answer.reason;
}

#endif
