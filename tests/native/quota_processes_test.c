/* Processes of one container: the sum never exceeds the limit, and a SIGKILL at any moment leaves nothing booked. */
#include <signal.h>
#include <sys/mman.h>

#include "check.h"
#include "base/clock.h"

#define LIMIT 1000u
#define PROCESSES 4
#define RUN_NS 400000000u
#define KILLS 20

/* What all processes really hold, beside the region: 16 bits each in one word, so that a SIGKILL finds it whole. The dead take
 * theirs out through their parent. */
static struct truth {
    uint64_t held, over;
    uint64_t kills; /* odd while one is under way: its memory may be given to others before it is taken out here */
} *truth;

static uint64_t sum_of(uint64_t held)
{
    uint64_t sum = 0;
    for (; held; held >>= 16)
        sum += held & 0xffff;
    return sum;
}

static void hold(int who, uint64_t bytes)
{
    uint64_t kills = vc_load(&truth->kills);
    if (sum_of(vc_add(&truth->held, bytes << (16 * who))) > LIMIT && kills % 2 == 0 && vc_load(&truth->kills) == kills)
        vc_add(&truth->over, 1);
}

static void let_go(int who, uint64_t bytes)
{
    vc_sub(&truth->held, bytes << (16 * who));
}

static void child(const char *folder, int who, uint64_t until)
{
    struct vc_region *region = region_at(folder);
    unsigned int seed = (unsigned int)getpid();
    uint64_t granted = 0, bytes[16] = {0};
    while (vc_now_ns() < until) {
        uint64_t *place = &bytes[rand_r(&seed) % 16];
        if (*place) {
            let_go(who, *place);
            vc_quota_release(region, 0, *place, VC_QUOTA_PLAIN);
            *place = 0;
            continue;
        }
        uint64_t wanted = 1 + (uint64_t)rand_r(&seed) % 300;
        if (!vc_quota_reserve(region, 0, wanted))
            continue;
        hold(who, wanted);
        vc_quota_commit(region, 0, wanted, VC_QUOTA_PLAIN);
        *place = wanted;
        granted++;
    }
    for (int place = 0; place < 16; place++) {
        if (bytes[place]) {
            let_go(who, bytes[place]);
            vc_quota_release(region, 0, bytes[place], VC_QUOTA_PLAIN);
        }
    }
    _exit(granted > 0 && broken == 0 ? 0 : 1);
}

/* Charges nothing, and looks at what all hold while that moves from one to another: no peak. */
static pid_t watch(const char *folder, uint64_t until)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct vc_region *region = region_at(folder);
        while (vc_now_ns() < until)
            vc_quota_charge(region, 0, 0, VC_QUOTA_PLAIN);
        _exit(broken != 0);
    }
    return pid;
}

static pid_t start(const char *folder, int who, uint64_t until)
{
    pid_t pid = fork();
    if (pid == 0)
        child(folder, who, until);
    return pid;
}

int main(void)
{
    char *folder = make_region(LIMIT);
    truth = mmap(NULL, sizeof *truth, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    pid_t pids[PROCESSES];
    uint64_t until = vc_now_ns() + RUN_NS;
    for (int who = 0; who < PROCESSES; who++)
        pids[who] = start(folder, who, until);
    pid_t watcher = watch(folder, until);
    join(watcher);
    for (int who = 0; who < PROCESSES; who++)
        join(pids[who]);
    CHECK(truth->over == 0 && truth->held == 0);

    /* Kill one of two again and again. The victim's memory counts until it is reaped, as a driver's does. */
    until = vc_now_ns() + 30000000000u;
    pids[0] = start(folder, 0, until);
    for (int kill_number = 0; kill_number < KILLS; kill_number++) {
        pids[1] = start(folder, 1, until);
        vc_sleep_ns(5000000u + (uint64_t)kill_number * 100000u);
        vc_add(&truth->kills, 1);
        kill(pids[1], SIGKILL);
        int status;
        siginfo_t info;
        waitid(P_PID, (id_t)pids[1], &info, WEXITED | WNOWAIT); /* a zombie now: unreaped, but gone */
        __atomic_fetch_and(&truth->held, ~((uint64_t)0xffff << 16), __ATOMIC_SEQ_CST);
        vc_add(&truth->kills, 1);
        waitpid(pids[1], &status, 0);
    }
    kill(pids[0], SIGKILL);
    waitpid(pids[0], NULL, 0);
    CHECK(truth->over == 0);

    struct vc_region *region = region_at(folder);
    CHECK(vc_quota_reserve(region, 0, LIMIT)); /* all of it, at once */
    vc_quota_rollback(region, 0, LIMIT);
    CHECK(vc_quota_used(region, 0) == 0);
    CHECK(region->usage->cards[0].memory_peak_bytes <= LIMIT);
    for (uint32_t index = 0; index < VC_MAX_SLOTS; index++) {
        const struct vc_slot *slot = &region->usage->slots[index];
        CHECK(slot == region->slot || slot->state == VC_SLOT_FREE || slot->cards[0].reserved_bytes == 0);
    }
    CHECK(vc_region_slots(region) <= PROCESSES + 2);
    remove_region(folder);
    return broken != 0;
}
