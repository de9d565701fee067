/* A leaky bucket in two shared words: whoever moves `credit_updated_ns` forward adds what flowed in meanwhile. */
#include "gate/bucket.h"

#include "base/atomic.h"

static const uint64_t CLOCK_AHEAD_NS = 1000000000;

static int64_t within_bucket(int64_t credit, uint64_t saved_ns)
{
    int64_t most = VC_BUCKET_NS + (int64_t)saved_ns;
    if (credit > most)
        return most;
    return credit < -VC_CHARGE_LIMIT_NS ? -VC_CHARGE_LIMIT_NS : credit;
}

/* Credit never exceeds the bucket; the loop only retries when another process changed it in between. */
static int64_t add_bounded(int64_t *credit, int64_t ns, uint64_t saved_ns)
{
    int64_t old = vc_load_relaxed(credit);
    for (;;) {
        /* Bounded before and after: the word may hold anything, a tenant can write it. */
        int64_t bounded = within_bucket(within_bucket(old, saved_ns) + ns, saved_ns);
        if (__atomic_compare_exchange_n(credit, &old, bounded, true, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
            return bounded;
    }
}

int64_t vc_bucket_fill(struct vc_card_usage *usage, uint64_t now_ns, uint32_t rate_ppm, uint64_t saved_ns)
{
    uint64_t last = vc_load_acquire(&usage->credit_updated_ns);
    if (rate_ppm == 0)
        rate_ppm = 1;
    if (last > now_ns) {
        if (last - now_ns > CLOCK_AHEAD_NS)
            __atomic_compare_exchange_n(&usage->credit_updated_ns, &last, now_ns, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED);
        return vc_load_acquire(&usage->credit_ns);
    }
    /* The time that fills an empty bucket from the deepest debt bounds the product below. */
    uint64_t elapsed = now_ns - last;
    uint64_t longest = (uint64_t)(VC_BUCKET_NS + VC_CHARGE_LIMIT_NS) / rate_ppm * VC_PPM + VC_PPM;
    uint64_t paid_until = now_ns;
    uint64_t inflow;
    if (elapsed >= longest) {
        inflow = (uint64_t)(VC_BUCKET_NS + VC_CHARGE_LIMIT_NS);
    } else {
        inflow = (uint64_t)((unsigned __int128)elapsed * rate_ppm / VC_PPM);
        if (inflow == 0)
            return vc_load_acquire(&usage->credit_ns);
        /* Pay only for whole nanoseconds of GPU time: fractions stay in the clock and are not lost. */
        paid_until = last + (uint64_t)(((unsigned __int128)inflow * VC_PPM + rate_ppm - 1) / rate_ppm);
    }
    if (!__atomic_compare_exchange_n(&usage->credit_updated_ns, &last, paid_until, false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_RELAXED))
        return vc_load_acquire(&usage->credit_ns);
    return add_bounded(&usage->credit_ns, (int64_t)inflow, saved_ns);
}

int64_t vc_bucket_take(struct vc_card_usage *usage, int64_t ns, uint64_t saved_ns)
{
    if (ns > VC_CHARGE_LIMIT_NS)
        ns = VC_CHARGE_LIMIT_NS;
    if (ns < -VC_CHARGE_LIMIT_NS)
        ns = -VC_CHARGE_LIMIT_NS;
    return add_bounded(&usage->credit_ns, -ns, saved_ns);
}

uint64_t vc_own_fill(struct vc_own *own, uint64_t now_ns, uint32_t rate_ppm, uint64_t saved_ns)
{
    uint64_t elapsed = now_ns > own->filled_ns ? now_ns - own->filled_ns : 0;
    own->filled_ns += elapsed;
    unsigned __int128 inflow = (unsigned __int128)elapsed * rate_ppm / VC_PPM;
    int64_t least = -(int64_t)saved_ns;
    if (own->spent_ns < least || inflow > (uint64_t)(own->spent_ns - least))
        own->spent_ns = least;
    else
        own->spent_ns -= (int64_t)inflow;
    return vc_bucket_wait_ns(-own->spent_ns, -VC_OWN_OVERDRAFT_NS, rate_ppm);
}

uint64_t vc_bucket_wait_ns(int64_t credit_ns, int64_t wanted_ns, uint32_t rate_ppm)
{
    if (credit_ns >= wanted_ns)
        return 0;
    if (rate_ppm == 0)
        rate_ppm = 1;
    uint64_t missing = (uint64_t)(wanted_ns - credit_ns);
    return (uint64_t)(((unsigned __int128)missing * VC_PPM + rate_ppm - 1) / rate_ppm);
}
