/* The bucket, the container's and the process's own counters, and the bit by which siblings find what is left. */
#include "gate/charge.h"

#include "base/atomic.h"
#include "base/clock.h"
#include "gate/bucket.h"
#include "region/abandoned.h"

void vc_gate_charge_beyond(struct vc_gate *gate, int64_t ns, uint64_t siblings_ns)
{
    vc_own_take(&gate->own, ns + (int64_t)siblings_ns);
    __atomic_add_fetch(&gate->charged_ns, (uint64_t)ns, __ATOMIC_RELAXED);
    vc_bucket_take(gate->usage, ns, gate->saved_ns);
    __atomic_add_fetch(&gate->usage->gpu_ns, (uint64_t)ns, __ATOMIC_RELAXED); /* two's complement: also refunds */
    __atomic_add_fetch(&gate->slot->gpu_ns, (uint64_t)ns, __ATOMIC_RELAXED);
    __atomic_add_fetch(&gate->slot->served_ns, (uint64_t)ns, __ATOMIC_RELAXED);
}

void vc_gate_charge(struct vc_gate *gate, int64_t ns)
{
    vc_gate_charge_beyond(gate, ns, 0);
}

/* Siblings saw us stand still, and charged the container for what we had on the card: now it is this process's charge. */
static void take_owed(struct vc_gate *gate)
{
    if (VC_LIKELY(vc_load_relaxed(&gate->slot->owed_ns) == 0))
        return;
    uint64_t owed = __atomic_exchange_n(&gate->slot->owed_ns, 0, __ATOMIC_RELAXED);
    __atomic_add_fetch(&gate->slot->gpu_ns, owed, __ATOMIC_RELAXED);
    __atomic_add_fetch(&gate->slot->served_ns, owed, __ATOMIC_RELAXED);
    __atomic_add_fetch(&gate->charged_ns, owed, __ATOMIC_RELAXED);
    gate->owed_ns += owed;
}

bool vc_gate_open(struct vc_gate *gate)
{
    if (gate->open || !gate->watched || !gate->turns.slots)
        return false;
    vc_abandoned_open(gate->usage, gate->turns.own);
    return gate->open = true;
}

static void close_after(struct vc_gate *gate, uint64_t now_ns, uint64_t rest_ns)
{
    if (!gate->open || gate->unseen != 0 || now_ns < gate->finish_ns + rest_ns)
        return;
    vc_abandoned_close(gate->usage, gate->turns.own); /* before the prediction is set back */
    gate->open = false;
    take_owed(gate);
    vc_gate_charge_beyond(gate, -(int64_t)(gate->owed_ns + gate->unwatched_ns), gate->owed_ns);
    gate->owed_ns = gate->unwatched_ns = 0;
}

void vc_gate_close_at_rest(struct vc_gate *gate, uint64_t now_ns)
{
    close_after(gate, now_ns, VC_REST_NS + 1);
}

void vc_gate_close(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    close_after(gate, now_ns, 0);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_charge_unwatched(struct vc_gate *gate, uint64_t now_ns)
{
    uint64_t since = vc_later(gate->looked_ns, gate->finish_ns);
    if (gate->unseen == 0 || now_ns <= since + VC_UNWATCHED_NS)
        return;
    vc_gate_charge(gate, (int64_t)(now_ns - since));
    gate->unwatched_ns += now_ns - since;
    gate->looked_ns = now_ns;
}

void vc_gate_publish(struct vc_gate *gate)
{
    vc_store_relaxed(&gate->slot->others_then_ns, gate->all_done ? VC_ALL_DONE : vc_load_relaxed(&gate->limit->others_gpu_ns));
    if (gate->turns.slots)
        vc_store_relaxed(&gate->turns.slots[gate->turns.own].unpaid_ns[gate->turns.card], (uint32_t)gate->unpaid_ns);
    vc_store_release(&gate->slot->predicted_finish_ns, gate->unpaid_since_ns ? vc_earlier(gate->unpaid_since_ns, gate->finish_ns) : gate->finish_ns);
    uint64_t current = vc_load_relaxed(&gate->usage->predicted_finish_ns);
    if (gate->finish_ns > current || current == gate->published_ns) {
        vc_store_release(&gate->usage->predicted_finish_ns, gate->finish_ns);
        gate->published_ns = gate->finish_ns;
    }
}

void vc_gate_pay_owed(struct vc_gate *gate, struct vc_interval *interval)
{
    take_owed(gate);
    interval->advance_ns += gate->owed_ns + gate->unwatched_ns;
    interval->siblings_ns += gate->owed_ns;
    gate->owed_ns = gate->unwatched_ns = 0;
}

uint64_t vc_gate_rest(struct vc_gate *gate, uint64_t now_ns, bool *opened)
{
    pthread_mutex_lock(&gate->mutex);
    gate->looked_ns = now_ns;
    vc_gate_close_at_rest(gate, now_ns);
    uint64_t again = !gate->open || gate->unseen != 0 ? UINT64_MAX : gate->finish_ns + VC_REST_NS + 1;
    *opened = gate->untold_open;
    gate->untold_open = false;
    pthread_mutex_unlock(&gate->mutex);
    return again;
}

bool vc_gate_is_open(struct vc_gate *gate)
{
    pthread_mutex_lock(&gate->mutex);
    bool open = gate->open;
    pthread_mutex_unlock(&gate->mutex);
    return open;
}

uint64_t vc_gate_tell(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    uint64_t since = vc_later(gate->told_at_ns, gate->busy_from_ns), passed = now_ns > since ? now_ns - since : 0;
    int64_t settled = gate->own.taken_ns - (int64_t)gate->unwatched_ns; /* who looks first may have no clock yet */
    uint64_t taken = settled > 0 ? (uint64_t)settled : 0;
    gate->told_ns = vc_later(gate->told_ns, vc_earlier(taken, gate->told_ns + passed));
    gate->told_at_ns = now_ns;
    uint64_t told = gate->told_ns;
    pthread_mutex_unlock(&gate->mutex);
    return told;
}

void vc_gate_owe(struct vc_gate *gate, uint64_t ns, uint64_t dead_ns)
{
    if (gate->paid)
        vc_add_relaxed(&gate->paid->late_gpu_ns, dead_ns);
    vc_bucket_take(gate->usage, (int64_t)ns, VC_SAVED_NS);
    __atomic_add_fetch(&gate->usage->gpu_ns, ns, __ATOMIC_RELAXED);
}
