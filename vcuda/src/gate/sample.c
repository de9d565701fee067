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
/* Nobody looked for so long: what was between, one sample does not tell. */
static const uint64_t LONGEST_NS = 10000000;
static const uint64_t LEAST_FOR_NS = 2000000000, MOST_FOR_NS = 64000000000;
/* An H100 needed 4.2 us, in another hour 22.8. */
static const uint64_t USUAL_LAUNCH_NS = 5000, MOST_LAUNCH_NS = 25000;
enum { DRIFT_PARTS = 128 }; /* of the time that passes: chance alone never adds up */

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

/* Where everything is marked, what is seen beyond what is charged is the way of launches to the card: it takes what the card, its bus and its host make of it. */
static void learn_launch(struct vc_samples *samples)
{
    int64_t surely = samples->excess_ns - scatter_ns(samples->all_samples);
    if (samples->all_launches != 0)
        samples->launch_ns = surely > 0 ? vc_earlier((uint64_t)surely * 5 / 4 / samples->all_launches, MOST_LAUNCH_NS) : VC_SAMPLE_LAUNCH_NS;
    samples->excess_ns = 0;
    samples->all_launches = samples->all_samples = 0;
}

uint64_t vc_samples_add(struct vc_samples *samples, const struct vc_sample *sample)
{
    const struct vc_sample before = samples->before;
    samples->before = *sample;
    uint64_t passed = sample->now_ns - before.now_ns;
    if (before.now_ns == 0 || !sample->clear || !before.clear)
        return 0;
    uint64_t whole = vc_earlier(passed, LONGEST_NS), others = grown(before.tenants_ns, sample->tenants_ns);
    uint64_t seen = sample->busy ? whole - vc_earlier(grown(before.siblings_ns, sample->siblings_ns), whole) : 0;
    int64_t unpaid = (int64_t)seen - (sample->charged_ns - before.charged_ns) - (int64_t)others;
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
    uint64_t each = samples->launch_ns ? vc_later(samples->launch_ns, VC_SAMPLE_LAUNCH_NS) : USUAL_LAUNCH_NS, calls = launches * each + (sample->begins - before.begins) * VC_SAMPLE_BEGIN_NS;
    samples->unpaid_ns += unpaid - (int64_t)(calls + passed / DRIFT_PARTS);
    if (samples->unpaid_ns < -ADVANCE_NS)
        samples->unpaid_ns = -ADVANCE_NS;
    if (samples->unpaid_ns < too_much_ns(sample->rate_ppm))
        return 0;
    uint64_t due = (uint64_t)samples->unpaid_ns, since = samples->all_until_ns;
    bool again = since != 0 && sample->now_ns < since + 8 * samples->all_for_ns;
    samples->all_for_ns = again ? vc_earlier(2 * samples->all_for_ns, MOST_FOR_NS) : LEAST_FOR_NS;
    samples->all_until_ns = sample->now_ns + samples->all_for_ns;
    samples->unpaid_ns = 0;
    return due;
}
