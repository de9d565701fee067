/* SIGKILL at every instruction that matters: a tracer walks a victim through the region code one instruction at a time and kills
 * it after its first, second, third … change of what outlives it (the files' bytes, their names, the slots' locks); after
 * each kill nothing may be booked, lost, locked or half made. Between two changes all instructions leave the same behind. */
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/stat.h>

#include "check.h"
#include "region/slot.h"

#define LIMIT 1000u
#define MINE 100u
#define WATCHED_SLOTS 4

#if defined(__SANITIZE_ADDRESS__)
#define STRIDE 8
#else
#define STRIDE 1
#endif

static char *folder;
static struct vc_region *mine;
static char limits_path[300], usage_path[300];

/* --- what outlives a process --- */

struct trace {
    uint8_t usage[offsetof(struct vc_usage, slots) + WATCHED_SLOTS * sizeof(struct vc_slot)];
    uint8_t limits[sizeof(struct vc_limits)];
    bool locked[WATCHED_SLOTS];
    off_t sizes[4]; /* of limits, usage, limits.new, usage.new beside the region; -1: no such file */
    mode_t modes[4];
};

/* What an act may change besides the files' bytes; looking for it takes system calls. */
enum reach { BYTES, LOCKS, NAMES };

static void look_at_the_rest(struct trace *trace, enum reach reach)
{
    for (uint32_t slot = 1; reach == LOCKS && slot < WATCHED_SLOTS; slot++)
        trace->locked[slot] = vc_slot_locked(mine->file.descriptor, slot);
    static const char *const endings[] = {"", "", ".new", ".new"};
    for (int name = 0; reach == NAMES && name < 4; name++) {
        char path[320];
        struct stat status;
        snprintf(path, sizeof path, "%s%s", name % 2 ? usage_path : limits_path, endings[name]);
        bool found = stat(path, &status) == 0;
        trace->sizes[name] = found ? status.st_size : -1;
        trace->modes[name] = found ? status.st_mode : 0;
    }
}

/* Whether anything is another than in `trace`; brings it up to date. */
static bool look(struct trace *trace, enum reach reach)
{
    static struct trace rest;
    look_at_the_rest(&rest, reach);
    if (memcmp(trace->usage, mine->usage, sizeof trace->usage) == 0 &&
        memcmp(trace->limits, mine->limits, sizeof trace->limits) == 0 &&
        memcmp(trace->locked, rest.locked, sizeof *trace - offsetof(struct trace, locked)) == 0)
        return false;
    *trace = rest;
    memcpy(trace->usage, mine->usage, sizeof trace->usage);
    memcpy(trace->limits, mine->limits, sizeof trace->limits);
    return true;
}

/* --- the acts --- */

static void claim(void)
{
    CHECK(vc_region_slot(region_at(folder)) != NULL);
}

static void reserve_and_commit(void)
{
    struct vc_region *region = region_at(folder);
    CHECK(vc_quota_reserve(region, 0, 300));
    vc_quota_commit(region, 0, 300, VC_QUOTA_CONTEXT);
}

static void release(void)
{
    vc_quota_release(region_at(folder), 0, 300, VC_QUOTA_CONTEXT);
}

static void reserve_in_vain(void)
{
    CHECK(!vc_quota_reserve(region_at(folder), 0, LIMIT));
}

static void roll_back(void)
{
    vc_quota_rollback(region_at(folder), 0, 200);
}

static void reserve_only(void)
{
    CHECK(vc_quota_reserve(region_at(folder), 0, 200));
}

static void book_what_is_there(void)
{
    vc_quota_charge(region_at(folder), 0, 50, VC_QUOTA_MANAGED);
}

static void free_the_dead(void)
{
    CHECK(vc_slots_reap(region_at(folder)) == 1);
}

static void leave_a_dead_slot(void)
{
    claim(); /* lest our own one reuses it */
    pid_t child = fork();
    if (child == 0) {
        reserve_and_commit();
        _exit(broken != 0);
    }
    join(child);
}

static void change_the_limits(void)
{
    char path[300];
    struct vc_error error;
    snprintf(path, sizeof path, "%s/limits", folder);
    struct vc_card_limit card = {.uuid = "GPU-0", .memory_bytes = LIMIT, .cores = 20, .core_limit = 30, .context_bytes = 7};
    CHECK(vc_limits_update(path, &card, 1, &error) == 0);
    card = (struct vc_card_limit){.uuid = "GPU-0", .memory_bytes = LIMIT, .cores = 50, .core_limit = 50};
    CHECK(vc_limits_update(path, &card, 1, &error) == 0);
}

static void make_another_region(void)
{
    struct vc_error error;
    struct vc_card_limit card = {.uuid = "GPU-0", .memory_bytes = LIMIT, .cores = 50, .core_limit = 50};
    CHECK(vc_files_create(limits_path, usage_path, &card, 1, &error) == 0);
}

static const struct act {
    const char *name;
    void (*prepare)(void), (*run)(void);
    enum reach reach;
    int fewest; /* changes that there must be at least */
} acts[] = {
    /* 10 as a rule; fewer where the dead one is not seen as dead yet and a fresh slot is taken. */
    {"claim of a dead process's slot", NULL, claim, LOCKS, 8},
    {"reserve, commit", claim, reserve_and_commit, BYTES, 5},
    {"release", reserve_and_commit, release, BYTES, 5},
    {"refused", claim, reserve_in_vain, BYTES, 2},
    {"rollback", reserve_only, roll_back, BYTES, 1},
    {"charge", claim, book_what_is_there, BYTES, 4},
    {"reap", leave_a_dead_slot, free_the_dead, LOCKS, 5},
    {"change of limits", NULL, change_the_limits, BYTES, 10},
    {"making a region", NULL, make_another_region, NAMES, 8},
};

/* --- after the kill --- */

static void check_that_nothing_is_left(void)
{
    const struct vc_slot_card *card = &mine->slot->cards[0];
    CHECK(vc_quota_reserve(mine, 0, LIMIT - MINE)); /* all the rest, at once */
    vc_quota_rollback(mine, 0, LIMIT - MINE);
    CHECK(vc_quota_used(mine, 0) == MINE);
    CHECK(card->reserved_bytes == MINE && card->committed_bytes == MINE);
    CHECK(mine->usage->cards[0].memory_peak_bytes <= LIMIT);
    CHECK(vc_region_slots(mine) <= WATCHED_SLOTS);
    vc_slots_reap(mine);
    for (uint32_t slot = 1; slot < WATCHED_SLOTS; slot++) {
        CHECK(mine->usage->slots[slot].state == VC_SLOT_FREE);
        CHECK(mine->usage->slots[slot].cards[0].reserved_bytes == 0);
        CHECK(!vc_slot_locked(mine->file.descriptor, slot));
    }
}

static void check_that_limits_are_old_or_new(void)
{
    char path[300];
    struct vc_error error;
    struct vc_limits copy;
    snprintf(path, sizeof path, "%s/limits", folder);
    CHECK(vc_limits_copy(path, &copy, &error) == 0);
    CHECK((copy.cards[0].cores == 50 || copy.cards[0].cores == 20) && copy.cards[0].memory_bytes == LIMIT);
    change_the_limits();
    struct vc_card_view view;
    CHECK(vc_limits_read(mine->limits, 0, &view) && view.cores == 50 && view.core_limit == 50 && view.context_bytes == 0);
    CHECK(mine->limits->sequence % 2 == 0);
}

static void check_that_a_region_is_whole_or_can_be_made(void)
{
    struct vc_header limits, usage;
    struct vc_error error;
    if (access(limits_path, F_OK) != 0)
        make_another_region();
    int first = vc_file_open(limits_path, VC_KIND_LIMITS, O_RDONLY, &limits, &error);
    int second = vc_file_open(usage_path, VC_KIND_USAGE, O_RDWR, &usage, &error);
    CHECK(first >= 0 && second >= 0 && limits.instance == usage.instance);
    struct stat status;
    CHECK(fstat(first, &status) == 0 && (status.st_mode & 0777) == 0444);
    CHECK(fstat(second, &status) == 0 && (status.st_mode & 0777) == 0666);
    close(first);
    close(second);
    unlink(limits_path);
    unlink(usage_path);
}

/* --- the tracer --- */

static pid_t start(const struct act *act)
{
    pid_t victim = fork();
    if (victim != 0)
        return victim;
    region_at(folder);
    if (act->prepare)
        act->prepare();
    ptrace(PTRACE_TRACEME, 0, NULL, NULL);
    raise(SIGSTOP);
    act->run();
    raise(SIGSTOP);
    _exit(broken != 0);
}

/* Kill after `wanted` changes; returns how many there were, or -1 where tracing is not permitted. */
static int kill_after(const struct act *act, int wanted)
{
    static struct trace trace;
    pid_t victim = start(act);
    int status, changes = 0;
    waitpid(victim, &status, 0);
    if (!WIFSTOPPED(status)) {
        CHECK(WIFSTOPPED(status));
        return 0;
    }
    look(&trace, act->reach);
    while (changes < wanted) {
        if (ptrace(PTRACE_SINGLESTEP, victim, NULL, NULL) != 0) {
            changes = -1;
            break;
        }
        waitpid(victim, &status, 0);
        if (!WIFSTOPPED(status) || WSTOPSIG(status) == SIGSTOP)
            break; /* it has come to its end */
        changes += look(&trace, act->reach);
    }
    kill(victim, SIGKILL);
    while (waitpid(victim, &status, 0) == victim && !WIFSIGNALED(status) && !WIFEXITED(status))
        ;
    CHECK(WIFSIGNALED(status)); /* else a claim of its own did not hold */
    return changes;
}

int main(void)
{
#if defined(__SANITIZE_THREAD__)
    printf("skipped: no threads here, and single steps through the thread sanitizer take minutes\n");
    return 0;
#endif
    cpu_set_t here; /* tracer and victim take turns, a million times: on one core a turn wakes up no other */
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    sched_setaffinity(0, sizeof here, &here);
    folder = make_region(LIMIT);
    snprintf(limits_path, sizeof limits_path, "%s.limits", folder);
    snprintf(usage_path, sizeof usage_path, "%s.usage", folder);
    mine = region_at(folder);
    CHECK(vc_quota_reserve(mine, 0, MINE));
    vc_quota_commit(mine, 0, MINE, VC_QUOTA_PLAIN);
    int kills = 0;
    for (const struct act *act = acts; act < acts + sizeof acts / sizeof *acts && !broken; act++) {
        int changes = 0;
        for (int wanted = 1; !broken; wanted += STRIDE, kills++) {
            if (act->run == claim)
                leave_a_dead_slot();
            changes = kill_after(act, wanted);
            if (changes < 0) {
                fprintf(stderr, "skipped: this machine does not let a process trace its child (%s)\n", strerror(errno));
                remove_region(folder);
                return 0;
            }
            check_that_nothing_is_left();
            if (act->run == change_the_limits)
                check_that_limits_are_old_or_new();
            if (act->run == make_another_region)
                check_that_a_region_is_whole_or_can_be_made();
            if (broken)
                fprintf(stderr, "killed in: %s, after %d changes\n", act->name, changes);
            if (changes < wanted)
                break;
        }
        CHECK(broken || changes >= act->fewest);
        printf("%s: killed after each %d of %d changes\n", act->name, STRIDE, changes);
    }
    remove_region(folder);
    printf("%d kills\n", kills);
    return broken != 0;
}
