/* Whether an operation may start: the bucket, the lease, whose turn it is, and how much work may be outstanding. */
#include <string.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "gate/bucket.h"
#include "gate/charge.h"
#include "gate/gate.h"

static void refuse(struct vc_gate_answer *answer, enum vc_gate_reason reason, uint64_t until_ns)
{
    answer->reason = reason;
    answer->until_ns = until_ns;
}

/* Nothing has been seen to end for so long that waiting for it could be a dead-lock: the work on the card may itself be
 * waiting for what we hold back. Then one more operation goes, and the next one waits longer. */
static bool stalled(const struct vc_gate *gate, uint64_t now_ns)
{
    return now_ns >= gate->progress_ns + VC_STALL_NS * (uint64_t)(1 + gate->unseen);
}

/* All that is outstanding waits for something that is not the card, as the helper saw just now: with several such streams there is always something outstanding. */
static bool all_waits(const struct vc_gate *gate, uint64_t now_ns)
{
    bool lately = now_ns < gate->looked_ns + VC_LOOKS_NS, on_card = now_ns < vc_load_relaxed(&gate->on_card_ns) + VC_LOOKS_NS;
    return gate->unknown == 0 && gate->packed_ns <= now_ns && lately && !on_card;
}

/* What is new runs alone for so long, and more of it is expected so soon; then others go on for as long as they were held. */
static const uint64_t ALONE_NS = 3000000, ALONE_NEXT_NS = 200000;

/* One of unknown cost waits for what others launched: these don't launch more meanwhile, or it would wait for good beside busy threads. But what it waits for may wait for them. */
static void hold_others(struct vc_gate *gate, uint64_t now_ns, const struct vc_policy *policy, uint64_t until_ns)
{
    if (policy->leased && !policy->holder)
        return;
    if (now_ns >= gate->alone_ends_ns + (gate->alone_ends_ns - gate->alone_since_ns)) {
        gate->alone_since_ns = now_ns;
        gate->alone_ends_ns = now_ns + VC_STALL_NS;
    }
    gate->alone_until_ns = vc_earlier(until_ns, gate->alone_ends_ns);
}

/* It begins. */
static void runs_alone(struct vc_gate *gate, uint64_t now_ns)
{
    if (now_ns >= gate->alone_until_ns) /* nobody was held for it */
        return;
    gate->alone_ends_ns = vc_earlier(gate->alone_ends_ns, now_ns + ALONE_NS);
    gate->alone_until_ns = vc_earlier(now_ns + ALONE_NEXT_NS, gate->alone_ends_ns);
}

/* After the bucket ran dry, resume with a whole chunk instead of one operation at a time: under leases with what others leave time for, else with what flows in within so long, or so many
 * operations. All of them may suddenly take a thousand times as long. */
static const uint64_t CHUNK_FLOWS_IN_NS = 1000000, CHUNK_LEAST_NS = 150000, CHUNK_OPERATIONS = 4;

static int64_t chunk(uint64_t cost_ns, const struct vc_policy *policy)
{
    uint64_t flows_in = vc_later(CHUNK_FLOWS_IN_NS * policy->rate_ppm / VC_PPM, CHUNK_LEAST_NS);
    uint64_t ns = policy->leased ? vc_later(cost_ns, 100000) * 20 : vc_later(CHUNK_OPERATIONS * cost_ns, flows_in);
    return (int64_t)vc_earlier(ns, VC_CHUNK_NS);
}

static bool credit_refused(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, const struct vc_policy *policy,
                           int64_t *credit, struct vc_gate_answer *answer)
{
    gate->saved_ns = policy->saved_ns;
    *credit = vc_bucket_fill(gate->usage, now_ns, policy->rate_ppm, policy->saved_ns);
    /* Whatever the credit says, which lies where the tenant can write. */
    uint32_t own_rate = vc_load_relaxed(&gate->untold) ? policy->rate_ppm / VC_MAX_SLOTS : policy->rate_ppm;
    uint64_t closed_until = vc_later(policy->closed_until_ns, now_ns + vc_own_fill(&gate->own, now_ns, own_rate, policy->saved_ns));
    if (closed_until > now_ns) {
        refuse(answer, VC_GATE_CREDIT, closed_until);
        return true;
    }
    if (*credit > 0 && *credit >= gate->refill_ns) {
        gate->refill_ns = 0;
        return false;
    }
    if (gate->refill_ns == 0)
        gate->refill_ns = chunk(cost_ns, policy);
    answer->refill_ns = gate->refill_ns;
    refuse(answer, VC_GATE_CREDIT, now_ns + vc_bucket_wait_ns(*credit, gate->refill_ns, policy->rate_ppm) + 1);
    return true;
}

/* How much work may be outstanding. A tenant that just came from idle runs its request without sleeping in between, as long
 * as nobody waits for the card: every sleep would be a chance to be woken late. A greedy one is never idle. */
static uint64_t ahead_of(const struct vc_gate *gate, const struct vc_policy *policy)
{
    uint64_t burst = gate->launched_ns - gate->idle_ns;
    return policy->lease_end_ns == UINT64_MAX && burst < VC_BURST_NS ? VC_BURST_NS : VC_AHEAD_NS;
}

/* Of several active processes one uses the lease; its turn ends like a lease, if a sibling waits for it. */
static bool turn_refused(struct vc_gate *gate, uint64_t now_ns, struct vc_policy *policy, struct vc_gate_answer *answer)
{
    struct vc_turn turn = vc_turn_take(&gate->turns, now_ns, policy->lease_start_ns, policy->lease_end_ns);
    if (!turn.mine) {
        refuse(answer, VC_GATE_TURN, turn.end_ns);
        answer->call_next = turn.call_next;
        return true;
    }
    policy->turn_wanted = turn.siblings_wait;
    policy->turn_ends_first = turn.siblings_wait && turn.end_ns < policy->lease_end_ns;
    if (policy->turn_ends_first)
        policy->lease_end_ns = turn.end_ns;
    policy->queue_end_ns = turn.clock_ns;
    return false;
}

/* Nothing was launched in this lease yet: what is outstanding was launched in the one before, and ends within this one. */
static bool begins_with(const struct vc_gate *gate, const struct vc_policy *policy)
{
    return gate->finish_ns < policy->lease_end_ns && vc_load_relaxed(&gate->usage->last_active_ns) < policy->lease_start_ns;
}

/* When the card can begin with it: while what other streams launched waits for something else, it has nothing else to do. */
static uint64_t starts_at(const struct vc_gate *gate, uint64_t ready_ns)
{
    return vc_later(gate->packed_ns, ready_ns);
}

/* The lease holder keeps the card fed, but never so full that it runs far into the next tenant's time. */
static bool lease_refused(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t ready_ns, const struct vc_policy *policy,
                          bool nothing_outstanding, struct vc_gate_answer *answer)
{
    if (!policy->holder) {
        refuse(answer, VC_GATE_LEASE, now_ns + VC_RECHECK_NS);
        return true;
    }
    uint64_t half = cost_ns / 2, start = starts_at(gate, ready_ns);
    bool over = now_ns >= policy->lease_end_ns; /* the arbiter may wait until the card is idle */
    if (nothing_outstanding && !over)
        return false;
    if (policy->lease_end_ns != UINT64_MAX && (over || start + half > policy->lease_end_ns)) {
        if (!over && begins_with(gate, policy)) { /* what is longer than a lease begins with it */
            refuse(answer, VC_GATE_OUTSTANDING, gate->unseen ? now_ns + VC_RECHECK_NS : gate->finish_ns);
            return true;
        }
        bool turn = policy->turn_ends_first;
        refuse(answer, turn ? VC_GATE_TURN : VC_GATE_LEASE, now_ns + VC_RECHECK_NS);
        answer->call_next = turn && vc_turn_shorten(&gate->turns, now_ns, gate->finish_ns);
        answer->refill_ns = turn ? 0 : VC_NOTHING_FITS;
        return true;
    }
    uint64_t outstanding = start > now_ns ? start - now_ns : 0;
    uint64_t ahead = ahead_of(gate, policy);
    if (outstanding + half > ahead && outstanding > VC_AHEAD_LOW_NS) {
        uint64_t keep = half < VC_AHEAD_NS / 2 ? VC_AHEAD_NS / 2 : half < VC_AHEAD_NS ? VC_AHEAD_NS - half : 0;
        refuse(answer, VC_GATE_OUTSTANDING, start - vc_later(keep, VC_AHEAD_LOW_NS));
        answer->no_turn = ready_ns != 0 && gate->packed_ns <= now_ns;
        return true;
    }
    return false;
}

/* What begins at any time begins behind a slice of a sibling that has the turn by then. */
static const uint64_t ANOTHERS_SLICE_NS = 2100000;

/* Its next operation does not fit into what is left of the lease: a sibling's may. */
static bool leaves_rest(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t ready_ns, const struct vc_policy *policy, bool nothing_outstanding, struct vc_gate_answer *answer)
{
    uint64_t slice = ready_ns != 0 ? ANOTHERS_SLICE_NS : 0;
    bool fits = policy->lease_end_ns == UINT64_MAX || now_ns >= policy->lease_end_ns || starts_at(gate, ready_ns) + slice + cost_ns / 2 <= policy->lease_end_ns;
    if (ready_ns != 0 && gate->unseen > 1 && vc_turn_siblings_busy(&gate->turns, now_ns) != 0) { /* it would run in others' leases */
        refuse(answer, VC_GATE_OUTSTANDING, now_ns + VC_RECHECK_NS);
        return answer->no_turn = true;
    }
    if (fits || (nothing_outstanding && ready_ns == 0) || begins_with(gate, policy) || vc_turn_siblings_wait(&gate->turns, now_ns) == 0)
        return false;
    refuse(answer, VC_GATE_TURN, now_ns + VC_RECHECK_NS);
    answer->no_turn = true;
    answer->call_next = vc_turn_is_anybodys(&gate->turns, now_ns, gate->packed_ns - vc_earlier(VC_TURN_LEAD_NS, gate->packed_ns));
    return true;
}

/* Streams that were seen to do so are believed to do so in their next bursts, too, of which the first begins alone. */
static const uint64_t BESIDE_KEPT_NS = 100000000;

bool vc_gate_beside(const struct vc_gate *gate, uint64_t now_ns)
{
    uint64_t until = vc_load_relaxed(&gate->beside_until_ns);
    return until != 0 && now_ns < until + BESIDE_KEPT_NS;
}

/* Work is overdue, so the estimates are wrong, and what else is launched may take as long. While others wait their slices explain it. Whoever is at its limit loses nothing by waiting until
 * what should have been done is seen to be. */
static bool is_late(const struct vc_gate *gate, uint64_t now_ns, int64_t credit, const struct vc_policy *policy)
{
    if (policy->leased)
        return policy->lease_end_ns == UINT64_MAX && gate->late_since_ns != 0 && now_ns > gate->late_since_ns + VC_LATE_NS;
    bool dry = credit < VC_BUCKET_NS / 2;
    uint64_t since = gate->late_since_ns != 0 ? gate->late_since_ns : dry ? gate->finish_ns : now_ns;
    return now_ns > since + (dry ? VC_LATE_DRY_NS : VC_LATE_NS);
}

/* What was launched is believed to be what the estimates say only so far: then its end must be seen, whoever limits it. */
static uint64_t most_unseen(const struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, const struct vc_policy *policy)
{
    if (!policy->leased)
        return VC_BUCKET_NS;
    uint64_t most = vc_later(VC_UNSEEN_NS, ahead_of(gate, policy));
    if (policy->together || vc_gate_beside(gate, now_ns)) /* what runs beside others is seen late */
        return most;
    return vc_earlier(most, vc_later(VC_UNSEEN_TIMES * cost_ns, VC_UNSEEN_LEAST_NS));
}

static bool unseen_refused(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, int64_t credit,
                           const struct vc_policy *policy, struct vc_gate_answer *answer)
{
    if (gate->unseen == 0 || stalled(gate, now_ns))
        return false;
    uint64_t unseen = gate->launched_ns - gate->seen_ns, most = most_unseen(gate, now_ns, cost_ns, policy);
    bool many = gate->unseen >= VC_UNSEEN_MARKS;
    if (!is_late(gate, now_ns, credit, policy) && !many && !(unseen > most && unseen > cost_ns) && !(risk_ns != 0 && gate->risk_ns + risk_ns > VC_RISK_NS && gate->risk_ns != 0))
        return false;
    refuse(answer, VC_GATE_OUTSTANDING, now_ns + VC_RECHECK_NS);
    return true;
}

static uint64_t allowance(const struct vc_gate *gate, uint64_t now_ns, uint64_t ready_ns, int64_t credit, const struct vc_policy *policy)
{
    if (credit <= 0)
        return 0;
    uint64_t most = vc_earlier(VC_CHUNK_NS, (uint64_t)credit / 2);
    if (!policy->leased)
        return most;
    most = vc_earlier(most, VC_CHUNK_NS / 4);
    uint64_t limit = now_ns + ahead_of(gate, policy);
    if (policy->lease_end_ns < limit)
        limit = policy->lease_end_ns;
    uint64_t start = starts_at(gate, ready_ns);
    return start < limit ? vc_earlier(most, limit - start) : 0;
}

/* Between the gate and the driver a launch takes no longer, unless its thread is held up. */
static const uint64_t HELD_UP_NS = 50000;

static void launch(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t ready_ns, int64_t credit, bool nothing_outstanding,
                   const struct vc_policy *policy, struct vc_gate_answer *answer)
{
    uint64_t start = now_ns + VC_LAUNCH_GAP_NS;
    /* A new holder's work queues behind what its predecessor left on the card. */
    if (policy->leased && policy->lease_end_ns != UINT64_MAX && !policy->together)
        start = vc_later(start, vc_earlier(policy->lease_clock_ns, now_ns + VC_AHEAD_NS));
    start = vc_later(start, vc_earlier(policy->queue_end_ns, now_ns + VC_AHEAD_NS));
    if (nothing_outstanding || stalled(gate, now_ns))
        gate->progress_ns = now_ns;
    if (nothing_outstanding) {
        gate->begins++;
        gate->idle_ns = gate->launched_ns;
    }
    if (gate->unseen == 0)
        gate->looked_ns = now_ns;
    if (nothing_outstanding && now_ns > gate->finish_ns + VC_MARK_NS)
        gate->busy_from_ns = now_ns;
    if (VC_UNLIKELY(vc_load_relaxed(&gate->usage->refill_ns) == VC_HAS_LEFT))
        vc_store_relaxed(&gate->usage->refill_ns, 0);
    answer->joins_until_ns = gate->finish_ns > now_ns ? gate->finish_ns : 0;
    bool waits = ready_ns != 0 && cost_ns != 0 && cost_ns <= VC_CONCURRENT_NS && gate->packed_ns <= now_ns;
    uint64_t later = ready_ns != 0 ? vc_later(ready_ns, start) + cost_ns : 0;
    vc_gate_predict(gate, vc_later(gate->packed_ns, start) + cost_ns, vc_later(gate->later_ns, later));
    vc_gate_charge(gate, (int64_t)cost_ns);
    credit -= (int64_t)cost_ns;
    bool alone = cost_ns == 0 && !policy->shared; /* nothing is to be launched beside what was never measured, so who is killed meanwhile loses no permit */
    uint64_t more = alone || vc_load_relaxed(&gate->unwatched) ? 0 : allowance(gate, now_ns, later, credit, policy);
    answer->reason = VC_GATE_GO;
    answer->allowance_ns = more;
    answer->permit_until_ns = policy->lease_end_ns;
    answer->sequence = policy->lease_sequence;
    answer->from_idle = nothing_outstanding;
    answer->mark_ns = most_unseen(gate, now_ns, cost_ns, policy) <= VC_UNSEEN_LEAST_NS ? VC_MARK_NS / 2 : VC_MARK_NS; /* one is seen before the card has done the rest */
    answer->closing = credit <= 0 || (policy->leased && more == 0);
    vc_gate_charge(gate, (int64_t)more);
    vc_gate_predict(gate, gate->packed_ns + more, gate->later_ns);
    if (policy->turn_wanted && waits) /* till then siblings may have the card: what is so short does not matter in their intervals */
        answer->call_next = vc_turn_is_anybodys(&gate->turns, now_ns, gate->packed_ns - more);
    gate->launched_ns += cost_ns + more;
    gate->unknown += cost_ns == 0;
    if (cost_ns == 0)
        runs_alone(gate, now_ns);
    if (cost_ns == 0 && policy->leased) /* nobody else could know that it lasts, should this process stop */
        vc_store_relaxed(&gate->usage->began_ns, VC_UNTOLD | now_ns);
    gate->all_done = false;
    vc_store_relaxed(&gate->usage->last_active_ns, now_ns);
    answer->asked_ns = now_ns;
    answer->finish_ns = gate->finish_ns;
    vc_gate_publish(gate);
    answer->opened = vc_gate_open(gate);
}

void vc_gate_hands_over(struct vc_gate *gate, uint64_t now_ns, const struct vc_gate_answer *answer)
{
    if (VC_LIKELY(!answer->from_idle || now_ns < answer->asked_ns + HELD_UP_NS))
        return;
    pthread_mutex_lock(&gate->mutex);
    if (gate->finish_ns == answer->finish_ns && gate->unseen == 0) { /* else another thread has launched meanwhile, or what was left was marked */
        vc_gate_predict(gate, gate->packed_ns + now_ns - answer->asked_ns, gate->later_ns);
        vc_gate_publish(gate);
    }
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_enter(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, struct vc_gate_answer *answer)
{
    vc_gate_enter_behind(gate, now_ns, cost_ns, risk_ns, 0, answer);
}

void vc_gate_enter_behind(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, uint64_t ready_ns, struct vc_gate_answer *answer)
{
    memset(answer, 0, sizeof *answer);
    pthread_mutex_lock(&gate->mutex);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    answer->impossible = policy.impossible;
    vc_gate_charge_unwatched(gate, now_ns);
    if (VC_UNLIKELY(gate->visited_ns != 0)) {
        bool away = now_ns >= gate->visited_ns + VC_MARK_NS;
        vc_store_relaxed(&gate->visits, away ? (uint32_t)vc_earlier(gate->visits + 1, VC_VISITS) : 0); /* lanes read it without the lock */
        gate->visited_ns = 0;
    }
    bool nothing_outstanding = gate->finish_ns <= now_ns && gate->unseen == 0;
    int64_t credit = 0;
    bool refused = false;
    if (cost_ns == 0 && !nothing_outstanding && !all_waits(gate, now_ns) && !stalled(gate, now_ns)) {
        /* One operation of unknown cost at a time, alone, so that its interval is its own. */
        refuse(answer, VC_GATE_OUTSTANDING, gate->unseen ? now_ns + VC_RECHECK_NS : gate->finish_ns);
        hold_others(gate, now_ns, &policy, answer->until_ns);
        refused = true;
    }
    if (VC_UNLIKELY(cost_ns != 0 && now_ns < gate->alone_until_ns)) {
        refuse(answer, VC_GATE_OUTSTANDING, gate->alone_until_ns);
        refused = true;
    }
    if (!refused && VC_UNLIKELY(vc_probe_holds(&gate->probe, now_ns, nothing_outstanding)) && (nothing_outstanding || !stalled(gate, now_ns))) {
        refuse(answer, VC_GATE_OUTSTANDING, now_ns + VC_MARK_NS);
        refused = true;
    }
    /* Before the credit: else whoever is awake spends what its siblings wait for. */
    refused = refused || (policy.holder && leaves_rest(gate, now_ns, cost_ns, ready_ns, &policy, nothing_outstanding, answer));
    refused = refused || (policy.holder && turn_refused(gate, now_ns, &policy, answer));
    refused = refused || credit_refused(gate, now_ns, cost_ns, &policy, &credit, answer);
    answer->no_lease = !refused && policy.leased && all_waits(gate, now_ns) && unseen_refused(gate, now_ns, cost_ns, risk_ns, credit, &policy, answer);
    refused = refused || answer->no_lease;
    refused = refused || (policy.leased && lease_refused(gate, now_ns, cost_ns, ready_ns, &policy, nothing_outstanding, answer));
    refused = refused || unseen_refused(gate, now_ns, cost_ns, risk_ns, credit, &policy, answer);
    if (!refused) {
        launch(gate, now_ns, cost_ns, ready_ns, credit, nothing_outstanding, &policy, answer);
        gate->risk_ns += risk_ns;
    }
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_launched_unasked(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, struct vc_gate_answer *answer)
{
    memset(answer, 0, sizeof *answer);
    pthread_mutex_lock(&gate->mutex);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    launch(gate, now_ns, cost_ns, 0, 0, gate->finish_ns <= now_ns && gate->unseen == 0, &policy, answer);
    gate->untold_open |= answer->opened;
    gate->risk_ns += risk_ns;
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_fold(struct vc_gate *gate, uint64_t allowance_ns, uint64_t used_ns)
{
    if (used_ns >= allowance_ns)
        return;
    uint64_t rest = allowance_ns - used_ns;
    pthread_mutex_lock(&gate->mutex);
    vc_gate_charge(gate, -(int64_t)rest);
    gate->launched_ns -= rest;
    vc_store_relaxed(&gate->seen_ns, vc_earlier(gate->seen_ns, gate->launched_ns)); /* a mark of another lane's counted it */
    gate->idle_ns = vc_earlier(gate->idle_ns, gate->launched_ns);
    vc_gate_predict(gate, gate->packed_ns - vc_earlier(rest, gate->packed_ns), gate->later_ns);
    vc_gate_publish(gate);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_undo(struct vc_gate *gate, uint64_t cost_ns, uint64_t risk_ns)
{
    pthread_mutex_lock(&gate->mutex);
    gate->risk_ns -= vc_earlier(risk_ns, gate->risk_ns);
    gate->unknown -= cost_ns == 0 && gate->unknown != 0;
    pthread_mutex_unlock(&gate->mutex);
    vc_gate_fold(gate, cost_ns, 0);
}

bool vc_gate_refilled(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    bool refilled = !vc_gate_policy(gate, now_ns).leased && gate->refill_ns != 0 && vc_load_relaxed(&gate->usage->credit_ns) >= gate->refill_ns;
    pthread_mutex_unlock(&gate->mutex);
    return refilled;
}
