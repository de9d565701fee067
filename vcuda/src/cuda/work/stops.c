/* A thread that stood still gave up its processor once more than to sleep, and did not wait for one (getrusage(2), proc(5): schedstat). */
#include "cuda/work/stops.h"

#include <fcntl.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"

/* A helper that is so late was not let run. */
static const uint64_t STOPPED_NS = 1000000;
/* So long no host keeps a virtual machine's processor from running: 1 to 4 ms, twice a second, were seen. Else whoever has its helper's system calls answered in the
 * kernel's place (seccomp's notifications) had a stop without a trace. */
static const uint64_t KEPT_NS = 10000000;
static const unsigned long SLACK_NS = 1000; /* of its timers */
/* Less late than this is any thread that sleeps. */
static const uint64_t LATE_NS = 100000;
/* Such a part of the time a helper may be late for no reason that is known, and so long at once: 0.5 to 7 ms of a second were seen of honest ones, 350 to 550 of one that
 * is held whenever there is something to hide. */
static const uint64_t EXCUSED_PARTS = 100, EXCUSED_NS = 10000000;

static long given_up_before; /* when it went to sleep */
static uint64_t waited_before_ns;
static uint64_t woke_ns, excused_ns; /* when it last was late, and for how long it may be again */

/* So often this thread gave up its processor, ever. */
static long given_up(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nvcsw : 0;
}

/* So long it took this thread to get one, ever. UINT64_MAX: nobody tells. */
static uint64_t waited_for_processor(void)
{
    char text[64], *next;
    int file = open("/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC);
    ssize_t bytes = file >= 0 ? read(file, text, sizeof text - 1) : 0;
    if (file >= 0)
        close(file);
    text[bytes > 0 ? bytes : 0] = 0;
    return strtoull(text, &next, 10) == 0 ? UINT64_MAX : strtoull(next, NULL, 10);
}

/* The tenant can make a thread's timers late (proc(5): timerslack_ns). */
static bool slackened(void)
{
    int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    return slack > (int)SLACK_NS;
}

/* The tenant can have a thread wait for a processor as long as any of its others is busy. */
static bool comes_last(void)
{
    return sched_getscheduler(0) == SCHED_IDLE || getpriority(PRIO_PROCESS, 0) > 0;
}

/* Hosts that do not run a machine for a moment do so now and then, whatever it works at. */
static bool excuse(uint64_t now_ns, uint64_t late_ns)
{
    excused_ns = vc_earlier(excused_ns + (now_ns - woke_ns) / EXCUSED_PARTS, EXCUSED_NS);
    woke_ns = now_ns;
    if (late_ns > excused_ns)
        return false;
    excused_ns -= late_ns;
    return true;
}

void vc_stops_started(void)
{
    prctl(PR_SET_TIMERSLACK, SLACK_NS);
    waited_before_ns = 0;
    woke_ns = vc_now_ns();
    excused_ns = EXCUSED_NS;
}

void vc_stops_sleeps(void)
{
    given_up_before = given_up();
}

struct vc_stop vc_stops_woke(uint64_t now_ns, uint64_t late_ns)
{
    if (VC_LIKELY(late_ns < LATE_NS))
        return (struct vc_stop){false, false};
    bool twice = given_up() > given_up_before + 1, slack = slackened();
    uint64_t before = waited_before_ns, waited = waited_for_processor();
    waited_before_ns = waited;
    uint64_t explained = comes_last() || waited == UINT64_MAX ? 0 : vc_earlier(waited - before, late_ns), unexplained = late_ns - explained;
    if (unexplained < LATE_NS)
        return (struct vc_stop){false, false};
    return (struct vc_stop){waited != UINT64_MAX && unexplained > STOPPED_NS && (twice || slack || late_ns > KEPT_NS), !excuse(now_ns, unexplained)};
}
