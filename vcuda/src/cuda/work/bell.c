/* A futex word that the helper sleeps on, and when it means to look next. */
#include "cuda/work/bell.h"

#include <linux/futex.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "gate/settle.h"

static uint32_t awaited; /* marks */
static uint32_t wake_word;
static uint64_t awake_at_ns; /* when the helper will look next; UINT64_MAX: not by itself; 0: it is awake */

static uint64_t rung_ns;       /* when it was first woken since it last was awake; 0: it was not */
static uint64_t awake_since_ns, asleep_since_ns; /* the latter: 0 where it had no time to */

/* So late a helper has others look in its place. */
static const uint64_t MISSED_NS = 20000000;

static void wake(void)
{
    uint64_t no = 0; /* before the word: the helper reads that first */
    __atomic_compare_exchange_n(&rung_ns, &no, vc_now_ns(), false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    vc_add(&wake_word, 1);
    syscall(SYS_futex, &wake_word, FUTEX_WAKE | FUTEX_PRIVATE_FLAG, 1, NULL, NULL, 0);
}

void vc_bell_expect(uint64_t expected_ns)
{
    uint64_t awake_at = vc_load(&awake_at_ns);
    if (awake_at == 0) { /* it may have passed by already: make it go round once more, or wake it if it is asleep by now */
        vc_add(&wake_word, 1);
        awake_at = vc_load(&awake_at_ns);
    }
    if (awake_at > expected_ns + VC_LOOK_NS)
        wake();
}

void vc_bell_kick(void)
{
    if (vc_load(&awaited) != 0)
        wake();
}

uint32_t vc_bell_awake(void)
{
    uint32_t word = vc_load(&wake_word);
    vc_store(&awake_since_ns, vc_now_ns());
    vc_store(&rung_ns, 0);
    vc_store(&awake_at_ns, 0); /* whoever submits need not wake us, we look at the word again */
    return word;
}

void vc_bell_started(void)
{
    vc_store(&awake_since_ns, vc_now_ns());
}

bool vc_bell_missed(uint64_t now_ns)
{
    uint64_t awake_at = vc_load(&awake_at_ns), rung = vc_load(&rung_ns);
    uint64_t since = awake_at == 0 ? vc_load(&awake_since_ns) : awake_at;
    since = rung != 0 ? vc_earlier(since, rung) : since;
    return since < now_ns && now_ns - since > MISSED_NS;
}

uint64_t vc_bell_late_ns(uint64_t now_ns)
{
    uint64_t awake_at = vc_load(&awake_at_ns), rung = vc_load(&rung_ns);
    uint64_t due = rung != 0 ? vc_earlier(awake_at, rung) : awake_at;
    due = vc_later(due, asleep_since_ns); /* what a look takes is no sleep */
    return asleep_since_ns != 0 && due < now_ns ? now_ns - due : 0;
}

void vc_bell_sleep(uint64_t until_ns, uint32_t word)
{
    vc_store(&awake_at_ns, until_ns);
    uint64_t now = vc_now_ns();
    asleep_since_ns = until_ns > now ? now : 0;
    if (until_ns <= now)
        return;
    uint64_t sleep = until_ns - now;
    struct timespec timeout = {.tv_sec = (time_t)(sleep / 1000000000u), .tv_nsec = (long)(sleep % 1000000000u)};
    syscall(SYS_futex, &wake_word, FUTEX_WAIT | FUTEX_PRIVATE_FLAG, word, until_ns == UINT64_MAX ? NULL : &timeout, NULL, 0);
}

void vc_bell_awaits(int marks)
{
    vc_add(&awaited, (uint32_t)marks);
}

void vc_bell_forked(void)
{
    vc_store_relaxed(&awake_at_ns, 0);
    vc_store_relaxed(&awake_since_ns, 0);
    vc_store_relaxed(&rung_ns, 0);
    vc_store_relaxed(&awaited, 0);
    asleep_since_ns = 0;
}
