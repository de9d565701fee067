/* Processes of several threads each, all using one region at once: first looks, claims, reservations, forks, frees of the
 * dead, limits that change, kills. The sum never exceeds the limit, nothing is left; under the thread sanitizer: no data race. */
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include "check.h"

#define LIMIT 1000u
#define PROCESSES 3
#define THREADS 5
#define ROUNDS 400
#define KILLS 6

static char *folder;

/* What all processes really hold, beside the region: 16 bits each in one word, so that a SIGKILL finds it whole. The dead take
 * theirs out through their parent. */
static struct truth {
    uint64_t held, over;
    uint64_t kills; /* odd while one is under way: its memory may be given to others before it is taken out here */
} *truth;
static int who; /* this process's place there */

static uint64_t sum_of(uint64_t held)
{
    uint64_t sum = 0;
    for (; held; held >>= 16)
        sum += held & 0xffff;
    return sum;
}

static bool take(struct vc_region *region, uint64_t bytes)
{
    if (!vc_quota_reserve(region, 0, bytes))
        return false;
    uint64_t kills = vc_load(&truth->kills);
    if (sum_of(vc_add(&truth->held, bytes << (16 * who))) > LIMIT && kills % 2 == 0 && vc_load(&truth->kills) == kills)
        vc_add(&truth->over, 1);
    vc_quota_commit(region, 0, bytes, VC_QUOTA_CONTEXT);
    return true;
}

static void give(struct vc_region *region, uint64_t bytes)
{
    vc_sub(&truth->held, bytes << (16 * who));
    vc_quota_release(region, 0, bytes, VC_QUOTA_CONTEXT);
}

static void fork_one(void)
{
    pid_t child = fork();
    if (child == 0) {
        struct vc_region *region = region_at(folder);
        bool served = vc_quota_reserve(region, 0, 10);
        if (served)
            vc_quota_rollback(region, 0, 10);
        _exit(region->state != VC_REGION_ENFORCED || broken != 0);
    }
    if (child > 0)
        join(child);
}

static void *work(void *argument)
{
    unsigned seed = (unsigned)(uintptr_t)argument;
    struct vc_region *region = region_at(folder); /* the first look of this process, by all its threads at once */
    CHECK(region->state == VC_REGION_ENFORCED);
    for (int round = 0; round < ROUNDS; round++) {
        uint64_t bytes = 1 + (uint64_t)rand_r(&seed) % 300;
        struct vc_card_view view;
        switch (rand_r(&seed) % 32) {
        case 0:
            fork_one();
            break;
        case 1:
            vc_slots_reap(region);
            break;
        case 2:
            CHECK(vc_limits_read(region->limits, 0, &view) ? view.cores * 10 == view.context_bytes : true);
            break;
        case 3:
            vc_quota_used(region, 0);
            vc_quota_refused(region, 0);
            break;
        default:
            if (!take(region, bytes))
                break;
            if (round % 2) /* so that the others meet it */
                vc_sleep_ns(200000);
            give(region, bytes);
        }
    }
    return NULL;
}

static pid_t start(int number, unsigned seed)
{
    pid_t process = fork();
    if (process != 0)
        return process;
    who = number;
    pthread_t threads[THREADS];
    for (uintptr_t thread = 0; thread < THREADS; thread++)
        pthread_create(&threads[thread], NULL, work, (void *)(seed * 100 + thread));
    for (int thread = 0; thread < THREADS; thread++)
        pthread_join(threads[thread], NULL);
    _exit(broken != 0);
}

static void change_limits(const char *path, unsigned round)
{
    uint32_t cores = 20 + round % 5 * 10;
    struct vc_error error;
    struct vc_card_limit card = {
        .uuid = "GPU-0", .memory_bytes = LIMIT, .cores = cores, .core_limit = cores, .context_bytes = cores * 10};
    CHECK(vc_limits_update(path, &card, 1, &error) == 0);
}

int main(void)
{
    folder = make_region(LIMIT);
    char limits[300];
    snprintf(limits, sizeof limits, "%s/limits", folder);
    change_limits(limits, 0);
    truth = mmap(NULL, sizeof *truth, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);

    pid_t processes[PROCESSES];
    for (int number = 0; number < PROCESSES; number++)
        processes[number] = start(number, (unsigned)number + 1);
    for (unsigned victim = 0; victim < KILLS; victim++) {
        for (unsigned round = 0; round < 20; round++) {
            change_limits(limits, round);
            vc_sleep_ns(1000000);
        }
        vc_add(&truth->kills, 1);
        kill(processes[0], SIGKILL);
        waitpid(processes[0], NULL, 0);
        __atomic_fetch_and(&truth->held, ~(uint64_t)0xffff, __ATOMIC_SEQ_CST);
        vc_add(&truth->kills, 1);
        processes[0] = start(0, 10 + victim);
    }
    for (int number = 0; number < PROCESSES; number++)
        join(processes[number]);
    CHECK(truth->over == 0);
    CHECK(truth->held == 0);

    struct vc_region *region = region_at(folder);
    CHECK(vc_quota_reserve(region, 0, LIMIT));
    vc_quota_rollback(region, 0, LIMIT);
    CHECK(vc_quota_used(region, 0) == 0);
    CHECK(region->usage->cards[0].memory_peak_bytes <= LIMIT);
    remove_region(folder);
    return broken != 0;
}
