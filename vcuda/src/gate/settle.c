/* An interval's begin, its own part, and its settlement; see settle.h. */
#include "gate/settle.h"

#include "base/clock.h"
#include "region/abandoned.h"

/* A mark that is reached so soon after its record found the stream idle. */
static const uint64_t HOST_BOUND_NS = 10000;

/* A call that takes the host no longer hands its work over at its end; a longer one was held up, before that or
 * behind it. */
static const uint64_t SLOW_CALL_NS = 25000;

/* Less than it takes any card to go to another context and back. */
static const uint64_t SWITCHES_NS = 50000;

/* No thread takes so long from a launch to the mark behind it, unless it is held up. */
static const uint64_t HELD_UP_NS = 50000;

/* Between two operations a mark costs the card something, too: so much on an H100; it is little of so much more. */
static const uint64_t MARK_COST_NS = 2000;
static const uint64_t MARK_TELLS_NS = 40000;

/* An event's time is a float of milliseconds. */
static const uint64_t CLOCK_RESOLVES_NS = 2000;

/* Seldom before the end is expected, often behind that, less so the later it is. */
static const uint64_t LOOK_EARLY_NS = 1000000, LOOK_LATE_NS = 200000;

/* A slice of others, and the most that it takes a card to go there and back. */
static const uint64_t OTHERS_TURN_NS = 2400000;

/* What others had within an interval is known within half of it, and within so much. */
static const uint64_t OTHERS_UNTOLD_NS = 2 * VC_LONG_OPERATION_NS;

/* A helper that runs looks again within much less. */
static const uint64_t SEEN_LATE_NS = 2000000;

static bool found_idle(const struct vc_mark_times *mark, uint64_t reached_ns)
{
    return reached_ns <= mark->recorded_ns + HOST_BOUND_NS;
}

void vc_interval_begin(struct vc_interval *interval, const struct vc_mark_times *from, uint64_t reached_ns, uint64_t until_ns, uint64_t uncertain_ns)
{
    uint64_t begins = from->begins_ns, earliest = begins > uncertain_ns ? begins - uncertain_ns : 0;
    bool found = found_idle(from, reached_ns); /* it was thought to be, by estimates that may be too low */
    uint64_t idle_since = vc_later(from->recorded_ns, reached_ns); /* what was there before may have lasted beyond the record */
    uint64_t behind = found && begins > idle_since ? begins - idle_since : 0;
    /* Who was held up within the record, or since, had given the card nothing to do: the host's clock tells that, too. */
    if (earliest > reached_ns)
        behind = vc_later(behind, earliest - reached_ns);
    uint64_t moved = vc_earlier(behind, (until_ns - reached_ns) / 2); /* the rest may be the clocks' fault */
    uint64_t handed_over = begins + from->stuck_ns, start = reached_ns + moved;
    interval->from_ns = start;
    interval->slack_ns = (found && handed_over > start ? vc_earlier(from->stuck_ns, handed_over - start) : 0) + behind - moved;
    interval->from_idle = found && begins != 0;
    interval->waited = begins != 0 && handed_over <= reached_ns && from->recorded_ns + SWITCHES_NS < reached_ns;
}

static uint64_t grown_by(uint64_t from, uint64_t to, double part)
{
    int64_t grew = (int64_t)(to - from); /* refunds may set a clock back a little */
    return grew > 0 ? from + (uint64_t)((double)grew * part) : to;
}

struct vc_gate_others vc_others_at(const struct vc_gate_others *from, uint64_t from_ns, const struct vc_gate_others *to, uint64_t now_ns, uint64_t at_ns)
{
    struct vc_gate_others at = *to;
    if (from_ns == 0 || at_ns <= from_ns || now_ns <= at_ns)
        return at;
    double part = (double)(at_ns - from_ns) / (double)(now_ns - from_ns);
    at.siblings_ns = grown_by(from->siblings_ns, to->siblings_ns, part);
    if (now_ns > at_ns + VC_ABANDONED_AFTER_NS)
        at.tenants_ns = grown_by(from->tenants_ns, to->tenants_ns, part);
    return at;
}

void vc_others_between(const struct vc_others_look *look, const struct vc_others_look *next, const struct vc_interval *interval, struct vc_gate_others *before, struct vc_gate_others *after)
{
    if (interval->from_ns < look->at_ns || interval->to_ns <= interval->from_ns || next->at_ns < interval->to_ns)
        return;
    double lasted = (double)(next->at_ns - look->at_ns);
    before->tenants_ns = grown_by(look->others.tenants_ns, next->others.tenants_ns, (double)(interval->from_ns - look->at_ns) / lasted);
    after->tenants_ns = grown_by(look->others.tenants_ns, next->others.tenants_ns, (double)(interval->to_ns - look->at_ns) / lasted);
}

bool vc_seen_late(uint64_t now_ns, uint64_t at_ns)
{
    return now_ns > at_ns + SEEN_LATE_NS;
}

uint64_t vc_others_in_late(struct vc_late *latest, const struct vc_interval *interval, uint64_t marked_ns, uint64_t then_ns, uint64_t tenants_ns)
{
    uint64_t length = interval->to_ns - interval->from_ns, estimate = interval->estimate_ns, since = marked_ns, before = then_ns;
    if (interval->from_ns + CLOCK_RESOLVES_NS >= latest->to_ns) { /* not beside it */
        since = vc_later(since, latest->to_ns);
        before = vc_later(before, latest->tenants_ns);
    }
    before += interval->from_ns > since ? interval->from_ns - since : 0;
    uint64_t most = length > estimate + SWITCHES_NS ? length - estimate : 0, inside = tenants_ns > before ? vc_earlier(tenants_ns - before, most) : 0;
    *latest = (struct vc_late){interval->to_ns, vc_earlier(before, vc_later(tenants_ns, then_ns)) + inside};
    return inside;
}

void vc_interval_open(struct vc_interval *interval, bool first, struct vc_slice *slice)
{
    bool follows = interval->from_ns <= slice->ended_ns + SWITCHES_NS; /* who had the card just before has no new slice */
    if (interval->covered_until_ns == 0 && !follows)
        slice->from_ns = first && interval->waited ? interval->from_ns : 0;
    if (interval->covered_until_ns == 0 && slice->from_ns <= interval->from_ns)
        interval->slice_from_ns = slice->from_ns;
    slice->ended_ns = vc_later(slice->ended_ns, interval->to_ns);
    interval->put_off_ns = slice->put_off_ns = follows ? slice->put_off_ns : 0;
}

void vc_interval_end(struct vc_interval *interval, const struct vc_mark_times *to)
{
    interval->to_ns = to->reached_ns;
    interval->host_bound = found_idle(to, to->reached_ns);
    interval->over = to->reached_ns <= to->recorded_ns;
}

void vc_interval_cover(struct vc_busy *busy, struct vc_interval *interval, uint64_t to_ns)
{
    uint64_t from = vc_later(interval->from_ns, interval->covered_until_ns);
    if (to_ns < from) { /* looked at beyond its end */
        interval->uncovered_ns -= vc_earlier(from - to_ns, interval->uncovered_ns);
        return;
    }
    interval->uncovered_ns += vc_busy_add(busy, from, to_ns);
    interval->covered_until_ns = to_ns;
}

uint64_t vc_interval_look_again(const struct vc_interval *interval, uint64_t recorded_ns, uint64_t expected_ns, uint64_t now_ns)
{
    uint64_t since = interval->risk_ns != 0 ? vc_earlier(recorded_ns, expected_ns) : expected_ns;
    uint64_t wait = since > now_ns ? vc_earlier(since - now_ns, LOOK_EARLY_NS) : vc_earlier((now_ns - since) / 4, LOOK_LATE_NS);
    return now_ns + vc_later(wait, VC_LOOK_NS);
}

bool vc_interval_is_late(const struct vc_interval *interval, uint64_t now_ns)
{
    uint64_t unclear = interval->loose ? VC_LONG_OPERATION_NS + interval->others_gpu_ns : 0; /* it may have begun later, and others' parts are guessed */
    return now_ns > interval->from_ns + interval->estimate_ns + unclear;
}

/* Where none is known its begin is 0. */
static bool begins_in_own_slice(const struct vc_interval *interval)
{
    return interval->from_ns < interval->slice_from_ns + VC_LONG_OPERATION_NS;
}

/* What others can have had of an interval: where it begins in a slice of ours, nothing of that. Another tenant has the card in turns with us, while it had work there; of siblings, or of what stopped processes
 * left, nobody knows how many contexts there are, nor until when. */
static uint64_t most_of_others(const struct vc_interval *interval, uint64_t to_ns)
{
    uint64_t slice = VC_LONG_OPERATION_NS, from = interval->slice_from_ns;
    if (!begins_in_own_slice(interval))
        return to_ns > interval->from_ns + SWITCHES_NS ? to_ns - interval->from_ns - SWITCHES_NS : 0;
    if (interval->siblings || interval->stopped)
        return to_ns > from + slice ? to_ns - from - slice : 0;
    uint64_t until = vc_earlier(interval->contended_until_ns, to_ns), beside = until > from ? until - from : 0, rest = beside % (2 * slice);
    return (beside - rest) / 2 + (rest > slice ? rest - slice : 0);
}

/* Others' part of what of it no other interval has covered, and (`*rest_ns`) what they had by their clock that it can't hold. What they had in the rest was taken off the intervals that paid for it. */
static uint64_t part_of_others(const struct vc_interval *interval, uint64_t *rest_ns)
{
    uint64_t own = interval->uncovered_ns, to = vc_later(interval->to_ns, interval->covered_until_ns), length = to > interval->from_ns ? to - interval->from_ns : 0;
    double part = own < length ? (double)own / (double)length : 1;
    uint64_t others = (uint64_t)((double)interval->others_gpu_ns * part) + interval->put_off_ns, most = (uint64_t)((double)most_of_others(interval, to) * part);
    *rest_ns = others - vc_earlier(others, most);
    return others - *rest_ns;
}

void vc_interval_close(const struct vc_interval *interval, struct vc_slice *slice)
{
    bool opens = interval->slice_from_ns == interval->from_ns; /* what others had first was before it */
    part_of_others(interval, &slice->put_off_ns);
    slice->put_off_ns = opens ? 0 : vc_earlier(slice->put_off_ns, VC_LONG_OPERATION_NS);
}

uint64_t vc_interval_own(const struct vc_interval *interval)
{
    uint64_t rest, own = interval->uncovered_ns, others = part_of_others(interval, &rest);
    bool known = begins_in_own_slice(interval) && !interval->siblings && !interval->stopped; /* when others can have had it */
    return vc_later(own > others ? own - others : 0, known ? 0 : own / 5);
}

/* Where others' slices may be inside, short operations are charged what was learnt of them, as long as that can be and is proven. A cost that varies is
 * none, unless it comes near to the mean: of all such operations the longest run on into others' leases. What may begin at any time, because its stream had something
 * else to do before, lies among others' slices always. */
static bool can_be(const struct vc_interval *interval, bool doubted)
{
    uint64_t estimate = interval->estimate_ns;
    bool far = interval->behind || interval->beside || vc_interval_own(interval) > estimate + estimate / (doubted ? 4 : 2);
    bool varies = interval->risk_ns == VC_UNPROVEN_NS || (far && (interval->risk_ns != 0 || doubted));
    uint64_t more = interval->unclear ? 2 * estimate + SWITCHES_NS : vc_later(estimate / 2, VC_LONG_OPERATION_NS); /* a few of others' operations */
    return !interval->unknown && !varies && estimate < interval->operations * VC_LONG_OPERATION_NS &&
           vc_interval_own(interval) <= estimate + more + vc_earlier(interval->others_gpu_ns / 2, OTHERS_UNTOLD_NS);
}

/* Side by side, or among siblings: one that is hardly longer than was thought has no slice of another inside, which costs two switches
 * at least. One of which nothing is known has none of a sibling's if it is shorter than a slice: what they were charged meanwhile runs later. */
static bool has_no_slice(const struct vc_interval *interval)
{
    if (interval->unknown)
        return interval->siblings && interval->uncovered_ns < VC_LONG_OPERATION_NS;
    return !interval->loose && !vc_interval_has_gaps(interval) && interval->slack_ns <= SLOW_CALL_NS &&
           interval->uncovered_ns <= interval->estimate_ns + interval->slack_ns + SWITCHES_NS;
}

/* It began with a mark between two operations, and is so short that the mark's own time is a good part of it. */
static bool is_mostly_mark(const struct vc_interval *interval)
{
    return !interval->from_idle && !interval->loose && interval->uncovered_ns < MARK_TELLS_NS;
}

/* Other streams of the process have paid a part of it. The card's clock resolves no less. */
static bool is_common(const struct vc_interval *interval, uint64_t length_ns)
{
    return interval->uncovered_ns + vc_earlier(CLOCK_RESOLVES_NS, length_ns / 16) < length_ns;
}

/* All of it is charged, else a call that is held up would hide what it began. */
static bool is_unproven(const struct vc_interval *interval)
{
    return interval->unknown || interval->risk_ns == VC_UNPROVEN_NS;
}

/* Nobody else was on the card. Where it may have been idle meanwhile the truth lies between two bounds, and an
 * estimate between them is as good as any: one that followed the upper bound would grow to what the host takes. */
static struct vc_settlement settle_alone(const struct vc_interval *interval, enum vc_evidence evidence)
{
    uint64_t most = interval->uncovered_ns, estimate = interval->estimate_ns;
    struct vc_settlement settlement = {most, most, evidence, 0};
    /* Its thread was held up until its end mark was recorded, which found it done: it may have ended long before. All of it is charged, but no cost varies by that. */
    if (interval->over && !is_unproven(interval) && most > estimate + HELD_UP_NS && most < VC_MARK_NS)
        settlement.evidence = VC_EVIDENCE_UPPER_BOUND;
    uint64_t idle = vc_interval_has_gaps(interval) ? most : vc_earlier(interval->slack_ns, most);
    bool told = idle != 0 && idle == interval->slack_ns && idle <= SLOW_CALL_NS && !interval->over; /* else its work may have been done within the call */
    if (told)
        settlement.measured_ns = most - idle;
    else if (idle != 0 && estimate < most)
        settlement.measured_ns = vc_later(estimate, most - idle);
    else if (is_mostly_mark(interval) && interval->unknown)
        settlement.measured_ns = most - vc_earlier(MARK_COST_NS / 2, most / 2);
    else if (is_mostly_mark(interval) && estimate < most && most < estimate + 2 * MARK_COST_NS)
        settlement.measured_ns = estimate;
    else
        return settlement;
    settlement.charged_ns = is_unproven(interval) ? most : settlement.measured_ns;
    if (!told && idle != 0)
        settlement.evidence = VC_EVIDENCE_UPPER_BOUND;
    return settlement;
}

/* What other streams of the process did within it explains how long it lasted: that tells nothing of its own operations, but where all of
 * it was shorter than they were thought to be. */
static void judge_beside(const struct vc_interval *interval, uint64_t length_ns, struct vc_settlement *settlement)
{
    uint64_t launched = interval->launched_meanwhile_ns;
    bool beside = interval->joined || is_common(interval, length_ns);
    if (!beside || interval->unknown)
        return;
    if (length_ns < interval->estimate_ns)
        settlement->evidence = VC_EVIDENCE_UPPER_BOUND;
    else if (interval->uncovered_ns < interval->estimate_ns || length_ns <= launched + launched / 2 + MARK_TELLS_NS)
        settlement->evidence = VC_EVIDENCE_BESIDE;
    else
        return;
    settlement->measured_ns = length_ns;
}

/* Streams beside each other: whose interval is settled first has their common time, and the others nothing, but each is charged its estimate
 * at most. What one has too much of pays for what the others have too little of. */
static uint64_t even_out(struct vc_busy *busy, const struct vc_interval *interval, uint64_t length_ns)
{
    uint64_t estimate = interval->estimate_ns, fresh = interval->uncovered_ns, charged = vc_earlier(estimate, fresh);
    busy->unpaid_ns += fresh - charged;
    busy->spared_ns += vc_earlier(estimate - charged, length_ns - vc_earlier(fresh, length_ns));
    uint64_t more = vc_earlier(busy->unpaid_ns, busy->spared_ns);
    busy->unpaid_ns -= more;
    busy->spared_ns -= more;
    return charged + more;
}

void vc_interval_leave_slack(const struct vc_busy *busy, struct vc_interval *interval, uint64_t to_ns)
{
    uint64_t slack = interval->slack_ns, estimate = interval->estimate_ns, until;
    if (slack == 0 || to_ns <= interval->from_ns || interval->loose || interval->covered_until_ns != 0 || is_unproven(interval))
        return;
    uint64_t most = vc_busy_fresh(busy, interval->from_ns, to_ns, 0, &until);
    bool ended = to_ns == interval->to_ns;
    if (ended && (slack > SLOW_CALL_NS || interval->over)) /* its work may have been done within the call */
        slack = vc_earlier(slack, most > estimate ? most - estimate : 0);
    interval->covered_until_ns = vc_earlier(interval->from_ns + slack, to_ns);
    interval->uncovered_ns += vc_busy_fresh(busy, interval->from_ns, interval->covered_until_ns, 0, &until);
}

/* What an interval is not charged for it does not cover, or what others did there would be paid by nobody. Where the card may have been idle within it, its work is
 * taken to lie at its begin. */
static void cover_work(struct vc_busy *busy, struct vc_interval *interval)
{
    bool gaps = vc_interval_has_gaps(interval) && !is_unproven(interval);
    if (!gaps)
        vc_interval_leave_slack(busy, interval, interval->to_ns);
    uint64_t from = vc_later(interval->from_ns, interval->covered_until_ns), to = interval->to_ns, until, estimate = interval->estimate_ns;
    uint64_t paid = vc_earlier(interval->uncovered_ns, estimate);
    uint64_t rest = gaps && to > from ? vc_busy_fresh(busy, from, to, estimate - paid, &until) : 0;
    if (rest > estimate - paid) {
        vc_interval_cover(busy, interval, until);
        interval->uncovered_ns += rest - (estimate - paid);
    } else {
        vc_interval_cover(busy, interval, to);
    }
}

/* Among other processes of the container, which have the rest as far as that was charged: what those were charged lately may have run before, within or behind it, so the truth lies between two
 * bounds, and what was learnt between them is as good as any. */
static struct vc_settlement settle_amid_siblings(struct vc_busy *busy, const struct vc_interval *interval, uint64_t length_ns)
{
    uint64_t fresh = interval->uncovered_ns, others = interval->others_gpu_ns;
    if (fresh <= interval->estimate_ns + others)
        return (struct vc_settlement){even_out(busy, interval, length_ns), fresh, VC_EVIDENCE_UPPER_BOUND, 0};
    return (struct vc_settlement){fresh - others, fresh - others, VC_EVIDENCE_LONG_OVERLAP, 0};
}

/* What a stopped process left on the card is believed to be there until somebody knows better. It made a long operation longer, or it was not there; and no cost is known better by what it may have had. */
static bool settle_beside_stopped(const struct vc_interval *interval, struct vc_settlement *settlement)
{
    uint64_t estimate = interval->estimate_ns;
    if (!interval->stopped || interval->unknown || estimate < interval->operations * VC_LONG_OPERATION_NS)
        return false;
    bool tells = interval->uncovered_ns < estimate || settlement->charged_ns > VC_VARIES_FACTOR * estimate;
    settlement->evidence = tells ? VC_EVIDENCE_LONG_OVERLAP : VC_EVIDENCE_BESIDE;
    if (interval->uncovered_ns < estimate + interval->others_gpu_ns / 4 * 3)
        settlement->charged_ns = settlement->measured_ns = vc_later(settlement->charged_ns, vc_earlier(estimate, interval->uncovered_ns));
    return true;
}

static uint64_t slices_of_others(const struct vc_interval *interval)
{
    return (interval->others_gpu_ns + VC_LONG_OPERATION_NS / 2) / VC_LONG_OPERATION_NS;
}

/* It lasted as long as was thought and whole slices of others do. What begins behind host work on a card that is nobody's has what is left of a slice that may end at any time, once others come. */
static bool slices_explain(const struct vc_interval *interval)
{
    uint64_t slices = slices_of_others(interval), estimate = interval->estimate_ns, length = interval->uncovered_ns;
    return slices != 0 && estimate + slices * VC_LONG_OPERATION_NS <= length + SWITCHES_NS && length <= estimate + slices * OTHERS_TURN_NS;
}

/* What others had is a guess for one interval, and as often too much as too little for many. Where they launch meanwhile, or were stopped, or where nobody knows when it began (a slice of
 * theirs before is no part of it), it is worth nothing. */
static int64_t beyond(const struct vc_interval *interval)
{
    if (interval->beside || interval->stopped || interval->loose || (interval->behind && slices_explain(interval)))
        return 0;
    return (int64_t)vc_interval_own(interval) - (int64_t)vc_earlier(interval->estimate_ns, interval->uncovered_ns);
}

/* Contexts have the card for whole slices: whoever had it at both ends of an interval left others none of it, or one slice, and so on, while equal parts of what they had in common lie somewhere
 * between. An estimate that lies between those two is as good as any, where nobody has doubts of it, or of what others had. */
static uint64_t own_by_slices(const struct vc_interval *interval)
{
    uint64_t own = vc_interval_own(interval), length = interval->uncovered_ns, estimate = interval->estimate_ns;
    bool guessed = interval->unknown || interval->risk_ns != 0 || interval->doubted || interval->loose || interval->behind || interval->beside || interval->stopped || interval->slice_from_ns == interval->from_ns;
    if (guessed || estimate < interval->operations * VC_LONG_OPERATION_NS || length < interval->to_ns - interval->from_ns)
        return own;
    uint64_t slices = slices_of_others(interval);
    if (slices == 0) /* as long as that or all that passed */
        estimate = vc_earlier(estimate, length);
    bool between = estimate < own ? estimate + slices * OTHERS_TURN_NS >= length : estimate + (slices - (slices != 0)) * VC_LONG_OPERATION_NS <= length;
    return between ? estimate : own;
}

static struct vc_settlement settle(struct vc_busy *busy, struct vc_interval *interval, bool overlapped, bool beside)
{
    uint64_t length = interval->to_ns - interval->from_ns, estimate = interval->estimate_ns;
    bool loose = interval->loose && length <= 2 * estimate + VC_MARK_NS;
    if (loose) /* nobody knows when it began: no more than the estimate is taken from what runs beside it */
        interval->from_ns = interval->to_ns - vc_earlier(estimate, length);
    bool apart = busy->count == 0 || interval->from_ns > busy->segments[busy->count - 1].to_ns;
    if (apart)
        busy->unpaid_ns = busy->spared_ns = 0;
    if (overlapped)
        vc_interval_cover(busy, interval, interval->to_ns);
    else
        cover_work(busy, interval);
    bool amid = interval->siblings && !interval->unknown;
    if (!overlapped || (has_no_slice(interval) && (interval->siblings || (beside && !is_common(interval, length) && can_be(interval, interval->doubted)))))
        return settle_alone(interval, loose ? VC_EVIDENCE_UPPER_BOUND : VC_EVIDENCE_CLEAN);
    if (amid)
        return settle_amid_siblings(busy, interval, length);
    struct vc_settlement settlement = {.measured_ns = interval->uncovered_ns};
    if (can_be(interval, false))
        settlement.beyond_ns = beyond(interval);
    if (can_be(interval, interval->doubted)) {
        settlement.evidence = beside && !interval->unclear ? VC_EVIDENCE_BESIDE : VC_EVIDENCE_UPPER_BOUND; /* else nothing would follow what is always longer */
        settlement.charged_ns = even_out(busy, interval, length);
        return settlement;
    }
    settlement.charged_ns = settlement.measured_ns = own_by_slices(interval);
    if (settle_beside_stopped(interval, &settlement))
        return settlement;
    /* Side by side the parts are guessed: only what no part explains tells something. */
    bool explained = beside && !interval->unclear && settlement.charged_ns < VC_VARIES_FACTOR * estimate + 5 * VC_LONG_OPERATION_NS;
    settlement.evidence = explained ? VC_EVIDENCE_BESIDE : VC_EVIDENCE_LONG_OVERLAP;
    return settlement;
}

struct vc_settlement vc_interval_settle(struct vc_busy *busy, struct vc_interval *interval, bool overlapped, bool beside)
{
    uint64_t length = interval->to_ns - interval->from_ns;
    interval->beside = beside;
    struct vc_settlement settlement = settle(busy, interval, overlapped, beside);
    /* A slice of theirs that is taken for our own makes no cost vary. */
    bool longer = interval->uncovered_ns > interval->estimate_ns + SWITCHES_NS && settlement.charged_ns <= interval->estimate_ns + VC_LONG_OPERATION_NS;
    if (interval->amid && longer && !interval->unknown)
        settlement.evidence = VC_EVIDENCE_UPPER_BOUND;
    judge_beside(interval, length, &settlement);
    return settlement;
}
