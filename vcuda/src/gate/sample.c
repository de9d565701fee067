/* Samples of the card against what was charged: their sum, and when it is too much. */
#include "gate/sample.h"

#include "base/clock.h"

/* What chance alone explains about once in ten minutes, by how much samples of a card that is busy for such a part of the time scatter: 100 ms for a half,
 * 49 ms for a tenth. */
static int64_t too_much_ns(uint64_t rate_ppm)
{
    return (int64_t)(20000000 + 320 * (rate_ppm * (1000000 - vc_earlier(rate_ppm, 1000000)) / 1000000));
}

/* Work that was charged in advance, and is seen later. */
static const int64_t ADVANCE_NS = 50000000;
/* Under leases each sample is judged by itself, so nothing is seen later: fewer scatter less. */
static const int64_t EARLY_NS = 2000000, LATE_PART = 5;
/* Nobody looked for so long: what was between, one sample does not tell. */
static const uint64_t LONGEST_NS = 10000000;
static const uint64_t LEAST_FOR_NS = 2000000000, MOST_FOR_NS = 64000000000;
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

/* Twice the root: how far such a sum of samples may be off. */
static int64_t scatter_ns(uint64_t samples)
{
    uint64_t root = 1;
    while (root * root < samples)
        root++;
    return (int64_t)(root * VC_SAMPLE_NS * 11 / 10);
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
        uint64_t seen = samples->excess_ns > 0 ? (uint64_t)samples->excess_ns : 0, off = scatter_ns(samples->all_samples);
        uint64_t least = vc_earlier(grown(off, seen) * 5 / 4 / samples->all_launches, MOST_LAUNCH_NS);
        uint64_t most = (seen + off / 2) * 5 / 4 / samples->all_launches;
        samples->launch_ns = vc_later(least, vc_earlier(most, launch_of(samples)));
        samples->launches_learnt = true;
        samples->known_ns = vc_earlier(seen / samples->all_launches, samples->launch_ns);
    }
    samples->excess_ns = 0;
    samples->all_launches = samples->all_samples = 0;
}

/* Siblings that say they are on the card have an equal part of it each, as far as they told of that much: what they say lies where a tenant can write. */
static uint64_t siblings_part(struct vc_samples *samples, const struct vc_sample *sample, uint64_t told_ns, uint64_t whole_ns)
{
    samples->believed_ns = vc_earlier(samples->believed_ns + told_ns + told_ns / 4, MOST_BELIEVED_NS);
    uint64_t part = vc_earlier(whole_ns - whole_ns / (1 + sample->siblings), samples->believed_ns);
    samples->believed_ns -= part;
    return part;
}

static uint64_t due_of(int64_t *unpaid_ns, int64_t more_ns, uint64_t rate_ppm)
{
    int64_t unpaid = __atomic_add_fetch(unpaid_ns, more_ns, __ATOMIC_RELAXED);
    if (unpaid < -ADVANCE_NS)
        __atomic_compare_exchange_n(unpaid_ns, &unpaid, -ADVANCE_NS, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    if (unpaid < too_much_ns(rate_ppm))
        return 0;
    bool ours = __atomic_compare_exchange_n(unpaid_ns, &unpaid, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
    return ours ? vc_earlier((uint64_t)unpaid, MOST_DUE_NS) : 0; /* the container's lies where a tenant can write */
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
    bool again = since != 0 && now_ns < since + 8 * samples->all_for_ns;
    vc_samples_mark_until(samples, now_ns, now_ns + (again ? vc_later(2 * samples->all_for_ns, LEAST_FOR_NS) : LEAST_FOR_NS));
}

/* Whoever launches so much that it could hide something there is measured until that is known. */
static void doubt_launches(struct vc_samples *samples, uint64_t now_ns, uint64_t launches, uint64_t whole_ns)
{
    samples->doubtful_ns += launches * (launch_of(samples) - samples->known_ns);
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
    samples->late_ns += (sample->busy - sample->predicted) * part - part / DRIFT_PARTS - (int64_t)(sample->beside ? others_ns : 0);
    if (samples->late_ns < -EARLY_NS)
        samples->late_ns = -EARLY_NS;
    if (samples->late_ns < too_much_ns(sample->rate_ppm) / LATE_PART)
        return;
    samples->late_ns = 0;
    mark_for_longer(samples, sample->now_ns);
}

uint64_t vc_samples_add(struct vc_samples *samples, int64_t *container_unpaid_ns, const struct vc_sample *sample)
{
    const struct vc_sample before = samples->before;
    samples->before = *sample;
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
        bool settled = before.now_ns > samples->all_until_ns - samples->all_for_ns; /* what was charged for the samples was charged before */
        samples->excess_ns += settled ? unpaid : 0;
        samples->all_launches += launches;
        samples->all_samples++;
        return 0;
    }
    if (samples->all_samples != 0)
        learn_launch(samples);
    uint64_t calls = launches * launch_of(samples) + (sample->begins - before.begins) * VC_SAMPLE_BEGIN_NS;
    doubt_launches(samples, sample->now_ns, launches, whole);
    unpaid -= (int64_t)(calls + whole / DRIFT_PARTS);
    uint64_t due = due_of(&samples->unpaid_ns, unpaid, sample->rate_ppm);
    if (container_unpaid_ns)
        due += due_of(container_unpaid_ns, unpaid - (int64_t)due, sample->rate_ppm);
    if (due == 0)
        return 0;
    mark_for_longer(samples, sample->now_ns);
    samples->unpaid_ns = 0;
    return due;
}
