/* What is seen of the work on the card, and what follows: how long it takes still, what it really cost, and what samples say. */
#include "base/atomic.h"
#include "base/clock.h"
#include "gate/charge.h"
#include "gate/gate.h"
#include "region/abandoned.h"

static const uint64_t OVERDUE_STEP_NS = 200000;
/* So long after others were known to have work on the card for nobody knows how long, their part of what was sampled is a guess. */
static const uint64_t STILL_NS = 5000000;
/* Who told something so lately may have work on the card. */
static const uint64_t AMID_NS = 100000000;
/* A sibling's work may last longer than it says by what its helper is late to look, and other tenants' longer than the arbiter knows. */
static const uint64_t LOOKED_LATE_NS = 1000000;
/* A launch is so long on its way to the card, or an end to who looks. */
static const uint64_t LATE_NS = 30000;
/* What has not begun for long keeps nobody else from the card: the arbiter takes its lease. */
static const uint64_t IDLE_SINCE_NS = 300000;

/* A slice of somebody of whom nobody knew surprises now and then, too: so often it does not, within so much that was charged. */
static const uint64_t EACH_SURPRISE = 1000000, SURPRISES = 4 * VC_SURPRISE * EACH_SURPRISE, MOST_SURPRISES = 8 * SURPRISES, SURPRISED_NS = 2000000000;

/* Each operation is charged its estimate where others' slices may be inside: whoever lets others be long there than where that is seen has more. What is seen of
 * all of them beyond that should add up to nothing; a sixteenth of what is charged is taken for what others' parts are off by. From so much on all is doubted. */
static const int64_t DOUBTED_NS = 20000000, LEAST_BEYOND_NS = -5000000, MOST_BEYOND_NS = 60000000;
enum { BEYOND_PARTS = 16 };

/* Refunds may set a clock back a little. */
static uint64_t grown(uint64_t from, uint64_t to)
{
    return (int64_t)(to - from) > 0 ? to - from : 0;
}

uint64_t vc_gate_marked(struct vc_gate *gate, uint64_t unused_ns)
{
    pthread_mutex_lock(&gate->mutex);
    gate->unseen++;
    uint64_t launched = gate->launched_ns - vc_earlier(unused_ns, gate->launched_ns);
    gate->untold_open |= vc_gate_open(gate); /* who was held up between the gate and its launch was thought to rest */
    pthread_mutex_unlock(&gate->mutex);
    return launched;
}

void vc_gate_began(struct vc_gate *gate, uint64_t began_ns)
{
    vc_store_relaxed(&gate->usage->began_ns, began_ns);
}

void vc_gate_on_card(struct vc_gate *gate, uint64_t now_ns)
{
    vc_store_relaxed(&gate->on_card_ns, now_ns);
}

void vc_gate_waits(struct vc_gate *gate, uint64_t since_ns)
{
    vc_store_relaxed(&gate->usage->began_ns, VC_NOT_BEGUN | vc_later(since_ns, vc_load_relaxed(&gate->ended_ns)));
}

/* It lasts for longer than was thought: as far as anybody knows until the next look, as what it has until now is charged by then. */
static void step_on(struct vc_gate *gate, uint64_t now_ns)
{
    gate->all_done = false;
    gate->stepped_ns = now_ns + OVERDUE_STEP_NS;
    vc_gate_predict(gate, vc_later(gate->packed_ns, gate->stepped_ns), gate->later_ns);
}

void vc_gate_overdue(struct vc_gate *gate, uint64_t now_ns, uint64_t expected_ns, bool paid)
{
    pthread_mutex_lock(&gate->mutex);
    if (paid || gate->unpaid_since_ns == 0)
        gate->unpaid_since_ns = paid ? 0 : vc_earlier(gate->finish_ns, expected_ns);
    gate->looked_ns = now_ns;
    if (gate->unseen != 0 && gate->late_since_ns == 0)
        gate->late_since_ns = expected_ns;
    bool steps = gate->unseen != 0 && gate->finish_ns < now_ns + OVERDUE_STEP_NS / 2;
    if (steps)
        step_on(gate, now_ns);
    gate->unpaid_ns = paid ? grown(now_ns, gate->stepped_ns) : 0;
    if (steps || paid)
        vc_gate_publish(gate);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_all_wait(struct vc_gate *gate, uint32_t marks, uint64_t launched_ns)
{
    pthread_mutex_lock(&gate->mutex);
    if (marks != 0 && marks == gate->unseen && launched_ns == gate->launched_ns)
        vc_store_relaxed(&gate->on_card_ns, 0);
    pthread_mutex_unlock(&gate->mutex);
}

bool vc_gate_not_begun(struct vc_gate *gate, uint64_t now_ns, bool idle)
{
    pthread_mutex_lock(&gate->mutex);
    gate->looked_ns = now_ns;
    vc_store_relaxed(&gate->usage->began_ns, VC_BEHIND | now_ns);
    bool alone = now_ns > vc_load_relaxed(&gate->on_card_ns) + VC_LOOKS_NS; /* else other streams' work is on the card */
    if (idle && !alone && gate->later_ns > now_ns) {
        vc_gate_predict(gate, gate->packed_ns, 0);
        vc_gate_publish(gate);
    }
    /* It is paid for until then, for who thinks that we stand still. */
    bool leaves = gate->unseen != 0 && idle && alone && gate->finish_ns > now_ns - IDLE_SINCE_NS;
    if (leaves || (gate->unseen != 0 && gate->finish_ns + 2 * VC_REST_NS < now_ns)) {
        vc_gate_predict(gate, now_ns - (idle ? IDLE_SINCE_NS : VC_REST_NS), 0);
        gate->stepped_ns = gate->unpaid_ns = 0;
        vc_gate_publish(gate);
    }
    pthread_mutex_unlock(&gate->mutex);
    return leaves;
}

struct vc_gate_others vc_gate_others(const struct vc_gate *gate)
{
    uint64_t own = vc_load_relaxed(&gate->charged_ns) + vc_load_relaxed(&gate->slot->owed_ns); /* what siblings were charged for us is ours */
    if (gate->paid) /* … and what the dead had, or was seen late, they had before */
        own += vc_load_relaxed(&gate->paid->late_gpu_ns) - vc_load_relaxed(&gate->late_ns);
    return (struct vc_gate_others){vc_load_relaxed(&gate->limit->others_gpu_ns), vc_load_relaxed(&gate->usage->gpu_ns) - own};
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

/* The arbiter looks every ms while somebody is active. */
static uint64_t contended_until(const struct vc_gate *gate)
{
    return vc_load_relaxed(&gate->limit->others_active_ns) + LOOKED_LATE_NS;
}

void vc_gate_progress(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval)
{
    pthread_mutex_lock(&gate->mutex);
    gate->looked_ns = now_ns;
    vc_gate_pay_owed(gate, interval);
    if (gate->open) /* what siblings leave meanwhile is paid for, too */
        vc_abandoned_cover(gate->paid, vc_later(interval->from_ns, interval->covered_until_ns), now_ns);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    interval->joined = vc_gate_beside(gate, interval->from_ns);
    if (interval->covered_until_ns == 0 && !overlapped(gate, &policy, interval))
        vc_interval_leave_slack(&gate->busy, interval, now_ns);
    vc_interval_cover(&gate->busy, interval, now_ns);
    interval->contended_until_ns = contended_until(gate);
    interval->siblings = !policy.shared;
    uint64_t used = vc_interval_own(interval), paid = interval->estimate_ns + interval->advance_ns;
    gate->unpaid_since_ns = 0;
    if (used > paid) {
        vc_gate_charge(gate, (int64_t)(used - paid));
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
    step_on(gate, now_ns);
    gate->unpaid_ns = OVERDUE_STEP_NS;
    vc_gate_publish(gate);
    gate->untold_open |= vc_gate_open(gate);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_waited(struct vc_gate *gate, uint64_t from_ns, uint64_t to_ns)
{
    struct vc_interval interval = {.from_ns = from_ns};
    pthread_mutex_lock(&gate->mutex);
    vc_interval_cover(&gate->busy, &interval, to_ns);
    struct vc_policy policy = vc_gate_policy(gate, to_ns);
    if (!overlapped(gate, &policy, &interval))
        vc_gate_charge(gate, (int64_t)interval.uncovered_ns);
    pthread_mutex_unlock(&gate->mutex);
}

/* The clock of what siblings were charged as it was at `at_ns`: who was stopped or held looks later, and what they launched since then ran behind. */
static uint64_t siblings_clock(struct vc_gate *gate, uint64_t now_ns, uint64_t at_ns)
{
    uint64_t clock = vc_gate_others(gate).siblings_ns, read = gate->queued_read_ns;
    gate->queued_read_ns = vc_later(read, vc_earlier(at_ns, now_ns));
    if (read == 0 || at_ns >= now_ns || read >= now_ns)
        return clock;
    double part = (double)grown(read, at_ns) / (double)(now_ns - read);
    return gate->queued_clock_ns + (uint64_t)(int64_t)((double)(int64_t)(clock - gate->queued_clock_ns) * part);
}

/* Siblings are charged when they launch, and have the card later: what of it lies in none of our intervals runs between those, the rest within them. A quarter more, since the card switches
 * between processes. All together can't be charged more than the bucket holds before it runs. */
static uint64_t siblings_queued(struct vc_gate *gate, uint64_t now_ns, const struct vc_interval *interval)
{
    bool first = gate->queued_at_ns == 0;
    uint64_t clock = siblings_clock(gate, now_ns, interval->to_ns);
    int64_t most = VC_BUCKET_NS, more = first ? 0 : (int64_t)(clock - gate->queued_clock_ns), between = (int64_t)grown(gate->queued_at_ns, interval->from_ns);
    more = more > most ? most : more < -most ? -most : more;
    int64_t queued = (int64_t)gate->queued_ns + more + more / 4 - between;
    gate->queued_clock_ns = clock;
    gate->queued_at_ns = vc_later(gate->queued_at_ns, interval->to_ns);
    gate->queued_ns = queued < 0 ? 0 : vc_earlier((uint64_t)queued, VC_BUCKET_NS);
    return gate->queued_ns;
}

/* What they told, where no tenant can write. */
static void hear_siblings(struct vc_gate *gate, uint64_t now_ns)
{
    uint64_t all = vc_load_relaxed(&gate->limit->told_ns), siblings = all > gate->told_ns ? all - gate->told_ns : 0;
    if (all < gate->container_told_ns) /* another arbiter, which counts anew */
        gate->siblings_told_ns = siblings;
    gate->container_told_ns = all;
    uint64_t more = vc_earlier(grown(gate->siblings_told_ns, siblings), VC_BELIEVED_NS);
    gate->siblings_told_ns = vc_later(gate->siblings_told_ns, siblings);
    if (more != 0)
        gate->siblings_told_at_ns = now_ns;
    gate->believed_ns = vc_earlier(gate->believed_ns + more + more / 2, VC_BELIEVED_NS); /* estimates are in the file until they are settled */
}

/* On a card of its own a container's processes run beside each other. */
static void look_for_siblings(struct vc_gate *gate, uint64_t now_ns, const struct vc_policy *policy, struct vc_interval *interval)
{
    interval->siblings = !policy->shared;
    if (policy->shared)
        return;
    interval->others_gpu_ns = vc_later(interval->others_gpu_ns, siblings_queued(gate, now_ns, interval));
    if (interval->doubted && grown(interval->from_ns, interval->to_ns) < VC_LONG_OPERATION_NS) /* no slice fits into it */
        interval->others_gpu_ns = 0;
    if (policy->arbitrated)
        hear_siblings(gate, now_ns);
    interval->amid = policy->arbitrated ? now_ns < gate->siblings_told_at_ns + AMID_NS : interval->others_gpu_ns != 0;
}

/* What an interval was not charged because siblings had it by the file, where a tenant can write, is charged after all as far as they did not tell it. */
static uint64_t not_siblings(struct vc_gate *gate, const struct vc_policy *policy, const struct vc_interval *interval, uint64_t charged_ns)
{
    uint64_t spared = grown(charged_ns, interval->uncovered_ns);
    gate->queued_ns -= vc_earlier(gate->queued_ns, spared);
    if (policy->shared || !policy->arbitrated || interval->others_gpu_ns == 0)
        return 0;
    uint64_t believed = vc_earlier(spared, gate->believed_ns);
    gate->believed_ns -= believed;
    return spared - believed;
}

/* That is charged now, but was had before: siblings' intervals of now hold nothing of it. */
static void note_late(struct vc_gate *gate, uint64_t ns)
{
    if (!gate->paid)
        return;
    vc_store_relaxed(&gate->late_ns, gate->late_ns + ns);
    vc_add_relaxed(&gate->paid->late_gpu_ns, ns);
}

static void add_surprise(uint64_t *sum, uint64_t charged_ns, unsigned surprise)
{
    uint64_t is = vc_earlier(vc_load_relaxed(sum), MOST_SURPRISES);
    is -= is * vc_earlier(charged_ns, SURPRISED_NS) / SURPRISED_NS;
    vc_store_relaxed(sum, is + surprise * EACH_SURPRISE); /* a lost update of two processes is as good as none */
}

void vc_gate_learnt(struct vc_gate *gate, uint64_t charged_ns, unsigned surprise)
{
    add_surprise(&gate->surprises, charged_ns, surprise);
    add_surprise(&gate->usage->surprises, charged_ns, surprise); /* processes that end before are doubted together */
}

static int64_t within(int64_t ns, int64_t least_ns, int64_t most_ns)
{
    return ns < least_ns ? least_ns : ns > most_ns ? most_ns : ns;
}

/* In the file a tenant may write anything. */
static void add_beyond(int64_t *sum, int64_t more_ns)
{
    int64_t is = within(vc_load_relaxed(sum), LEAST_BEYOND_NS, MOST_BEYOND_NS);
    vc_store_relaxed(sum, within(is + more_ns, LEAST_BEYOND_NS, MOST_BEYOND_NS));
}

static void note_beyond(struct vc_gate *gate, const struct vc_settlement *settlement)
{
    int64_t more = within(settlement->beyond_ns, -MOST_BEYOND_NS, MOST_BEYOND_NS) - (int64_t)(settlement->charged_ns / BEYOND_PARTS);
    add_beyond(&gate->beyond_ns, more);
    add_beyond(&gate->usage->beyond_ns, more);
}

static bool is_doubted(const struct vc_gate *gate)
{
    bool surprises = vc_later(vc_load_relaxed(&gate->surprises), vc_load_relaxed(&gate->usage->surprises)) > SURPRISES;
    return surprises || gate->beyond_ns > DOUBTED_NS || vc_load_relaxed(&gate->usage->beyond_ns) > DOUBTED_NS;
}

void vc_gate_stood_still(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    uint64_t launches = vc_load_relaxed(&gate->launches);
    bool left = gate->open && launches != gate->stopped_launches; /* else the stop hid nothing */
    gate->stopped_launches = launches;
    if (left) {
        vc_gate_learnt(gate, 0, VC_SURPRISE);
        if (is_doubted(gate))
            vc_samples_mark_for_longer(&gate->samples, gate->turns.slots ? gate->usage : NULL, now_ns);
        vc_store_relaxed(&gate->all_until_ns, gate->samples.all_until_ns);
    }
    pthread_mutex_unlock(&gate->mutex);
}

struct vc_settlement vc_gate_seen(struct vc_gate *gate, uint64_t now_ns, struct vc_interval *interval)
{
    struct vc_settlement settlement = {interval->estimate_ns, interval->estimate_ns, VC_EVIDENCE_UPPER_BOUND, 0};
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
        vc_gate_pay_owed(gate, interval);
        if (interval->loose && beside(&policy, interval)) {
            struct vc_gate_others now = vc_gate_others(gate);
            interval->others_gpu_ns = vc_gate_others_ns(gate, now_ns, &interval->others_then, &now);
        }
        interval->doubted = is_doubted(gate);
        interval->joined = vc_gate_beside(gate, interval->from_ns);
        look_for_siblings(gate, now_ns, &policy, interval);
        interval->stopped = policy.shared && vc_load_relaxed(&gate->limit->others_still_ns) > interval->from_ns;
        interval->launched_meanwhile_ns = gate->launched_ns - vc_earlier(interval->seen_then_ns, gate->launched_ns);
        interval->contended_until_ns = contended_until(gate);
        settlement = vc_interval_settle(&gate->busy, interval, overlapped(gate, &policy, interval),
                                        beside(&policy, interval));
        if (policy.arbitrated) /* else nobody knows what others had */
            note_beyond(gate, &settlement);
        settlement.charged_ns += not_siblings(gate, &policy, interval, settlement.charged_ns);
        int64_t beyond_ns = (int64_t)settlement.charged_ns - (int64_t)(interval->estimate_ns + interval->advance_ns);
        if (beyond_ns > 0 && vc_seen_late(now_ns, interval->to_ns))
            note_late(gate, (uint64_t)beyond_ns);
        vc_gate_charge_beyond(gate, beyond_ns, interval->siblings_ns);
        if (interval->unknown) { /* it counted nothing when it was launched */
            gate->launched_ns += settlement.charged_ns;
            launched += settlement.charged_ns;
        }
    }
    vc_store_relaxed(&gate->seen_ns, vc_later(gate->seen_ns, vc_earlier(launched, gate->launched_ns))); /* lanes read it without the lock */
    uint64_t behind = gate->launched_ns > launched ? gate->launched_ns - launched : 0;
    uint64_t ended = interval->to_ns ? vc_earlier(interval->to_ns, now_ns) : now_ns;
    vc_store_relaxed(&gate->ended_ns, vc_later(gate->ended_ns, ended)); /* its helper reads it without the lock */
    vc_gate_predict(gate, behind ? vc_later(ended + behind, gate->unseen ? now_ns : 0) : ended, gate->unseen ? gate->later_ns : 0);
    gate->stepped_ns = gate->unpaid_ns = 0;
    vc_gate_close_at_rest(gate, now_ns);
    vc_gate_publish(gate);
    pthread_mutex_unlock(&gate->mutex);
    return settlement;
}

/* Siblings' part is what they told, where no tenant can write. */
uint64_t vc_gate_sampled(struct vc_gate *gate, uint64_t now_ns, bool busy, bool held)
{
    pthread_mutex_lock(&gate->mutex);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    uint64_t told = vc_load_relaxed(&gate->limit->told_ns);
    bool still = now_ns < vc_load_relaxed(&gate->limit->others_still_ns) + STILL_NS;
    bool unclear = policy.together || policy.lease_sequence & VC_LEASE_UNCLEAR || still; /* others' slices may be inside, however right estimates are */
    bool contended = policy.leased && (policy.lease_end_ns != UINT64_MAX || policy.together || still);
    struct vc_sample sample = {
        .now_ns = now_ns,
        .charged_ns = gate->own.taken_ns - (int64_t)grown(now_ns, gate->finish_ns),
        .tenants_ns = vc_load_relaxed(&gate->limit->others_gpu_ns),
        .siblings_ns = grown(gate->told_ns, told),
        .siblings = vc_turn_siblings_busy(&gate->turns, now_ns - vc_earlier(LOOKED_LATE_NS, now_ns)),
        .rate_ppm = policy.rate_ppm,
        .launches = vc_load_relaxed(&gate->launches),
        .begins = gate->begins,
        .busy = busy,
        .held = held,
        .clear = policy.gated && policy.arbitrated && !contended,
        .leased = policy.gated && policy.arbitrated && contended && !unclear && policy.holder && now_ns > policy.lease_clock_ns,
        .beside = policy.gated && policy.arbitrated && policy.together && !still,
        .predicted = gate->finish_ns + LATE_NS > now_ns,
        .doubt = vc_load_relaxed(&gate->limit->doubt),
        .all_until_ns = vc_load_relaxed(&gate->limit->all_until_ns),
        .all_for_ns = vc_load_relaxed(&gate->limit->all_for_ns),
    };
    struct vc_card_usage *container = gate->turns.slots ? gate->usage : NULL;
    uint64_t due = vc_samples_add(&gate->samples, container, &sample), wait = vc_samples_wait_ns(&gate->samples, container);
    if (VC_UNLIKELY(due != 0))
        vc_gate_charge(gate, (int64_t)due);
    vc_store_relaxed(&gate->all_until_ns, gate->samples.all_until_ns);
    pthread_mutex_unlock(&gate->mutex);
    return wait;
}

void vc_gate_found(struct vc_gate *gate, uint64_t *more_ns, uint64_t *less_ns)
{
    pthread_mutex_lock(&gate->mutex);
    *more_ns = gate->samples.more_ns;
    *less_ns = gate->samples.less_ns;
    pthread_mutex_unlock(&gate->mutex);
}

bool vc_gate_is_idle(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    bool idle = gate->unseen == 0 && gate->finish_ns <= now_ns;
    pthread_mutex_unlock(&gate->mutex);
    return idle;
}

bool vc_gate_others_explain(const struct vc_gate *gate, uint64_t since_ns)
{
    struct vc_policy policy = vc_gate_policy(gate, vc_now_ns());
    uint64_t early = since_ns - vc_earlier(LOOKED_LATE_NS, since_ns);
    if (vc_turn_siblings_busy(&gate->turns, early) != 0)
        return true;
    if (!policy.shared)
        return false;
    return !policy.arbitrated || policy.together || (policy.leased && !policy.holder) || vc_load_relaxed(&gate->limit->others_active_ns) > early;
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

void vc_gate_pays(struct vc_gate *gate, uint64_t from_ns, uint64_t to_ns)
{
    pthread_mutex_lock(&gate->mutex);
    vc_busy_add(&gate->busy, from_ns, to_ns);
    pthread_mutex_unlock(&gate->mutex);
}

void vc_gate_clock_moved(struct vc_gate *gate)
{
    pthread_mutex_lock(&gate->mutex);
    gate->busy.count = 0;
    pthread_mutex_unlock(&gate->mutex);
}

static void be_idle(struct vc_gate *gate, uint64_t now_ns)
{
    vc_gate_predict(gate, vc_earlier(gate->packed_ns, now_ns), vc_earlier(gate->later_ns, now_ns));
    gate->stepped_ns = gate->unpaid_ns = 0;
    gate->progress_ns = now_ns;
    gate->all_done = gate->unknown == 0; /* else what it cost is charged when its mark is seen */
    vc_gate_publish(gate);
}

void vc_gate_idle(struct vc_gate *gate, uint64_t now_ns)
{
    pthread_mutex_lock(&gate->mutex);
    be_idle(gate, now_ns);
    pthread_mutex_unlock(&gate->mutex);
}

/* What it holds is the lease, and its turn in that. */
static enum vc_gate_heir hand_on(struct vc_gate *gate, uint64_t now_ns)
{
    enum vc_turn_left turn = vc_turn_leave(&gate->turns, now_ns);
    if (turn == VC_TURN_UNWANTED)
        vc_store_release(&gate->usage->refill_ns, VC_HAS_LEFT);
    return turn == VC_TURN_UNWANTED ? VC_HEIR_ARBITER : turn == VC_TURN_PASSED ? VC_HEIR_SIBLING : VC_HEIR_NONE;
}

enum vc_gate_heir vc_gate_leave(struct vc_gate *gate, uint64_t now_ns)
{
    enum vc_gate_heir heir = VC_HEIR_NONE;
    pthread_mutex_lock(&gate->mutex);
    struct vc_policy policy = vc_gate_policy(gate, now_ns);
    if (gate->visited_ns != 0) /* it went on behind the first wait, by a permit */
        vc_store_relaxed(&gate->visits, 0);
    gate->visited_ns = now_ns;
    if (gate->visits == VC_VISITS && gate->unknown == 0 && policy.leased && policy.holder && !policy.together && policy.lease_end_ns != UINT64_MAX) {
        be_idle(gate, now_ns);
        heir = hand_on(gate, now_ns);
    }
    pthread_mutex_unlock(&gate->mutex);
    return heir;
}
