/* What an interval was: where it began, what of it is its own, what that is charged and what it teaches.
 *
 * Arithmetic only, on what the gate and the helper know of it.
 */
#ifndef VC_GATE_SETTLE_H
#define VC_GATE_SETTLE_H

#include <stdbool.h>
#include <stdint.h>

#include "gate/busy.h"
#include "gate/estimate.h"

enum {
    VC_MARK_NS = 1000000,             /* estimated work after which an interval is measured */
    VC_LOOK_NS = 50000,               /* no look at what is on its way comes sooner behind another */
    VC_LAUNCH_GAP_NS = 4000,          /* from a launch to the start of its work on an idle card: what the call takes the host */
};

/* What is known of the times of a mark. CLOCK_MONOTONIC ns. */
struct vc_mark_times {
    uint64_t recording_ns, recorded_ns; /* before and behind the driver's call: it is reached no earlier */
    /* The first operation behind it was handed over then, as far as that took no longer than VC_LAUNCH_GAP_NS; 0: not known. */
    uint64_t begins_ns;
    uint64_t stuck_ns;  /* … the rest of what it took: the work began before, within or behind it */
    uint64_t reached_ns; /* 0 until the helper knows */
};

/* Clocks of what others had of the card, to be read at both ends of an interval: other tenants while we had work on
 * it, as the arbiter saw it, and what other processes of the container were charged. */
struct vc_gate_others {
    uint64_t tenants_ns, siblings_ns;
};

/* … and when they were read. */
struct vc_others_look {
    uint64_t at_ns;
    struct vc_gate_others others;
};

/* The clocks at `at_ns`, where nobody looked between `from` and `to` (now): who was stopped or held up until now sees late that its work ended, and siblings went on
 * being charged. Tenants' parts grow only as long as we are predicted to have work, or siblings found us standing still and say that we have. */
struct vc_gate_others vc_others_at(const struct vc_gate_others *from, uint64_t from_ns, const struct vc_gate_others *to, uint64_t now_ns, uint64_t at_ns);

/* An interval between two events on one stream, as seen by the helper. Times in CLOCK_MONOTONIC ns. */
struct vc_interval {
    uint64_t from_ns, to_ns;
    uint64_t estimate_ns;  /* what was charged for its operations at launch; 0 if unknown */
    uint64_t launched_ns;  /* vc_gate.launched_ns right after its last operation */
    uint64_t sequence;     /* lease under which it was launched */
    uint64_t others_gpu_ns; /* vc_gate_others_ns while it lasted */
    uint64_t contended_until_ns; /* other tenants had work on the card until then at the latest, as far as the arbiter knows */
    struct vc_gate_others others_then; /* loose: when its first operation was launched */
    uint64_t risk_ns;      /* what it may cost at most, where that varies */
    bool doubted;          /* … as anything of its container's may */
    uint64_t seen_then_ns; /* vc_gate.seen_ns when it was opened */
    uint64_t launched_meanwhile_ns; /* what this process launched, on all streams, and may have run in it */
    bool joined;           /* streams of this process ran beside each other, or did lately */
    uint64_t covered_until_ns, uncovered_ns; /* so far it has been looked at, and no other interval had that part */
    uint64_t advance_ns;   /* charged beyond its estimate while it lasts … */
    uint64_t siblings_ns;  /* … by siblings, of that */
    uint32_t operations;
    bool unknown;          /* its (only) operation had no estimate */
    bool loose;            /* no mark tells its begin: `from_ns` is when its first operation was launched */
    uint64_t slack_ns;     /* so much of its beginning the launch took the host: the card may have been idle meanwhile */
    bool behind;           /* its stream had something else to do before it: what it is beside was not known when it was launched */
    bool beside;           /* other tenants launched meanwhile, or it is `unclear`: */
    bool unclear;          /* others launched nothing meanwhile, but what they had launched before could begin */
    bool stopped;          /* of other tenants some merely may have been on the card: what they left there, nobody says until when */
    bool siblings;         /* only other processes of the container may be inside … */
    bool amid;             /* … and such had work lately */
    bool from_idle;        /* the card was idle at its mark */
    bool waited;           /* its first operation was there long before its mark was reached: both waited together, for the card or for host work before them */
    uint64_t slice_from_ns; /* when the slice of the card in which it begins began (vc_interval_open); 0: not known … */
    uint64_t put_off_ns;   /* … and what others had of the card by their clock while that lasted: behind it, then */
    bool host_bound;       /* the card had done all when the end mark was recorded: it may have been idle in between */
    bool over;             /* … and had it before that mark was recorded: when, nothing tells */
    bool paused;           /* the end mark was recorded before its thread slept, not right behind the last operation */
    bool measurable;       /* false: the end was seen but the begin is not known: settle nothing */
};

/* What was seen late, several intervals at once, was marked before any of it began: what others had since then is not in each. The latest such interval's end, and the clock of other tenants as
 * far as their part is in those until then. */
struct vc_late {
    uint64_t to_ns, tenants_ns;
};

/* Whether an end was seen so late that nobody can have looked. */
bool vc_seen_late(uint64_t now_ns, uint64_t at_ns);

/* What other tenants had within one of them, whose begin was marked at `marked_ns`, when their clock said `then_ns`, while it says `tenants_ns` at its end: no more than it lasted longer than was thought, and
 * nothing where that is less than it takes a card to go to another context and back. What it waited for behind its mark was theirs; the rest may lie in those behind it. */
uint64_t vc_others_in_late(struct vc_late *latest, const struct vc_interval *interval, uint64_t marked_ns, uint64_t then_ns, uint64_t tenants_ns);

/* It began and ended between two looks: what other tenants had between these is spread evenly, else all of it would be in it, and in each that lies there, too. Moves their clock at its begin
 * (`before`) and at its end (`after`). */
void vc_others_between(const struct vc_others_look *look, const struct vc_others_look *next, const struct vc_interval *interval, struct vc_gate_others *before, struct vc_gate_others *after);

/* What became of it: how the estimates of its operations should follow. */
struct vc_settlement {
    uint64_t charged_ns;
    uint64_t measured_ns; /* what the estimates should have summed up to */
    enum vc_evidence evidence;
    int64_t beyond_ns;    /* by how much what was seen of it, others' parts taken out, exceeds what is charged where nothing is doubted */
};

/* The card may have been idle between its operations, or behind the last one. */
static inline bool vc_interval_has_gaps(const struct vc_interval *interval)
{
    return interval->host_bound && (interval->operations > 1 || interval->paused) && !interval->unknown;
}

/* Where the interval began that lasts until `until_ns`, or not yet ended then: where the card was idle at its mark, as much behind it as the host
 * handed its work over behind it. The card's own clock tells both: how late it is reached is the same for both, and
 * not known. And never before that; the mark may have been reached `uncertain_ns` later by the host's clock. */
void vc_interval_begin(struct vc_interval *interval, const struct vc_mark_times *from, uint64_t reached_ns, uint64_t until_ns,
                       uint64_t uncertain_ns);

/* It ended at that mark. */
void vc_interval_end(struct vc_interval *interval, const struct vc_mark_times *to);

/* While its launch took the host the card may have been idle, or busy with what other streams have to do, which is theirs to pay: so much of it is not covered as it is
 * not charged for, once it is known that it lasts until `to_ns`. Before it is looked at, and where no others' slices may be inside. */
void vc_interval_leave_slack(const struct vc_busy *busy, struct vc_interval *interval, uint64_t to_ns);

/* A context's latest slice of the card, as far as its intervals tell, in the order in which their ends are seen: when it began (0: not known), and the latest of these ends. */
struct vc_slice {
    uint64_t from_ns, ended_ns;
    uint64_t put_off_ns; /* others' part by their clock that the intervals of that slice can't hold: they had it behind that */
};

/* Whether it begins with a slice of its own, or within one. By the clock others have an equal part of all of it, but what they had first lies before that slice then, and nobody has the card within it but its context. Its
 * mark tells that, if nothing of its context lies before it (`first`): where it waits it waits for others' slices alone, or for host work while the card is anybody's, and it is reached where the card turns to its
 * context, with what was handed over by then. What follows at once is in that slice, too. */
void vc_interval_open(struct vc_interval *interval, bool first, struct vc_slice *slice);
/* It is settled. */
void vc_interval_close(const struct vc_interval *interval, struct vc_slice *slice);

/* Look at the interval up to `to_ns`: what of it no other interval has covered is its own. */
void vc_interval_cover(struct vc_busy *busy, struct vc_interval *interval, uint64_t to_ns);

/* When to look for its end again, which was marked at `recorded_ns` and is expected at `expected_ns`. Where its cost varies it may come at any time:
 * where nobody looks, what was charged too much is not given back, and who may have no more such work unseen waits for nothing. */
uint64_t vc_interval_look_again(const struct vc_interval *interval, uint64_t recorded_ns, uint64_t expected_ns, uint64_t now_ns);

/* Whether it lasts longer than was thought, as far as its begin tells. */
bool vc_interval_is_late(const struct vc_interval *interval, uint64_t now_ns);

/* What it had so far, without others' part as far as that is known, but never nearly nothing. */
uint64_t vc_interval_own(const struct vc_interval *interval);

/* Its end is known. `overlapped`: slices of other tenants, or of other processes of this container, may be inside;
 * `beside`: other tenants launched meanwhile. */
struct vc_settlement vc_interval_settle(struct vc_busy *busy, struct vc_interval *interval, bool overlapped, bool beside);

#endif
