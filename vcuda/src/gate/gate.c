/* Rules of the gate: the bucket, the lease, how much work may be outstanding, and what is settled when its end is seen. */
#include "gate/gate.h"

#include <string.h>

#include "gate/bucket.h"
#include "base/atomic.h"
#include "base/clock.h"
#include "region/abandoned.h"
#include "region/share.h"

static const uint64_t OVERDUE_STEP_NS = 200000;
/* What has not begun for long keeps nobody else from the card: the arbiter takes its lease. */
static const uint64_t IDLE_SINCE_NS = 300000;

void vc_gate_init(struct vc_gate *gate, const struct vc_limits *limits, const struct vc_card_limit *limit,
                  struct vc_card_usage *usage, struct vc_slot_card *slot)
{
    memset(gate, 0, sizeof *gate);
    pthread_mutex_init(&gate->mutex, NULL);
    gate->limits = limits;
    gate->limit = limit;
    gate->usage = usage;
    gate->slot = slot;
    gate->believed_ns = VC_BELIEVED_NS;
}

/* --- policy --- */

struct vc_policy vc_gate_policy(const struct vc_gate *gate, uint64_t now_ns)
{
    const struct vc_card_limit *limit = gate->limit;
    struct vc_policy policy = {
        .gated = vc_gate_needed(limit),
        .impossible = !vc_share_possible(gate->limits, limit),
        .shared = vc_load_relaxed(&limit->flags) & VC_CARD_SHARED,
        .arbitrated = !gate->alone && vc_share_arbitrated(gate->limits, now_ns),
        .lease_end_ns = UINT64_MAX,
    };
    policy.rate_ppm = vc_share_rate_ppm(limit, policy.arbitrated, policy.impossible);
    if (!policy.arbitrated)
        return policy;
    policy.closed_until_ns = vc_load_relaxed(&limit->closed_until_ns);
    policy.saved_ns = vc_earlier(vc_load_relaxed(&limit->saved_ns), VC_SAVED_NS);
    policy.lease_sequence = vc_load_acquire(&limit->lease_sequence);
    policy.leased = policy.shared && policy.lease_sequence != 0;
    if (policy.leased) {
        policy.lease_end_ns = vc_load_acquire(&limit->lease_end_ns);
        policy.lease_start_ns = vc_load_relaxed(&limit->lease_start_ns);
        policy.lease_clock_ns = vc_load_relaxed(&limit->lease_clock_ns);
        policy.holder = policy.lease_end_ns != 0;
        policy.together = policy.lease_sequence & VC_LEASE_TOGETHER;
    }
    return policy;
}

/* --- may it start? --- */

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

/* After the bucket ran dry, resume with a whole chunk instead of one operation at a time. */
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
    if (gate->refill_ns == 0) {
        uint64_t chunk = vc_later(cost_ns, 100000) * 20;
        gate->refill_ns = (int64_t)vc_earlier(chunk, VC_CHUNK_NS);
    }
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
    policy->turn_ends_first = turn.siblings_wait && turn.end_ns < policy->lease_end_ns;
    if (policy->turn_ends_first)
        policy->lease_end_ns = turn.end_ns;
    policy->queue_end_ns = turn.clock_ns;
    return false;
}

/* The lease holder keeps the card fed, but never so full that it runs far into the next tenant's time. */
static bool lease_refused(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, const struct vc_policy *policy,
                          bool nothing_outstanding, struct vc_gate_answer *answer)
{
    if (!policy->holder) {
        refuse(answer, VC_GATE_LEASE, now_ns + VC_RECHECK_NS);
        return true;
    }
    if (nothing_outstanding)
        return false;
    uint64_t half = cost_ns / 2;
    if (policy->lease_end_ns != UINT64_MAX && gate->finish_ns + half > policy->lease_end_ns) {
        bool turn = policy->turn_ends_first;
        refuse(answer, turn ? VC_GATE_TURN : VC_GATE_LEASE, now_ns + VC_RECHECK_NS);
        answer->call_next = turn && vc_turn_shorten(&gate->turns, now_ns, gate->finish_ns);
        answer->refill_ns = turn ? 0 : VC_NOTHING_FITS;
        return true;
    }
    uint64_t outstanding = gate->finish_ns > now_ns ? gate->finish_ns - now_ns : 0;
    uint64_t ahead = ahead_of(gate, policy);
    if (outstanding + half > ahead && outstanding > VC_AHEAD_LOW_NS) {
        uint64_t keep = half < VC_AHEAD_NS / 2 ? VC_AHEAD_NS / 2 : half < VC_AHEAD_NS ? VC_AHEAD_NS - half : 0;
        refuse(answer, VC_GATE_OUTSTANDING, gate->finish_ns - vc_later(keep, VC_AHEAD_LOW_NS));
        return true;
    }
    return false;
}

/* Streams that were seen to do so are believed to do so in their next bursts, too, of which the first begins alone. */
static const uint64_t BESIDE_KEPT_NS = 100000000;

bool vc_gate_beside(const struct vc_gate *gate, uint64_t now_ns)
{
    uint64_t until = vc_load_relaxed(&gate->beside_until_ns);
    return until != 0 && now_ns < until + BESIDE_KEPT_NS;
}

/* What was launched is believed to be what the estimates say only so far: then its end must be seen, whoever limits it. */
static bool unseen_refused(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns,
                           const struct vc_policy *policy, struct vc_gate_answer *answer)
{
    if (gate->unseen == 0 || stalled(gate, now_ns))
        return false;
    uint64_t unseen = gate->launched_ns - gate->seen_ns;
    uint64_t most = policy->leased ? vc_later(VC_UNSEEN_NS, ahead_of(gate, policy)) : VC_BUCKET_NS;
    if (policy->leased && !policy->together && !vc_gate_beside(gate, now_ns)) /* what runs beside others is seen late */
        most = vc_earlier(most, vc_later(VC_UNSEEN_TIMES * cost_ns, VC_UNSEEN_LEAST_NS));
    bool contended = policy->leased && policy->lease_end_ns != UINT64_MAX; /* then others' slices explain it */
    bool late = !contended && gate->late_since_ns != 0 && now_ns > gate->late_since_ns + VC_LATE_NS;
    bool many = gate->unseen >= VC_UNSEEN_MARKS;
    if (!late && !many && !(unseen > most && unseen > cost_ns) && !(risk_ns != 0 && gate->risk_ns + risk_ns > VC_RISK_NS && gate->risk_ns != 0))
        return false;
    refuse(answer, VC_GATE_OUTSTANDING, now_ns + VC_RECHECK_NS);
    return true;
}

/* `siblings_ns` of it were charged by siblings before. */
static void account_beyond(struct vc_gate *gate, int64_t ns, uint64_t siblings_ns)
{
    vc_own_take(&gate->own, ns + (int64_t)siblings_ns);
    __atomic_add_fetch(&gate->charged_ns, (uint64_t)ns, __ATOMIC_RELAXED);
    vc_bucket_take(gate->usage, ns, gate->saved_ns);
    __atomic_add_fetch(&gate->usage->gpu_ns, (uint64_t)ns, __ATOMIC_RELAXED); /* two's complement: also refunds */
    __atomic_add_fetch(&gate->slot->gpu_ns, (uint64_t)ns, __ATOMIC_RELAXED);
    __atomic_add_fetch(&gate->slot->served_ns, (uint64_t)ns, __ATOMIC_RELAXED);
}

static void account(struct vc_gate *gate, int64_t ns)
{
    account_beyond(gate, ns, 0);
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

/* What is told first (publish) is until when it is paid for. */
static bool open_gate(struct vc_gate *gate)
{
    if (gate->open || !gate->watched || !gate->turns.slots)
        return false;
    vc_abandoned_open(gate->usage, gate->turns.own);
    return gate->open = true;
}

/* The bit goes before the prediction is set back. */
static void close_gate(struct vc_gate *gate)
{
    if (!gate->open)
        return;
    vc_abandoned_close(gate->usage, gate->turns.own);
    gate->open = false;
    take_owed(gate);
    account_beyond(gate, -(int64_t)(gate->owed_ns + gate->unwatched_ns), gate->owed_ns);
    gate->owed_ns = gate->unwatched_ns = 0;
}

static bool rests(const struct vc_gate *gate, uint64_t now_ns)
{
    return gate->unseen == 0 && now_ns > gate->finish_ns + VC_REST_NS;
}

/* Nobody looks: what is outstanding beyond its predicted finish has the card, as far as anybody knows. What its marks say settles that. */
static void charge_unwatched(struct vc_gate *gate, uint64_t now_ns)
{
    uint64_t since = vc_later(gate->looked_ns, gate->finish_ns);
    if (gate->unseen == 0 || now_ns <= since + VC_UNWATCHED_NS)
        return;
    account(gate, (int64_t)(now_ns - since));
    gate->unwatched_ns += now_ns - since;
    gate->looked_ns = now_ns;
}

/* The container's predicted finish is the latest of its processes': lowered only by the process that set it. */
static void publish(struct vc_gate *gate)
{
    vc_store_relaxed(&gate->slot->others_then_ns, gate->all_done ? VC_ALL_DONE : vc_load_relaxed(&gate->limit->others_gpu_ns));
    vc_store_release(&gate->slot->predicted_finish_ns, gate->unpaid_since_ns ? vc_earlier(gate->unpaid_since_ns, gate->finish_ns) : gate->finish_ns);
    uint64_t current = vc_load_relaxed(&gate->usage->predicted_finish_ns);
    if (gate->finish_ns > current || current == gate->published_ns) {
        vc_store_release(&gate->usage->predicted_finish_ns, gate->finish_ns);
        gate->published_ns = gate->finish_ns;
    }
}

static uint64_t allowance(const struct vc_gate *gate, uint64_t now_ns, int64_t credit, const struct vc_policy *policy)
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
    return gate->finish_ns < limit ? vc_earlier(most, limit - gate->finish_ns) : 0;
}

static void launch(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, int64_t credit, bool nothing_outstanding,
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
        gate->gaps_ns = 0;
    }
    if (gate->unseen == 0)
        gate->looked_ns = now_ns;
    if (nothing_outstanding && now_ns > gate->finish_ns + VC_MARK_NS)
        gate->busy_from_ns = now_ns;
    answer->joins_until_ns = gate->finish_ns > now_ns ? gate->finish_ns : 0;
    gate->finish_ns = vc_later(gate->finish_ns, start) + cost_ns;
    account(gate, (int64_t)cost_ns);
    credit -= (int64_t)cost_ns;
    bool alone = cost_ns == 0 && !policy->shared; /* nothing is to be launched beside what was never measured, so who is killed meanwhile loses no permit */
    uint64_t more = alone || vc_load_relaxed(&gate->unwatched) ? 0 : allowance(gate, now_ns, credit, policy);
    answer->reason = VC_GATE_GO;
    answer->allowance_ns = more;
    answer->permit_until_ns = policy->lease_end_ns;
    answer->sequence = policy->lease_sequence;
    answer->from_idle = nothing_outstanding;
    answer->closing = credit <= 0 || (policy->leased && more == 0);
    account(gate, (int64_t)more);
    gate->finish_ns += more;
    gate->launched_ns += cost_ns + more;
    gate->unknown += cost_ns == 0;
    gate->all_done = false;
    vc_store_relaxed(&gate->usage->last_active_ns, now_ns);
    publish(gate);
    answer->opened = open_gate(gate);
}

void vc_gate_enter(struct vc_gate *gate, uint64_t now_ns, uint64_t cost_ns, uint64_t risk_ns, struct vc_gate_answer *answer)
{
    memset(answer, 0, sizeof *answer);
    pthread_mutex_lock(&gate->mutex);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    answer->impossible = policy.impossible;
    charge_unwatched(gate, now_ns);
    bool nothing_outstanding = gate->finish_ns <= now_ns && gate->unseen == 0;
    int64_t credit = 0;
    bool refused = false;
    if (cost_ns == 0 && !nothing_outstanding && !stalled(gate, now_ns)) {
        /* One operation of unknown cost at a time, alone, so that its interval is its own. */
        refuse(answer, VC_GATE_OUTSTANDING, gate->unseen ? now_ns + VC_RECHECK_NS : gate->finish_ns);
        refused = true;
    }
    /* Before the credit: else whoever is awake spends what its siblings wait for. */
    refused = refused || (policy.holder && turn_refused(gate, now_ns, &policy, answer));
    refused = refused || credit_refused(gate, now_ns, cost_ns, &policy, &credit, answer);
    refused = refused || (policy.leased && lease_refused(gate, now_ns, cost_ns, &policy, nothing_outstanding, answer));
    refused = refused || unseen_refused(gate, now_ns, cost_ns, risk_ns, &policy, answer);
    if (!refused) {
        launch(gate, now_ns, cost_ns, credit, nothing_outstanding, &policy, answer);
        gate->risk_ns += risk_ns;
    }
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_fold(struct vc_gate *gate, uint64_t allowance_ns, uint64_t used_ns)
{
    if (used_ns >= allowance_ns)
        return;
    uint64_t rest = allowance_ns - used_ns;
    pthread_mutex_lock(&gate->mutex);
    account(gate, -(int64_t)rest);
    gate->launched_ns -= rest;
    vc_store_relaxed(&gate->seen_ns, vc_earlier(gate->seen_ns, gate->launched_ns)); /* a mark of another lane's counted it */
    gate->idle_ns = vc_earlier(gate->idle_ns, gate->launched_ns);
    gate->finish_ns -= vc_earlier(rest, gate->finish_ns);
    publish(gate);
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

/* --- what it really cost --- */

uint64_t vc_gate_marked(struct vc_gate *gate, uint64_t unused_ns)
{
    pthread_mutex_lock(&gate->mutex);
    gate->unseen++;
    uint64_t launched = gate->launched_ns - vc_earlier(unused_ns, gate->launched_ns);
    gate->untold_open |= open_gate(gate); /* who was held up between the gate and its launch was thought to rest */
    pthread_mutex_unlock(&gate->mutex);
    return launched;
}

void vc_gate_began(struct vc_gate *gate, uint64_t began_ns)
{
    vc_store_relaxed(&gate->usage->began_ns, began_ns);
}

void vc_gate_waits(struct vc_gate *gate, uint64_t since_ns)
{
    vc_store_relaxed(&gate->usage->began_ns, VC_NOT_BEGUN | vc_later(since_ns, vc_load_relaxed(&gate->ended_ns)));
}

void vc_gate_overdue(struct vc_gate *gate, uint64_t now_ns, uint64_t expected_ns, bool paid)
{
    pthread_mutex_lock(&gate->mutex);
    if (paid || gate->unpaid_since_ns == 0)
        gate->unpaid_since_ns = paid ? 0 : vc_earlier(gate->finish_ns, expected_ns);
    gate->looked_ns = now_ns;
    if (gate->unseen != 0 && gate->late_since_ns == 0)
        gate->late_since_ns = expected_ns;
    if (gate->unseen != 0 && gate->finish_ns < now_ns + OVERDUE_STEP_NS / 2) {
        gate->all_done = false;
        gate->finish_ns = now_ns + OVERDUE_STEP_NS;
        publish(gate);
    }
    pthread_mutex_unlock(&gate->mutex);
}

uint64_t vc_gate_delay(struct vc_gate *gate, uint64_t launched_ns, uint64_t ready_ns)
{
    pthread_mutex_lock(&gate->mutex);
    uint64_t start = gate->finish_ns - vc_earlier(launched_ns, gate->finish_ns), gap = ready_ns > start ? ready_ns - start : 0;
    gate->finish_ns += gap;
    gate->gaps_ns += gap;
    publish(gate);
    pthread_mutex_unlock(&gate->mutex);
    return gap;
}

void vc_gate_not_begun(struct vc_gate *gate, uint64_t now_ns, bool idle)
{
    pthread_mutex_lock(&gate->mutex);
    gate->looked_ns = now_ns;
    vc_store_relaxed(&gate->usage->began_ns, VC_BEHIND | now_ns);
    /* It is paid for until then, for who thinks that we stand still. */
    if (gate->unseen != 0 && (gate->finish_ns + 2 * VC_REST_NS < now_ns || (idle && gate->finish_ns > now_ns - IDLE_SINCE_NS))) {
        gate->finish_ns = now_ns - (idle ? IDLE_SINCE_NS : VC_REST_NS);
        publish(gate);
    }
    pthread_mutex_unlock(&gate->mutex);
}

struct vc_gate_others vc_gate_others(const struct vc_gate *gate)
{
    uint64_t own = vc_load_relaxed(&gate->charged_ns) + vc_load_relaxed(&gate->slot->owed_ns); /* what siblings were charged for us is ours */
    return (struct vc_gate_others){vc_load_relaxed(&gate->limit->others_gpu_ns), vc_load_relaxed(&gate->usage->gpu_ns) - own};
}

/* Refunds may set a clock back a little. */
static uint64_t grown(uint64_t from, uint64_t to)
{
    return (int64_t)(to - from) > 0 ? to - from : 0;
}

uint64_t vc_gate_others_ns(const struct vc_gate *gate, uint64_t now_ns, const struct vc_gate_others *from,
                           const struct vc_gate_others *to)
{
    bool turns = gate->turns.slots && vc_gate_policy(gate, now_ns).leased;
    return grown(from->tenants_ns, to->tenants_ns) + (turns ? 0 : grown(from->siblings_ns, to->siblings_ns));
}

/* Whether other tenants could launch meanwhile, or what they had launched could begin (`unclear`). */
static bool beside(const struct vc_policy *policy, struct vc_interval *interval)
{
    bool together = policy->together || interval->sequence & VC_LEASE_TOGETHER;
    interval->unclear = !together && (policy->lease_sequence | interval->sequence) & VC_LEASE_UNCLEAR;
    return together || interval->unclear;
}

/* Whether slices of other tenants, or of other processes of this container, may be inside the interval. */
static bool overlapped(const struct vc_gate *gate, const struct vc_policy *policy, struct vc_interval *interval)
{
    if (interval->others_gpu_ns != 0)
        return true;
    if (!policy->shared)
        return false;
    if (!policy->arbitrated)
        return true;
    if (beside(policy, interval))
        return true;
    if (policy->leased && policy->holder && policy->lease_sequence == interval->sequence &&
        interval->from_ns >= policy->lease_clock_ns)
        return false;
    return vc_load_relaxed(&gate->limit->others_active_ns) > interval->from_ns;
}

/* What siblings charged for us, and we while nobody looked, was for what is under way. */
static void pay_owed(struct vc_gate *gate, struct vc_interval *interval)
{
    take_owed(gate);
    interval->advance_ns += gate->owed_ns + gate->unwatched_ns;
    interval->siblings_ns += gate->owed_ns;
    gate->owed_ns = gate->unwatched_ns = 0;
}

void vc_gate_progress(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval)
{
    pthread_mutex_lock(&gate->mutex);
    gate->looked_ns = now_ns;
    pay_owed(gate, interval);
    if (gate->open) /* what siblings leave meanwhile is paid for, too */
        vc_abandoned_cover(gate->usage, vc_later(interval->from_ns, interval->covered_until_ns), now_ns);
    vc_interval_cover(&gate->busy, interval, now_ns);
    uint64_t used = vc_interval_own(interval), paid = interval->estimate_ns + interval->advance_ns;
    gate->unpaid_since_ns = 0;
    if (used > paid) {
        account(gate, (int64_t)(used - paid));
        interval->advance_ns += used - paid;
    }
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_predicted(struct vc_gate *gate, uint64_t *done_ns, uint64_t *launched_ns)
{
    pthread_mutex_lock(&gate->mutex);
    *done_ns = gate->finish_ns;
    *launched_ns = gate->launched_ns;
    pthread_mutex_unlock(&gate->mutex);
}

uint64_t vc_gate_lasts_from(struct vc_gate *gate, uint64_t now_ns, uint64_t done_ns, uint64_t launched_ns)
{
    pthread_mutex_lock(&gate->mutex);
    bool explained = gate->unseen != 0 && vc_gate_policy(gate, now_ns).shared;
    uint64_t from_ns = explained ? UINT64_MAX : done_ns + grown(vc_later(gate->seen_ns, launched_ns), gate->launched_ns);
    pthread_mutex_unlock(&gate->mutex);
    return from_ns;
}

void vc_gate_overruns(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval)
{
    vc_gate_progress(gate, now_ns, interval);
    pthread_mutex_lock(&gate->mutex);
    gate->finish_ns = vc_later(gate->finish_ns, now_ns + OVERDUE_STEP_NS);
    gate->all_done = false;
    publish(gate);
    gate->untold_open |= open_gate(gate);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_waited(struct vc_gate *gate, uint64_t from_ns, uint64_t to_ns)
{
    struct vc_interval interval = {.from_ns = from_ns};
    pthread_mutex_lock(&gate->mutex);
    vc_interval_cover(&gate->busy, &interval, to_ns);
    struct vc_policy policy = vc_gate_policy(gate, to_ns);
    if (!overlapped(gate, &policy, &interval))
        account(gate, (int64_t)interval.uncovered_ns);
    pthread_mutex_unlock(&gate->mutex);
}

/* On a card of its own a container's processes run beside each other. What an interval was not charged because siblings had it by the file,
 * where a tenant can write, is charged after all as far as they did not tell it. */
static uint64_t not_siblings(struct vc_gate *gate, const struct vc_policy *policy, const struct vc_interval *interval, uint64_t charged_ns)
{
    if (policy->shared || !policy->arbitrated || interval->others_gpu_ns == 0)
        return 0;
    uint64_t all = vc_load_relaxed(&gate->limit->told_ns), siblings = all > gate->told_ns ? all - gate->told_ns : 0;
    if (all < gate->container_told_ns) /* another arbiter, which counts anew */
        gate->siblings_told_ns = siblings;
    gate->container_told_ns = all;
    uint64_t more = vc_earlier(grown(gate->siblings_told_ns, siblings), VC_BELIEVED_NS);
    gate->siblings_told_ns = vc_later(gate->siblings_told_ns, siblings);
    gate->believed_ns = vc_earlier(gate->believed_ns + more + more / 2, VC_BELIEVED_NS); /* estimates are in the file until they are settled */
    uint64_t spared = grown(charged_ns, interval->uncovered_ns), believed = vc_earlier(spared, gate->believed_ns);
    gate->believed_ns -= believed;
    return spared - believed;
}

struct vc_settlement vc_gate_seen(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval)
{
    struct vc_settlement settlement = {interval->estimate_ns, interval->estimate_ns, VC_EVIDENCE_UPPER_BOUND};
    uint64_t launched = interval->launched_ns;
    pthread_mutex_lock(&gate->mutex);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    if (gate->unseen != 0)
        gate->unseen--;
    gate->risk_ns -= vc_earlier(interval->risk_ns, gate->risk_ns);
    gate->unknown -= interval->unknown && gate->unknown != 0;
    gate->progress_ns = gate->looked_ns = now_ns;
    gate->late_since_ns = gate->unpaid_since_ns = 0;
    if (interval->measurable) {
        pay_owed(gate, interval);
        if (interval->loose && beside(&policy, interval)) {
            struct vc_gate_others now = vc_gate_others(gate);
            interval->others_gpu_ns = vc_gate_others_ns(gate, now_ns, &interval->others_then, &now);
        }
        interval->joined = vc_gate_beside(gate, interval->from_ns);
        interval->siblings = !policy.shared;
        interval->launched_meanwhile_ns = gate->launched_ns - vc_earlier(interval->seen_then_ns, gate->launched_ns);
        settlement = vc_interval_settle(&gate->busy, interval, overlapped(gate, &policy, interval),
                                        beside(&policy, interval));
        settlement.charged_ns += not_siblings(gate, &policy, interval, settlement.charged_ns);
        account_beyond(gate, (int64_t)settlement.charged_ns - (int64_t)(interval->estimate_ns + interval->advance_ns), interval->siblings_ns);
        if (interval->unknown) { /* it counted nothing when it was launched */
            gate->launched_ns += settlement.charged_ns;
            launched += settlement.charged_ns;
        }
    }
    vc_store_relaxed(&gate->seen_ns, vc_later(gate->seen_ns, vc_earlier(launched, gate->launched_ns))); /* lanes read it without the lock */
    uint64_t behind = gate->launched_ns > launched ? gate->launched_ns - launched : 0;
    gate->gaps_ns = behind == 0 ? 0 : gate->gaps_ns - vc_earlier(interval->gap_ns, gate->gaps_ns);
    behind += vc_earlier(gate->gaps_ns, VC_AHEAD_NS);
    uint64_t ended = interval->to_ns ? vc_earlier(interval->to_ns, now_ns) : now_ns;
    vc_store_relaxed(&gate->ended_ns, vc_later(gate->ended_ns, ended)); /* its helper reads it without the lock */
    gate->finish_ns = behind ? vc_later(ended + behind, gate->unseen ? now_ns : 0) : ended;
    if (rests(gate, now_ns))
        close_gate(gate);
    publish(gate);
    pthread_mutex_unlock(&gate->mutex);
    return settlement;
}

/* Siblings' part is what they told, where no tenant can write. */
void vc_gate_sampled(struct vc_gate *gate, uint64_t now_ns, bool busy)
{
    pthread_mutex_lock(&gate->mutex);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    uint64_t told = vc_load_relaxed(&gate->limit->told_ns);
    bool contended = policy.leased && (policy.lease_end_ns != UINT64_MAX || policy.together);
    struct vc_sample sample = {
        .now_ns = now_ns,
        .charged_ns = gate->own.taken_ns - (int64_t)grown(now_ns, gate->finish_ns),
        .tenants_ns = vc_load_relaxed(&gate->limit->others_gpu_ns),
        .siblings_ns = grown(gate->told_ns, told),
        .siblings = vc_turn_siblings_busy(&gate->turns, now_ns),
        .rate_ppm = policy.rate_ppm,
        .launches = vc_load_relaxed(&gate->launches),
        .begins = gate->begins,
        .busy = busy,
        .clear = policy.gated && policy.arbitrated && !contended,
    };
    vc_samples_mark_until(&gate->samples, now_ns, vc_load_relaxed(&gate->usage->all_until_ns));
    uint64_t due = vc_samples_add(&gate->samples, gate->turns.slots ? &gate->usage->unpaid_ns : NULL, &sample);
    if (VC_UNLIKELY(due != 0)) {
        account(gate, (int64_t)due);
        vc_raise_to(&gate->usage->all_until_ns, gate->samples.all_until_ns);
    }
    vc_store_relaxed(&gate->all_until_ns, gate->samples.all_until_ns);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_not_sampled(struct vc_gate *gate)
{
    pthread_mutex_lock(&gate->mutex);
    vc_samples_pause(&gate->samples);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_mark_all(struct vc_gate *gate, uint64_t now_ns, uint64_t until_ns)
{
    pthread_mutex_lock(&gate->mutex);
    vc_samples_mark_until(&gate->samples, now_ns, until_ns);
    vc_store_relaxed(&gate->all_until_ns, gate->samples.all_until_ns);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_clock_moved(struct vc_gate *gate)
{
    pthread_mutex_lock(&gate->mutex);
    gate->busy.count = 0;
    pthread_mutex_unlock(&gate->mutex);
}

uint64_t vc_gate_rest(struct vc_gate *gate, uint64_t now_ns, bool *opened)
{
    pthread_mutex_lock(&gate->mutex);
    gate->looked_ns = now_ns;
    if (gate->open && rests(gate, now_ns))
        close_gate(gate);
    uint64_t again = !gate->open || gate->unseen != 0 ? UINT64_MAX : gate->finish_ns + VC_REST_NS + 1;
    *opened = gate->untold_open;
    gate->untold_open = false;
    pthread_mutex_unlock(&gate->mutex);
    return again;
}

bool vc_gate_refilled(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    bool refilled = !vc_gate_policy(gate, now_ns).leased && gate->refill_ns != 0 && vc_load_relaxed(&gate->usage->credit_ns) >= gate->refill_ns;
    pthread_mutex_unlock(&gate->mutex);
    return refilled;
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

void vc_gate_owe(struct vc_gate *gate, uint64_t ns)
{
    vc_bucket_take(gate->usage, (int64_t)ns, VC_SAVED_NS);
    __atomic_add_fetch(&gate->usage->gpu_ns, ns, __ATOMIC_RELAXED);
}

void vc_gate_idle(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    gate->finish_ns = vc_earlier(gate->finish_ns, now_ns);
    gate->progress_ns = now_ns;
    gate->all_done = gate->unknown == 0; /* else what it cost is charged when its mark is seen */
    publish(gate);
    pthread_mutex_unlock(&gate->mutex);
}
