/* Where a thread of the tenant sleeps: futexes with a deadline, so that neither a dead arbiter nor a dead peer can hold it. */
#include <linux/futex.h>
#include <limits.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "gate/gate.h"
#include "base/atomic.h"
#include "base/clock.h"

static void futex_wait(const uint32_t *word, uint32_t expected, uint64_t for_ns, int flag)
{
    struct timespec timeout = {.tv_sec = (time_t)(for_ns / 1000000000u), .tv_nsec = (long)(for_ns % 1000000000u)};
    /* Woken, changed meanwhile, timed out, interrupted: all mean "ask the gate again". */
    syscall(SYS_futex, word, FUTEX_WAIT | flag, expected, &timeout, NULL, 0);
}

struct vc_gate_words vc_gate_words(const struct vc_gate *gate)
{
    return (struct vc_gate_words){vc_load_acquire(&gate->events_futex), vc_load_acquire(&gate->limit->grant_futex),
                                  vc_load_acquire(&gate->called_futex)};
}

/* Of many threads a few sleep here, or all of them would wake for what one of them gets. */
static void sleep_at_gate(struct vc_gate *gate, struct vc_gate_words words, const struct vc_gate_answer *answer, uint64_t for_ns)
{
    if (answer->no_lease && vc_load_relaxed(&gate->limit->lease_end_ns) != 0) /* until now the arbiter took it for one that uses its lease */
        vc_gate_call_arbiter(gate);
    if (answer->reason == VC_GATE_OUTSTANDING) {
        futex_wait(&gate->events_futex, words.events, for_ns, FUTEX_PRIVATE_FLAG);
        return;
    }
    if (answer->reason != VC_GATE_TURN)
        vc_gate_call_arbiter(gate);
    futex_wait(&gate->limit->grant_futex, words.grant, for_ns, 0);
}

uint64_t vc_gate_wait(struct vc_gate *gate, struct vc_gate_words words, const struct vc_gate_answer *answer)
{
    uint64_t from = vc_now_ns();
    if (answer->until_ns <= from)
        return from;
    uint64_t sleep = answer->until_ns - from;
    if (sleep > VC_RECHECK_NS)
        sleep = VC_RECHECK_NS;
    /* A stamp, not a count: a killed process stops being a waiter by itself. */
    vc_add_relaxed(&gate->waiting_threads, 1);
    bool comes = answer->reason == VC_GATE_COMES;
    if (answer->reason != VC_GATE_TURN && !comes) /* a sibling, or another thread, may be waiting for credit */
        vc_store_release(&gate->usage->refill_ns, answer->refill_ns);
    if (!answer->no_turn)
        vc_store_release(&gate->slot->waiting_until_ns, from + 2 * VC_RECHECK_NS);
    if (!answer->no_lease)
        vc_store_release(&gate->usage->waiting_until_ns, from + 2 * VC_RECHECK_NS);
    if (answer->call_next) /* whoever looked for it waits for the same word, as everybody in the container */
        syscall(SYS_futex, &gate->limit->grant_futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    if (vc_add(&gate->at_gate, 1) <= (comes ? VC_AT_GATE / 2 : VC_AT_GATE)) { /* who launches comes first */
        sleep_at_gate(gate, words, answer, sleep);
        vc_sub(&gate->at_gate, 1);
    } else {
        vc_sub(&gate->at_gate, 1);
        futex_wait(&gate->called_futex, words.called, VC_RECHECK_NS, FUTEX_PRIVATE_FLAG);
    }
    /* Waiters of other processes renew their stamp before the arbiter could miss them for long. */
    if (vc_sub(&gate->waiting_threads, 1) == 0) {
        vc_store_release(&gate->slot->waiting_until_ns, 0);
        vc_store_release(&gate->usage->waiting_until_ns, 0);
    }
    uint64_t now = vc_now_ns();
    vc_add_relaxed(&gate->usage->waited_ns, now - from);
    vc_add_relaxed(&gate->slot->waited_ns, now - from);
    return now;
}

void vc_gate_passed(struct vc_gate *gate)
{
    vc_add(&gate->called_futex, 1);
    if (vc_load(&gate->waiting_threads) > vc_load(&gate->at_gate))
        syscall(SYS_futex, &gate->called_futex, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL, NULL, 0);
}

void vc_gate_notify(struct vc_gate *gate)
{
    vc_add(&gate->events_futex, 1);
    syscall(SYS_futex, &gate->events_futex, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, INT_MAX, NULL, NULL, 0);
    if (vc_gate_refilled(gate, vc_now_ns())) /* who waits for credit sleeps at the word of grants; who just goes to sleep there misses it, once */
        syscall(SYS_futex, &gate->limit->grant_futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void vc_gate_call_heir(struct vc_gate *gate, enum vc_gate_heir heir)
{
    if (heir == VC_HEIR_SIBLING)
        syscall(SYS_futex, &gate->limit->grant_futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    if (heir == VC_HEIR_ARBITER)
        vc_gate_call_arbiter(gate);
}

void vc_gate_call_arbiter(struct vc_gate *gate)
{
    vc_add(&gate->usage->wake_futex, 1);
    syscall(SYS_futex, &gate->usage->wake_futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
