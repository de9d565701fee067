/* Overhead: written by who measures, asked for by the tenant. */
#include "region/overhead.h"
#include "region/slot.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"

#define VC__PATIENCE_NS 20000000u
#define VC__POLL_NS 500000u
#define VC__PAUSE_NS 100000000u /* between two questions of one process */

int vc_overhead_write(const char *limits_path, const uint64_t *bytes, uint32_t count, struct vc_error *error)
{
    struct vc_limits *limits = vc_limits_map_writable(limits_path, error);
    if (!limits)
        return -1;
    int result = 0, descriptor = open(limits_path, O_RDONLY | O_CLOEXEC);
    vc_limits_lock(descriptor);
    if (limits->card_count != count) {
        result = vc_fail(error, "cannot update %s: it has %u cards, not %u", limits_path, limits->card_count, count);
    } else {
        uint64_t odd = vc_load(&limits->sequence) | 1;
        vc_store(&limits->sequence, odd);
        for (uint32_t card = 0; card < count; card++) {
            vc_store(&limits->cards[card].overhead_bytes, bytes[card]);
            vc_store(&limits->cards[card].overhead_samples, limits->cards[card].overhead_samples + 1);
        }
        vc_store(&limits->sequence, odd + 1);
    }
    vc_limits_unlock();
    if (descriptor >= 0)
        close(descriptor);
    munmap(limits, VC_LIMITS_FILE_BYTES);
    return result;
}

void vc_overhead_refresh(struct vc_region *region, uint32_t card, bool for_refusal)
{
    const uint64_t *samples = &region->limits->cards[card].overhead_samples;
    struct vc_slot *own = region->state == VC_REGION_ENFORCED ? vc_region_slot(region) : NULL;
    uint64_t before = vc_load(samples), now = vc_now_ns();
    if (!own || before == 0)
        return;
    uint64_t done = vc_load_relaxed(&own->cards[card].launches) + vc_load_relaxed(&own->cards[card].generation);
    if ((done == vc_load_relaxed(&region->asked_work[card]) && !for_refusal) || now - vc_load_relaxed(&region->asked_ns) < VC__PAUSE_NS)
        return;
    vc_store_relaxed(&region->asked_work[card], done);
    vc_store_relaxed(&region->asked_ns, now);
    /* The question is a new time of change of the usage file: who measures watches that, and nobody has to poll. */
    if (utimensat(AT_FDCWD, region->file.path, NULL, 0) != 0)
        return;
    while (vc_load(samples) == before && vc_now_ns() - now < VC__PATIENCE_NS)
        vc_sleep_ns(VC__POLL_NS);
}
