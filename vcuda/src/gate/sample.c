/* Samples of the card against what was charged: their sum, and when it is too much. */
#include "gate/sample.h"

#include "base/atomic.h"
#include "base/clock.h"

/* What chance alone explains about once in ten minutes, by how much samples of a card that is busy for such a part of the time scatter: 110 ms for a half,
 * 52 ms for a tenth, if there is one each ms. */
static int64_t too_much_ns(uint64_t rate_ppm)
{
    return (int64_t)(20000000 + 360 * (rate_ppm * (1000000 - vc_earlier(rate_ppm, 1000000)) / 1000000));
}

/* Work that was charged in advance, and is seen later. */
static const int64_t LEAST_DOUBT = -VC_SURE / 10;
/* Where the file is as they left it, they are themselves sure before the arbiter is: else it would have all marked once more. */
static const int64_t SURE_OF_ALL = VC_SURE + VC_SURE / 4;
/* By so much no process is ever behind by chance: less would add up to something over many short ones. */
static const uint64_t LEAST_FOUND_NS = 100000000;
/* From here on somebody looks more often. */
static const int64_t SUSPICIOUS = VC_SURE / 10;
/* Under leases each sample is judged by itself, so nothing is seen later: fewer scatter less. */
static const int64_t LATE_PART = 5;
/* Nobody looked for so long: what was between, one sample does not tell. */
static const uint64_t LONGEST_NS = 10000000;
static const uint64_t LEAST_FOR_NS = 2000000000, MOST_FOR_NS = 64000000000, REMEMBERED_TIMES = 8;
/* An H100 needed 4.2 us, in another hour 22.8. */
static const uint64_t USUAL_LAUNCH_NS = 5000, MOST_LAUNCH_NS = 25000;
/* So much may pass for launches on their way that nobody knows to take that long, and of a second such a part besides. */
static const uint64_t DOUBTFUL_NS = 30000000, DOUBTFUL_PARTS = 32;
static const uint64_t MOST_DUE_NS = 1000000000;
enum { DRIFT_PARTS = 128 }; /* of the time that passes: chance alone never adds up */

/* What siblings told is behind what they had by so much; and what of that may be believed. */
static const uint64_t BELIEVED_NS = 10000000, MOST_BELIEVED_NS = 100000000;

static uint64_t grown(uint64_t from, uint64_t to)
{
    return to > from ? to - from : 0;
}

/* One that stands for so long may be off by that, whose part of the card is so much at most. */
static uint64_t scatter_us2(uint64_t whole_ns, uint64_t rate_ppm)
{
    uint64_t part = vc_earlier(rate_ppm, 500000);
    return whole_ns / 1000 * (whole_ns / 1000) * (part * (1000000 - part) / 1000000) / 1000000;
}

/* Twice the root: how far a sum of them may be off. */
static uint64_t off_by_ns(uint64_t scattered_us2)
{
    uint64_t root = 0;
    for (uint64_t bit = UINT64_C(1) << 31; bit != 0; bit /= 2)
        if ((root + bit) * (root + bit) <= scattered_us2)
            root += bit;
    return root * 2000;
}

static uint64_t launch_of(const struct vc_samples *samples)
{
    return samples->launches_learnt ? samples->launch_ns : USUAL_LAUNCH_NS;
}

/* Where everything is marked, what is seen beyond what is charged is the way of launches to the card: it takes what the card, its bus and its host make of it, and
 * nothing where work is queued before. Between what it surely is and what it can be it stays what it was taken to be. */
static void learn_launch(struct vc_samples *samples)
{
    if (samples->all_launches != 0) {
        uint64_t seen = samples->excess_ns > 0 ? (uint64_t)samples->excess_ns : 0, off = off_by_ns(samples->all_scatter_us2);
        uint64_t least = vc_earlier(grown(off, seen) * 5 / 4 / samples->all_launches, MOST_LAUNCH_NS);
        uint64_t most = (seen + off / 2) * 5 / 4 / samples->all_launches;
        samples->launch_ns = vc_later(least, vc_earlier(most, launch_of(samples)));
        samples->launches_learnt = true;
        samples->known_ns = vc_earlier(seen / samples->all_launches, samples->launch_ns);
    }
    samples->excess_ns = 0;
    samples->all_launches = samples->all_scatter_us2 = 0;
}

/* Siblings that say they are on the card have an equal part of it each, as far as they told of that much: what they say lies where a tenant can write. */
static uint64_t siblings_part(struct vc_samples *samples, const struct vc_sample *sample, uint64_t told_ns, uint64_t whole_ns)
{
    samples->believed_ns = vc_earlier(samples->believed_ns + told_ns + told_ns / 4, MOST_BELIEVED_NS);
    uint64_t part = vc_earlier(whole_ns - whole_ns / (1 + sample->siblings), samples->believed_ns);
    samples->believed_ns -= part;
    return part;
}

/* By how much more such a difference between what was seen and what was thought is doubted. Samples scatter less the more often they are taken. */
static int64_t times_of(uint64_t whole_ns)
{
    return whole_ns < VC_SAMPLE_NS / 2 ? VC_SAMPLE_NS / VC_SAMPLE_OFTEN_NS : 1;
}

static int64_t doubt_of(int64_t ns, uint64_t whole_ns, uint64_t rate_ppm)
{
    return ns * times_of(whole_ns) * (VC_SURE / 1000) / (too_much_ns(rate_ppm) / 1000);
}

static int64_t add_down_to(int64_t *sum, int64_t more, int64_t least)
{
    int64_t is = __atomic_add_fetch(sum, more, __ATOMIC_RELAXED);
    if (is < least)
        __atomic_compare_exchange_n(sum, &is, least, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return is;
}

/* Whether it is sure that something was not charged; the container's sums lie where a tenant can write. */
static bool is_sure(int64_t *unpaid_ns, int64_t *doubt, int64_t more_ns, int64_t more_doubt, uint64_t rate_ppm, uint64_t *due_ns)
{
    int64_t unpaid = add_down_to(unpaid_ns, more_ns, too_much_ns(rate_ppm) / 1000 * LEAST_DOUBT / (VC_SURE / 1000)), is = add_down_to(doubt, more_doubt, LEAST_DOUBT);
    if (is < VC_SURE || !__atomic_compare_exchange_n(doubt, &is, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        return false;
    bool ours = __atomic_compare_exchange_n(unpaid_ns, &unpaid, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    *due_ns += ours && unpaid > 0 ? vc_earlier((uint64_t)unpaid, MOST_DUE_NS) : 0;
    return true;
}

void vc_samples_mark_until(struct vc_samples *samples, uint64_t now_ns, uint64_t until_ns)
{
    uint64_t until = vc_earlier(until_ns, now_ns + MOST_FOR_NS);
    if (until <= vc_later(samples->all_until_ns, now_ns))
        return;
    samples->all_until_ns = until;
    samples->all_for_ns = until - now_ns;
}

void vc_samples_pause(struct vc_samples *samples)
{
    samples->paused = true;
}

/* Until all is marked for long enough, which takes twice as long each time that it happens again. */
static void mark_for_longer(struct vc_samples *samples, uint64_t now_ns)
{
    uint64_t since = samples->all_until_ns;
    bool again = since != 0 && now_ns < since + REMEMBERED_TIMES * samples->all_for_ns;
    vc_samples_mark_until(samples, now_ns, now_ns + (again ? vc_later(2 * samples->all_for_ns, LEAST_FOR_NS) : LEAST_FOR_NS));
}

/* Whoever launches so much that it could hide something there is measured until that is known; and again and again where a launch is thought to take longer than it does
 * anywhere else, since whoever can tell when it is measured may have taught that. */
static void doubt_launches(struct vc_samples *samples, uint64_t now_ns, uint64_t untold_ns, uint64_t whole_ns)
{
    samples->doubtful_ns += untold_ns;
    samples->doubtful_ns -= vc_earlier(whole_ns / DOUBTFUL_PARTS, samples->doubtful_ns);
    if (samples->doubtful_ns < DOUBTFUL_NS)
        return;
    samples->doubtful_ns = 0;
    vc_samples_mark_until(samples, now_ns, now_ns + LEAST_FOR_NS);
}

/* While others wait, most of what is not charged is seen once its lease is over, in theirs. Within its own the card is busy when that was not predicted, or it is not: where
 * estimates are right, as often. */
static void look_for_late(struct vc_samples *samples, const struct vc_sample *sample, uint64_t whole_ns, uint64_t others_ns)
{
    int64_t part = (int64_t)(whole_ns / (1 + sample->siblings));
    int64_t late = (sample->busy - sample->predicted) * part - part / DRIFT_PARTS - (int64_t)(sample->beside ? others_ns : 0);
    if (add_down_to(&samples->late, LATE_PART * doubt_of(late, whole_ns, sample->rate_ppm), LEAST_DOUBT) < VC_SURE)
        return;
    samples->late = 0;
    mark_for_longer(samples, sample->now_ns);
}

bool vc_samples_suspect(uint64_t all_until_ns, uint64_t all_for_ns, uint64_t now_ns)
{
    return all_until_ns != 0 && now_ns < all_until_ns + REMEMBERED_TIMES * vc_earlier(all_for_ns, MOST_FOR_NS);
}

static int64_t net_of(const struct vc_samples_told *told)
{
    int64_t net = (int64_t)(told->more_ns - told->less_ns), least = -(int64_t)vc_earlier(told->charged_ns - told->before_ns, LEAST_FOUND_NS);
    return net < least ? least : net;
}

int64_t vc_samples_found(struct vc_samples_told *last, struct vc_samples_told told)
{
    bool ended = told.charged_ns < last->charged_ns, anew = told.more_ns < last->more_ns || told.less_ns < last->less_ns;
    if (ended || anew)
        *last = (struct vc_samples_told){.before_ns = ended ? 0 : last->charged_ns};
    told.before_ns = last->before_ns;
    int64_t found = net_of(&told) - (ended || anew ? 0 : net_of(last));
    *last = told;
    return found;
}

void vc_samples_hear(struct vc_samples *all, uint64_t now_ns, int64_t found_ns, uint64_t rate_ppm)
{
    if (add_down_to(&all->doubt, doubt_of(found_ns, VC_SAMPLE_NS, rate_ppm), LEAST_DOUBT) < SURE_OF_ALL)
        return;
    all->doubt = 0;
    mark_for_longer(all, now_ns);
}

uint64_t vc_samples_wait_ns(const struct vc_samples *samples, const struct vc_card_usage *container)
{
    bool often = samples->before.now_ns < samples->all_until_ns || samples->doubt > SUSPICIOUS || samples->late > SUSPICIOUS || samples->before.doubt > SUSPICIOUS || (container && vc_load_relaxed(&container->doubt) > SUSPICIOUS);
    return often ? VC_SAMPLE_OFTEN_NS : VC_SAMPLE_NS;
}

/* What others of the container found, and remember. */
static void take_over(struct vc_samples *samples, uint64_t all_until_ns, uint64_t all_for_ns, uint64_t now_ns)
{
    uint64_t until = vc_earlier(all_until_ns, now_ns + MOST_FOR_NS);
    if (until <= samples->all_until_ns)
        return;
    samples->all_until_ns = until;
    samples->all_for_ns = vc_later(vc_earlier(all_for_ns, MOST_FOR_NS), until > now_ns ? until - now_ns : 0);
}

static void note_found(struct vc_samples *samples, int64_t ns)
{
    if (ns > 0)
        samples->more_ns += (uint64_t)ns;
    else
        samples->less_ns += vc_earlier((uint64_t)-ns, samples->more_ns + LEAST_FOUND_NS - samples->less_ns);
}

static void tell(const struct vc_samples *samples, struct vc_card_usage *container)
{
    vc_raise_to(&container->all_until_ns, samples->all_until_ns);
    vc_store_relaxed(&container->all_for_ns, samples->all_for_ns);
    vc_store_relaxed(&container->doubt, 0);
}

void vc_samples_mark_for_longer(struct vc_samples *samples, struct vc_card_usage *container, uint64_t now_ns)
{
    if (now_ns < samples->all_until_ns)
        return;
    mark_for_longer(samples, now_ns);
    if (container)
        tell(samples, container);
}

/* What was on the card when somebody should have looked, or was launched since the last look, was what there was then. */
static bool was_busy(const struct vc_sample *before, const struct vc_sample *sample)
{
    return sample->busy || (sample->held && (before->busy || sample->launches != before->launches));
}

uint64_t vc_samples_add(struct vc_samples *samples, struct vc_card_usage *container, const struct vc_sample *seen)
{
    if (container)
        take_over(samples, vc_load_relaxed(&container->all_until_ns), vc_load_relaxed(&container->all_for_ns), seen->now_ns);
    take_over(samples, seen->all_until_ns, seen->all_for_ns, seen->now_ns);
    const struct vc_sample before = samples->before;
    samples->before = *seen;
    struct vc_sample taken = *seen, *sample = &taken;
    taken.busy = was_busy(&before, seen);
    bool paused = samples->paused;
    samples->paused = false;
    uint64_t passed = sample->now_ns - before.now_ns;
    if (before.now_ns == 0)
        samples->believed_ns = BELIEVED_NS;
    if (before.now_ns == 0)
        return 0;
    /* The first one after a pause stands for as much as any other does on average: it is sooner behind a launch, as work is. */
    uint64_t whole = paused ? VC_SAMPLE_NS : vc_earlier(passed, LONGEST_NS), others = grown(before.tenants_ns, sample->tenants_ns);
    if ((sample->leased || sample->beside) && sample->now_ns >= samples->all_until_ns)
        look_for_late(samples, sample, whole, others);
    if (!sample->clear || !before.clear)
        return 0;
    uint64_t siblings_told = grown(before.siblings_ns, sample->siblings_ns), siblings = siblings_part(samples, sample, siblings_told, sample->busy ? whole : 0);
    int64_t charged = sample->charged_ns - before.charged_ns, unpaid = (int64_t)(sample->busy ? whole - siblings : 0) - charged - (int64_t)others;
    uint64_t launches = sample->launches - before.launches;
    if (sample->now_ns < samples->all_until_ns) {
        if (sample->siblings != 0 || before.siblings != 0 || sample->held) /* what waits for their slices is not on its way; and nobody knows what there was */
            return 0;
        bool settled = before.now_ns > samples->all_until_ns - samples->all_for_ns; /* what was charged for the samples was charged before */
        samples->excess_ns += settled ? unpaid : 0;
        samples->all_launches += launches;
        samples->all_scatter_us2 += scatter_us2(whole, sample->rate_ppm);
        return 0;
    }
    if (samples->all_scatter_us2 != 0)
        learn_launch(samples);
    uint64_t parts = 1 + sample->siblings; /* where the card is divided, so is what is seen on its way */
    uint64_t calls = launches * launch_of(samples) / parts + (sample->begins - before.begins) * VC_SAMPLE_BEGIN_NS;
    uint64_t untold = launches * (launch_of(samples) - vc_earlier(samples->known_ns, USUAL_LAUNCH_NS)) / parts;
    doubt_launches(samples, sample->now_ns, untold, whole);
    unpaid -= (int64_t)(calls + whole / DRIFT_PARTS);
    note_found(samples, unpaid * times_of(whole));
    samples->spared_ns += launches * (launch_of(samples) - samples->known_ns) / parts + whole / DRIFT_PARTS;
    if (samples->doubt <= LEAST_DOUBT)
        samples->spared_ns = 0;
    int64_t doubt = doubt_of(unpaid, whole, sample->rate_ppm);
    uint64_t due = 0;
    bool sure = is_sure(&samples->unpaid_ns, &samples->doubt, unpaid, doubt, sample->rate_ppm, &due);
    if (container)
        sure |= is_sure(&container->unpaid_ns, &container->doubt, unpaid - (int64_t)due, sure ? 0 : doubt, sample->rate_ppm, &due);
    if (!sure)
        return 0;
    mark_for_longer(samples, sample->now_ns);
    due += samples->spared_ns; /* whoever is sure to hide something has used that, too */
    samples->less_ns = vc_later(samples->less_ns, samples->more_ns); /* that is charged */
    samples->unpaid_ns = samples->doubt = 0;
    samples->spared_ns = 0;
    if (container)
        tell(samples, container);
    return due;
}
