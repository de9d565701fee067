/* The container's bucket of GPU time: one per card, in the usage file, shared by all processes without a lock.
 *
 * It fills with wall time at the container's rate, up to its size (VC_BUCKET_NS, and as much more as others owe); whoever puts work on the card takes the estimate
 * out first and settles the difference to what was measured later. It may become negative (debt): nothing starts until
 * it is positive again. A process that is killed in the middle can only lose what it had taken itself, or one fill.
 */
#ifndef VC_BUCKET_H
#define VC_BUCKET_H

#include <stdint.h>

#include "region/abi.h"
#include "region/share.h"

enum {
    VC_BUCKET_NS = 10000000,      /* GPU time that an idle container may save up: its burst */
    VC_CHUNK_NS = 1000000,        /* the most that one process takes in advance */
    VC_SAVED_NS = 1000000000,     /* what it may save up beyond that at most, of what others have taken beyond their limits */
};

/* One interval or debt longer than this is a broken clock, not work. */
#define VC_CHARGE_LIMIT_NS INT64_C(60000000000)

/* Add what flowed in since the last fill at `rate_ppm` (GPU ns per million wall ns), into a bucket that holds `saved_ns` more than
 * VC_BUCKET_NS; returns the credit now.
 * A clock that is ahead of `now_ns` by more than a second (damaged file) is set back and adds nothing. */
int64_t vc_bucket_fill(struct vc_card_usage *usage, uint64_t now_ns, uint32_t rate_ppm, uint64_t saved_ns);

/* Take `ns` of GPU time (negative: give back) from such a bucket; returns the credit that is left, negative for debt. */
int64_t vc_bucket_take(struct vc_card_usage *usage, int64_t ns, uint64_t saved_ns);

/* Wall time until `credit_ns` has grown to `wanted_ns` at `rate_ppm`; 0 if it has already. Rate 0 counts as 1. */
uint64_t vc_bucket_wait_ns(int64_t credit_ns, int64_t wanted_ns, uint32_t rate_ppm);

/* A process's own account of what it was charged, in its own memory. The container's credit lies where a tenant can write: whatever it says, no
 * process has more than the whole rate. An honest one is stopped by the container's bucket before. */
struct vc_own {
    int64_t spent_ns;    /* beyond what flowed in; below 0 only as far as the bucket saves up more */
    uint64_t filled_ns;  /* until when it has flowed in */
    int64_t taken_ns;    /* in all */
};

enum { VC_OWN_OVERDRAFT_NS = 3 * VC_BUCKET_NS };

static inline void vc_own_take(struct vc_own *own, int64_t ns)
{
    own->spent_ns += ns;
    own->taken_ns += ns;
}

/* For how long nothing may start. */
uint64_t vc_own_fill(struct vc_own *own, uint64_t now_ns, uint32_t rate_ppm, uint64_t saved_ns);

#endif
