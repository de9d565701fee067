/* The table of estimates: open addressing in static memory, keys claimed by compare-and-swap. */
#include "gate/estimate.h"

#include "base/atomic.h"

enum { TABLE_ENTRIES = 8192, PROBES = 32 };
static const double PEAK_KEPT = 1.0 - 1.0 / 4096; /* from each measurement to the next: for seconds */
static const uint64_t DOUBT_NS = 1000000;     /* as if so much had gone unmeasured */
static const double SURPRISING = 1.75, SURPRISING_MEAN = 1.4; /* times as long as it takes at least, and on average */
static const double SLICE_NS = 1900000;

static struct vc_estimate table[TABLE_ENTRIES];

static uint64_t mix(uint64_t value)
{
    value ^= value >> 33;
    value *= UINT64_C(0xff51afd7ed558ccd);
    value ^= value >> 33;
    value *= UINT64_C(0xc4ceb9fe1a85ec53);
    return value ^ (value >> 33);
}

/* Four steps per doubling: 4 × log2, rounded down. */
static uint64_t quarter_octave(uint64_t value)
{
    if (value < 4)
        return value;
    unsigned top = 63 - (unsigned)__builtin_clzll(value);
    return (uint64_t)top * 4 + ((value >> (top - 2)) & 3);
}

uint64_t vc_estimate_key(uint64_t kind, uint64_t handle, uint64_t size)
{
    uint64_t key = mix(handle ^ mix(kind << 32 ^ quarter_octave(size)));
    return key ? key : 1;
}

uint64_t vc_estimate_function_key(uint64_t function, uint64_t blocks, uint64_t threads)
{
    return vc_estimate_key(quarter_octave(threads) + 1, function, blocks);
}

struct vc_estimate *vc_estimate_find(uint64_t key)
{
    struct vc_estimate *entry = &table[key % TABLE_ENTRIES];
    for (unsigned probe = 0; probe < PROBES; probe++) {
        entry = &table[(key + probe) % TABLE_ENTRIES];
        uint64_t found = __atomic_load_n(&entry->key, __ATOMIC_RELAXED);
        if (found == key)
            return entry;
        if (found == 0 && __atomic_compare_exchange_n(&entry->key, &found, key, false, __ATOMIC_RELAXED,
                                                      __ATOMIC_RELAXED))
            return entry;
        if (found == key) /* another thread was faster */
            return entry;
    }
    return entry;
}

struct vc_estimate *vc_estimate_of(uint64_t key, uint64_t generation)
{
    struct vc_estimate *entry = vc_estimate_find(key);
    if (__atomic_exchange_n(&entry->generation, generation, __ATOMIC_RELAXED) != generation)
        vc_estimate_reset(entry);
    return entry;
}

static void store(struct vc_estimate *estimate, uint64_t cost_ns, uint64_t least_ns, uint64_t peak_ns, uint64_t seen_peak_ns, uint64_t sure_peak_ns)
{
    cost_ns = cost_ns ? cost_ns : 1;
    __atomic_store_n(&estimate->cost_ns, cost_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->least_ns, least_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->peak_ns, peak_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->seen_peak_ns, seen_peak_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->sure_peak_ns, sure_peak_ns, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->pass_ns, vc_estimate_risk(estimate) ? 0 : cost_ns, __ATOMIC_RELAXED);
}

void vc_estimate_set(struct vc_estimate *estimate, uint64_t cost_ns)
{
    vc_add_relaxed(&estimate->measured, 1);
    store(estimate, cost_ns, cost_ns, cost_ns, 0, 0);
}

void vc_estimate_guess(struct vc_estimate *estimate, uint64_t cost_ns)
{
    if (vc_estimate_cost(estimate) != 0)
        return;
    store(estimate, cost_ns, cost_ns, 0, 0, 0);
    vc_estimate_doubt(estimate);
}

void vc_estimate_doubt(struct vc_estimate *estimate)
{
    __atomic_store_n(&estimate->unmeasured_ns, DOUBT_NS, __ATOMIC_RELAXED);
}

/* What a short interval says depends on when within the driver's calls the card got to know of it, by a microsecond or
 * two: the mean of many counts. */
static double weight_of_short(struct vc_estimate *estimate)
{
    double weight = 1.0 / (double)(vc_add(&estimate->followed, 1) + 1);
    return weight > 0.15 ? 0.15 : weight < 0.03 ? 0.03 : weight;
}

/* Who surprises again and again is judged by itself (rule 7); or others' hidden work lies in it, and whoever has few kinds of operations would be doubted for that. */
static bool surprised_lately(const struct vc_estimate *estimate)
{
    enum { LATELY = 2 };
    static const struct vc_estimate *surprised[LATELY];
    static unsigned next;
    for (unsigned i = 0; i < LATELY; i++)
        if (vc_load_relaxed(&surprised[i]) == estimate)
            return true;
    vc_store_relaxed(&surprised[vc_add_relaxed(&next, 1) % LATELY], estimate);
    return false;
}

unsigned vc_estimate_learn(struct vc_estimate *estimate, uint64_t cost_then_ns, uint64_t measured_ns, uint64_t expected_ns,
                       enum vc_evidence evidence)
{
    uint64_t cost = vc_estimate_cost(estimate);
    if (cost == 0 || cost_then_ns == 0 || expected_ns == 0)
        return 0;
    double implied = (double)cost_then_ns * ((double)measured_ns / (double)expected_ns);
    double ratio = implied / (double)cost;
    if (__atomic_load_n(&estimate->peak_ns, __ATOMIC_RELAXED) == 0) { /* it was a guess */
        vc_estimate_set(estimate, (uint64_t)implied);
        return 0;
    }
    if (evidence == VC_EVIDENCE_CLEAN && ratio * (double)VC_VARIES_FACTOR < 1 && __atomic_load_n(&estimate->seen_peak_ns, __ATOMIC_RELAXED) == 0) { /* nobody else was there for the first time: before they were inside */
        vc_add_relaxed(&estimate->measured, 1);
        store(estimate, (uint64_t)implied, (uint64_t)implied, (uint64_t)implied, (uint64_t)implied, 0);
        return 0;
    }
    if (evidence == VC_EVIDENCE_BESIDE) { /* no cost is known better by it: followed in one direction only, it would drift */
        vc_add_relaxed(&estimate->measured, ratio < (double)VC_VARIES_FACTOR);
        return 0;
    }
    /* Wall time bounds GPU time from above: whatever else ran, a much smaller reading can only be nearer to the truth, and a
     * longer one that others may be inside tells little. What is charged does not depend on either. */
    bool noisy = expected_ns < VC_VARIES_NS && ratio > 0.5 && ratio < 2; /* a cost that is another one now is followed at once */
    double weight = evidence == VC_EVIDENCE_CLEAN && noisy         ? weight_of_short(estimate)
                    : evidence == VC_EVIDENCE_CLEAN || ratio < 0.9 ? 0.15
                    : evidence == VC_EVIDENCE_LONG_OVERLAP         ? 0.10
                                                                   : 0.02;
    /* A bound far above it proves nothing. */
    vc_add_relaxed(&estimate->measured, evidence != VC_EVIDENCE_UPPER_BOUND || ratio < (double)VC_VARIES_FACTOR);
    if (evidence == VC_EVIDENCE_UPPER_BOUND && ratio > 2.0)
        ratio = 2.0;
    bool proven = vc_estimate_risk(estimate) != VC_UNPROVEN_NS;
    double peak = (double)__atomic_load_n(&estimate->peak_ns, __ATOMIC_RELAXED) * PEAK_KEPT;
    double seen = (double)__atomic_load_n(&estimate->seen_peak_ns, __ATOMIC_RELAXED) * PEAK_KEPT;
    double sure = (double)__atomic_load_n(&estimate->sure_peak_ns, __ATOMIC_RELAXED) * PEAK_KEPT;
    double least = (double)__atomic_load_n(&estimate->least_ns, __ATOMIC_RELAXED) / PEAK_KEPT;
    if (implied < least)
        least = implied;
    if (evidence != VC_EVIDENCE_UPPER_BOUND && implied > peak)
        peak = implied;
    /* Of what was seen once another's slice may be a part, where that one's helper was not let run. */
    if (evidence == VC_EVIDENCE_CLEAN && implied > sure)
        sure = implied < seen ? implied : seen;
    if (evidence == VC_EVIDENCE_CLEAN && implied > seen)
        seen = implied;
    store(estimate, (uint64_t)((double)cost * (1.0 + weight * (ratio - 1.0)) + 0.5), (uint64_t)least, (uint64_t)peak, (uint64_t)seen, (uint64_t)sure);
    bool surprises = proven && evidence == VC_EVIDENCE_CLEAN && implied > (double)VC_VARIES_SURELY_NS && implied > SURPRISING * least && ratio > SURPRISING_MEAN;
    if (!surprises || surprised_lately(estimate))
        return 0;
    /* Where it would be a whole slice, that may be one of somebody of whom nobody knew. */
    return (double)measured_ns * (1 - least / implied) > SLICE_NS ? 1 : VC_SURPRISE;
}

void vc_estimate_unprove(struct vc_estimate *estimate)
{
    __atomic_store_n(&estimate->measured, 0, __ATOMIC_RELAXED);
    if (vc_estimate_risk(estimate))
        __atomic_store_n(&estimate->pass_ns, 0, __ATOMIC_RELAXED);
}

void vc_estimate_reset(struct vc_estimate *estimate)
{
    __atomic_store_n(&estimate->pass_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->measured, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->followed, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->peak_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->seen_peak_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->sure_peak_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->least_ns, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&estimate->cost_ns, 0, __ATOMIC_RELAXED);
}
