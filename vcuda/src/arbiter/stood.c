/* What passes while processes stand still with work on the card; see stood.h. */
#include "arbiter/stood.h"

#include <string.h>

#include "base/clock.h"

/* Others never had nearly all of it. */
static const double OTHERS_PART = 0.8;
static const double MOST_AHEAD_NS = 5e6;

static double grown(uint64_t from, uint64_t to)
{
    return (int64_t)(to - from) > 0 ? (double)(to - from) : 0;
}

/* It tells what it had. Where the file hides it somebody else may have taken its locks as it was killed: then that stays charged, less what was told meanwhile. */
static void goes_on(struct vc_stood *stood, struct vc_stood_slot *slot)
{
    if (!stood->hides)
        stood->charged_ns -= slot->charged_ns;
    stood->excused_ns -= slot->excused_ns;
    slot->charged_ns = slot->fresh_ns = slot->excused_ns = 0;
}

/* What it was charged it had, as far as anybody knows, and what it was excused, too. */
static void end(struct vc_stood *stood, struct vc_stood_slot *slot)
{
    stood->charged_ns += slot->excused_ns;
    stood->excused_ns -= slot->excused_ns;
    *slot = (struct vc_stood_slot){0};
}

void vc_stood_tells(struct vc_stood *stood, uint32_t index, uint64_t since_ns, uint64_t until_ns)
{
    struct vc_stood_slot *slot = &stood->slots[index];
    stood->open += (unsigned)(until_ns != 0) - (unsigned)(slot->until_ns != 0);
    if (since_ns != slot->since_ns) /* another process */
        end(stood, slot);
    else if (until_ns != slot->until_ns)
        goes_on(stood, slot);
    slot->since_ns = since_ns;
    slot->until_ns = until_ns;
}

static bool stands(const struct vc_stood *stood, const struct vc_stood_slot *slot, uint64_t now_ns)
{
    uint64_t after = stood->hidden ? 0 : VC_STANDS_AFTER_NS, most = stood->hidden ? VC_STOOD_HIDDEN_MOST_NS : VC_STOOD_MOST_NS;
    return slot->until_ns != 0 && slot->until_ns + after < now_ns && slot->charged_ns < (double)most;
}

uint64_t vc_stood_next(const struct vc_stood *stood, uint64_t now_ns)
{
    uint64_t next = UINT64_MAX;
    for (const struct vc_stood_slot *slot = stood->slots; stood->open != 0 && slot < stood->slots + VC_MAX_SLOTS; slot++)
        if (slot->until_ns != 0 && slot->until_ns + VC_STANDS_AFTER_NS >= now_ns)
            next = vc_earlier(next, slot->until_ns + VC_STANDS_AFTER_NS + 1);
    return next;
}

/* `part` of what is not known is known now. */
static void make_known(struct vc_stood *stood, double part, bool busy)
{
    for (struct vc_stood_slot *slot = stood->slots; slot < stood->slots + VC_MAX_SLOTS; slot++) {
        double known = slot->fresh_ns * part;
        slot->fresh_ns -= known;
        if (!busy) {
            slot->charged_ns -= known;
            stood->charged_ns -= known;
            slot->excused_ns += known;
            stood->excused_ns += known;
        }
    }
}

void vc_stood_asked(struct vc_stood *stood, uint64_t at_ns, bool busy)
{
    bool believed = busy || (!stood->hidden && stood->excused_ns < (double)VC_STOOD_MOST_NS);
    if (stood->until_ns == 0 || at_ns <= stood->fresh_from_ns || !believed)
        return;
    uint64_t fresh = stood->until_ns - stood->fresh_from_ns, known = at_ns - stood->fresh_from_ns;
    make_known(stood, known >= fresh ? 1 : (double)known / (double)fresh, busy);
    stood->fresh_from_ns = vc_earlier(at_ns, stood->until_ns);
}

/* What was known at the latest look before then, or at the first that is remembered: what was told or others had in between is taken off, too. */
static unsigned look_before(const struct vc_stood *stood, uint64_t from_ns)
{
    unsigned i = 0;
    while (i + 1 < VC_STOOD_LOOKS && stood->looks[i].at_ns > from_ns && stood->looks[i + 1].at_ns != 0)
        i++;
    return i;
}

static void charge(struct vc_stood *stood, uint64_t now_ns, double ns)
{
    for (struct vc_stood_slot *slot = stood->slots; slot < stood->slots + VC_MAX_SLOTS; slot++)
        if (stands(stood, slot, now_ns)) {
            slot->charged_ns += ns / stood->standing;
            slot->fresh_ns += ns / stood->standing;
        }
    stood->charged_ns += ns;
}

/* What passed since `from_ns`, when the clocks were `then`, less what was told and others had. Who runs tells several milliseconds at once: what is more than passed is taken off later. */
static double passed_ns(struct vc_stood *stood, uint64_t from_ns, const struct vc_stood_clocks *then, const struct vc_stood_clocks *now)
{
    double passed = (double)(now->at_ns - from_ns) - grown(then->told_ns, now->told_ns) - stood->ahead_ns;
    stood->ahead_ns = passed > 0 ? 0 : -passed > MOST_AHEAD_NS ? MOST_AHEAD_NS : -passed;
    passed = passed < 0 ? 0 : passed;
    double others = grown(then->others_ns, now->others_ns), most = passed * OTHERS_PART;
    return passed - (others < most ? others : most);
}

static void pass(struct vc_stood *stood, uint64_t from_ns, const struct vc_stood_clocks *then, const struct vc_stood_clocks *now)
{
    if (now->at_ns <= from_ns || then->at_ns == 0)
        return;
    charge(stood, now->at_ns, passed_ns(stood, from_ns, then, now));
    stood->until_ns = now->at_ns;
    stood->then = *now;
    if (now->at_ns > stood->fresh_from_ns + VC_STOOD_UNASKED_NS) {
        make_known(stood, 1, true);
        stood->fresh_from_ns = now->at_ns;
    }
}

/* It tells whole milliseconds, and is charged from the next one on: half of one for nothing, 300 times a second, would cost honest ones more than that gives others. */
void vc_stood_ends(struct vc_stood *stood, uint32_t index, uint64_t ended_ns, uint64_t now_ns, uint64_t told_ns, uint64_t others_ns)
{
    struct vc_stood_clocks now = {ended_ns < now_ns ? ended_ns : now_ns, told_ns, others_ns};
    uint64_t until = stood->slots[index].until_ns + (stood->hides ? 0 : VC_STOOD_TOLD_NS), from = vc_later(until, stood->then.at_ns);
    const struct vc_stood_clocks *then = from == until ? &stood->looks[look_before(stood, from)] : &stood->then;
    if (stood->slots[index].until_ns == 0 || now.at_ns <= from)
        return;
    stood->charged_ns += passed_ns(stood, from, then, &now);
    stood->then = now;
}

static void remember(struct vc_stood *stood, const struct vc_stood_clocks *now)
{
    if (stood->looks[0].at_ns != 0 && now->at_ns < stood->looks[0].at_ns + VC_STOOD_LOOK_NS)
        return;
    memmove(&stood->looks[1], &stood->looks[0], sizeof stood->looks - sizeof stood->looks[0]);
    stood->looks[0] = *now;
}

void vc_stood_look(struct vc_stood *stood, uint64_t now_ns, uint64_t told_ns, uint64_t others_ns)
{
    struct vc_stood_clocks now = {now_ns, told_ns, others_ns};
    uint64_t from = UINT64_MAX;
    stood->standing = 0;
    for (const struct vc_stood_slot *slot = stood->slots; stood->open != 0 && slot < stood->slots + VC_MAX_SLOTS; slot++)
        if (stands(stood, slot, now_ns)) {
            from = vc_earlier(from, slot->until_ns);
            stood->standing++;
        }
    bool begins = stood->until_ns == 0;
    if (stood->standing == 0) {
        stood->until_ns = 0;
        stood->ahead_ns = 0;
    } else if (begins) {
        from = vc_later(from, stood->then.at_ns); /* what passed until then was charged to one that stood still before */
        stood->fresh_from_ns = from;
        pass(stood, from, &stood->looks[look_before(stood, from)], &now);
    } else {
        struct vc_stood_clocks then = stood->then;
        pass(stood, stood->until_ns, &then, &now);
    }
    remember(stood, &now);
}

double vc_stood_counts(const struct vc_stood *stood, uint64_t now_ns)
{
    double ns = stood->charged_ns;
    for (const struct vc_stood_slot *slot = stood->slots; stood->open != 0 && !stood->hidden && slot < stood->slots + VC_MAX_SLOTS; slot++)
        if (now_ns < slot->until_ns + VC_STOOD_COUNTS_NS)
            ns -= slot->charged_ns;
    return ns;
}
