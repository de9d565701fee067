/* Who was stopped while it slept is known from who was late for any other reason: as a thread on a virtual machine that its host did not run for a while. */
#include <signal.h>
#include <sys/prctl.h>
#include <time.h>

#include "base/clock.h"
#include "check.h"
#include "cuda/work/bell.h"
#include "cuda/work/stops.h"

enum { MS = 1000000, SOME = 3 * MS, TOO_LONG = 20 * MS };

static void pause_for(long ns)
{
    struct timespec pause = {.tv_nsec = ns};
    nanosleep(&pause, NULL);
}

static void sleep_once(void)
{
    uint32_t word = vc_bell_awake();
    vc_stops_sleeps();
    vc_bell_sleep(vc_now_ns() + 5 * MS, word);
}

/* In a process of its own, stopped by its parent for as long as that or not at all: whether that is seen by a thread that says it is late by so much more. */
static bool seen(long stopped_ns, long later_ns, unsigned long slack_ns)
{
    int ready[2];
    if (pipe(ready) != 0)
        exit(2);
    pid_t child = fork();
    if (child == 0) {
        vc_stops_started();
        (void)vc_stops_woke(vc_now_ns(), TOO_LONG); /* what it waited for a processor before is behind it */
        if (slack_ns != 0)
            prctl(PR_SET_TIMERSLACK, slack_ns);
        if (write(ready[1], "", 1) != 1)
            _exit(2);
        sleep_once();
        _exit(vc_stops_woke(vc_now_ns(), vc_bell_late_ns(vc_now_ns() + (uint64_t)later_ns)).stopped);
    }
    char byte;
    int status;
    if (read(ready[0], &byte, 1) != 1)
        exit(2);
    pause_for(MS);
    if (stopped_ns != 0) {
        kill(child, SIGSTOP);
        pause_for(stopped_ns);
        kill(child, SIGCONT);
    }
    waitpid(child, &status, 0);
    close(ready[0]);
    close(ready[1]);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) < 2);
    return WEXITSTATUS(status) == 1;
}

/* So many of ten: a busy machine may have made the thread late besides, or stopped it when its sleep was over. */
static unsigned times_seen(long stopped_ns, long later_ns, unsigned long slack_ns)
{
    unsigned times = 0;
    for (unsigned i = 0; i < 10; i++)
        times += seen(stopped_ns, later_ns, slack_ns);
    return times;
}

/* On a machine that is busy for a while threads wait for a processor, which excuses them. */
static bool is_seen(long stopped_ns, long later_ns, unsigned long slack_ns)
{
    bool most = false;
    for (unsigned i = 0; i < 5 && !most; i++)
        most = times_seen(stopped_ns, later_ns, slack_ns) >= 8;
    return most;
}

/* Whether a thread counts as held that says it is so late each ms, for a second. */
static bool held(uint64_t late_ns)
{
    bool held = false;
    vc_stops_started();
    (void)vc_stops_woke(vc_now_ns(), MS); /* what it waited for a processor before is behind it */
    uint64_t now = vc_now_ns();
    for (unsigned i = 0; i < 1000; i++)
        held |= vc_stops_woke(now += MS, i % 2 == 0 ? late_ns : 0).held;
    return held;
}

/* Its host did not run it, twice a second. */
static bool held_by_its_host(void)
{
    bool held = false;
    vc_stops_started();
    uint64_t now = vc_now_ns();
    for (unsigned i = 0; i < 20; i++)
        held |= vc_stops_woke(now += 500 * MS, 4 * MS).held;
    return held;
}

static void test_who_is_late_more_often_than_hosts_explain_is_held(void)
{
    CHECK(held(MS) && held(200000) && !held(50000) && !held_by_its_host());
}

int main(void)
{
    test_who_is_late_more_often_than_hosts_explain_is_held();
    CHECK(times_seen(0, 0, 0) == 0);
    CHECK(times_seen(0, SOME, 0) <= 2);
    CHECK(is_seen(0, TOO_LONG, 0));
    CHECK(is_seen(12 * MS, 0, 0));
    CHECK(is_seen(0, SOME, 5000));
    return broken != 0;
}
