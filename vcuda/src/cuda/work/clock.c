/* Where the card's clock stands: by a base event that is renewed, and by what bounds each mark's time; see clock.h. */
#include "cuda/work/clock.h"

#include "base/clock.h"

/* cuEventElapsedTime is a float of ms: the base must stay near for it to resolve fractions of a microsecond. */
static const uint64_t BASE_AGE_NS = 3000000000u;
static const uint64_t BASE_NEAR_NS = 300000;
static const uint64_t MOVED_NS = 100000;

bool vc_clock_reached(CUevent event)
{
    return vc_real.cuEventQuery(event) != CUDA_ERROR_NOT_READY;
}

static bool make_base(struct vc_tracker *tracker, CUevent *event)
{
    if (!tracker->clock_stream && vc_real.cuStreamCreate(&tracker->clock_stream, CU_STREAM_NON_BLOCKING) != CUDA_SUCCESS)
        return false;
    if (!*event && vc_real.cuEventCreate(event, 0) != CUDA_SUCCESS)
        return false;
    return vc_real.cuEventRecord(*event, tracker->clock_stream) == CUDA_SUCCESS;
}

static int64_t since_base(const struct vc_tracker *tracker, CUevent event, bool *known)
{
    float milliseconds = 0;
    *known = vc_real.cuEventElapsedTime(&milliseconds, tracker->base, event) == CUDA_SUCCESS;
    return (int64_t)((double)milliseconds * 1e6);
}

bool vc_clock_is_there(struct vc_tracker *tracker)
{
    uint64_t now = vc_now_ns();
    if (tracker->base_made_ns != 0 && !tracker->renewing && now - tracker->base_made_ns < BASE_AGE_NS)
        return true;
    if (!tracker->renewing) {
        tracker->renewing_since_ns = now;
        tracker->renewing = make_base(tracker, &tracker->next_base);
        tracker->broken = !tracker->renewing && tracker->base_made_ns == 0;
    }
    if (!tracker->renewing || !vc_clock_reached(tracker->next_base))
        return tracker->base_made_ns != 0;
    now = vc_now_ns();
    uint64_t low = tracker->renewing_since_ns, high = now;
    if (tracker->base_made_ns != 0) {
        bool known;
        uint64_t since = (uint64_t)since_base(tracker, tracker->next_base, &known);
        if (known && tracker->base_low_ns + since > low)
            low = tracker->base_low_ns + since;
        if (known && tracker->base_high_ns + since < high)
            high = tracker->base_high_ns + since;
    }
    tracker->base_low_ns = low < high ? low : high;
    tracker->base_high_ns = high;
    CUevent old = tracker->base;
    tracker->base = tracker->next_base;
    tracker->next_base = old;
    tracker->base_made_ns = now;
    tracker->renewing = false;
    return true;
}

bool vc_clock_moved(uint64_t before_ns, uint64_t after_ns)
{
    return (before_ns > after_ns ? before_ns - after_ns : after_ns - before_ns) > MOVED_NS;
}

static uint64_t origin(const struct vc_tracker *tracker)
{
    bool near = tracker->base_high_ns - tracker->base_low_ns < BASE_NEAR_NS;
    return near ? tracker->base_low_ns : tracker->base_high_ns;
}

uint64_t vc_clock_uncertain_ns(const struct vc_tracker *tracker)
{
    return origin(tracker) == tracker->base_low_ns ? tracker->base_high_ns - tracker->base_low_ns : 0;
}

/* It was reached after its record was asked for, and before it is seen: that bounds the base's own time. A stream that is idle when it is
 * marked makes the lower bound the better one; where there was none, what is seen is seen at once. */
uint64_t vc_clock_when(struct vc_tracker *tracker, const struct vc_mark *mark, uint64_t now_ns)
{
    bool known;
    uint64_t before = origin(tracker);
    uint64_t since = (uint64_t)since_base(tracker, mark->event, &known);
    if (!known)
        return 0;
    if ((int64_t)(tracker->base_high_ns + since - now_ns) > 0)
        tracker->base_high_ns = now_ns - since;
    if ((int64_t)(tracker->base_low_ns + since - mark->times.recording_ns) < 0)
        tracker->base_low_ns = mark->times.recording_ns - since;
    if (tracker->base_low_ns > tracker->base_high_ns)
        tracker->base_low_ns = tracker->base_high_ns;
    uint64_t after = origin(tracker);
    if (vc_clock_moved(before, after))
        vc_gate_clock_moved(tracker->gate);
    return after + since;
}

uint64_t vc_clock_between_ns(const struct vc_mark *from, const struct vc_mark *to)
{
    float milliseconds = 0;
    bool known = vc_real.cuEventElapsedTime(&milliseconds, from->event, to->event) == CUDA_SUCCESS && milliseconds > 0;
    return known ? (uint64_t)((double)milliseconds * 1e6) : 0;
}
