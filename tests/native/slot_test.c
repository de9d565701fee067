/* Slots: forks, exec, closed descriptors, threads that fork, exhaustion, reuse; an owner that lives keeps its slot. */
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#include "check.h"
#include "base/clock.h"
#include "region/slot.h"

#define LIMIT 1000u

static char *folder;

static bool is_locked(struct vc_region *region, uint32_t index)
{
    int descriptor = open(region->file.path, O_RDONLY | O_CLOEXEC);
    bool locked = vc_slot_locked(descriptor, index);
    close(descriptor);
    return locked;
}

static uint32_t index_of(struct vc_region *region, struct vc_slot *slot)
{
    return (uint32_t)(slot - region->usage->slots);
}

static void take(struct vc_region *region, uint64_t bytes)
{
    CHECK(vc_quota_reserve(region, 0, bytes));
    vc_quota_commit(region, 0, bytes, VC_QUOTA_PLAIN);
}

static void a_forked_child_gets_a_slot_of_its_own(struct vc_region *region)
{
    struct vc_slot *mine = vc_region_slot(region);
    take(region, 600);
    pid_t child = fork();
    if (child == 0) {
        struct vc_region *region = region_at(folder);
        struct vc_slot *own = vc_region_slot(region);
        CHECK(own && own->pid == getpid() && index_of(region, own) == 1);
        CHECK(!vc_quota_reserve(region, 0, 401)); /* the parent's 600 count */
        take(region, 400);
        _exit(broken != 0);
    }
    join(child);
    CHECK(mine->pid == getpid() && mine->cards[0].committed_bytes == 600);
    CHECK(is_locked(region, 0));
    CHECK(vc_quota_reserve(region, 0, 400)); /* the child's are free again */
    vc_quota_rollback(region, 0, 400);
    vc_quota_release(region, 0, 600, VC_QUOTA_PLAIN);
}

/* The C library's fork handlers do not run in a child made by the bare system call. */
static void so_does_one_made_by_the_bare_system_call(struct vc_region *region)
{
    struct vc_slot *mine = vc_region_slot(region);
    pid_t child = (pid_t)syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0);
    if (child == 0) {
        struct vc_region *region = region_at(folder);
        CHECK(vc_region_slot(region) && index_of(region, vc_region_slot(region)) == 1);
        _exit(broken != 0);
    }
    join(child);
    CHECK(mine->pid == getpid() && is_locked(region, 0));
}

enum child { WAITS, EXECS, CLOSES, FORKED_BEFORE_THE_SLOT };

/* A process with 700 bytes and a forked child, of which only the child is left. Returns the child. */
static pid_t orphan(enum child kind)
{
    int ready[2];
    CHECK(pipe2(ready, O_CLOEXEC) == 0);
    pid_t parent = fork();
    if (parent == 0) {
        struct vc_region *region = region_at(folder);
        if (kind != FORKED_BEFORE_THE_SLOT)
            take(region, 700);
        pid_t grandchild = fork();
        if (grandchild != 0) {
            if (kind == FORKED_BEFORE_THE_SLOT)
                take(region, 700);
            ssize_t written = write(ready[1], &grandchild, sizeof grandchild);
            (void)written;
        } else if (kind == EXECS) {
            execl("/bin/sleep", "sleep", "60", (char *)NULL);
        } else {
            for (int descriptor = 1023; kind == CLOSES && descriptor > ready[1]; descriptor--)
                close(descriptor);
            close(ready[1]); /* last: it tells that the child has come so far */
        }
        pause();
    }
    pid_t grandchild = 0;
    CHECK(read(ready[0], &grandchild, sizeof grandchild) == (ssize_t)sizeof grandchild);
    kill(parent, SIGKILL);
    waitpid(parent, NULL, 0);
    close(ready[1]);
    CHECK(read(ready[0], &grandchild, sizeof grandchild) == 0);
    close(ready[0]);
    return grandchild;
}

/* Of an orphan, too: this process inherits them. */
static void end(pid_t process)
{
    kill(process, SIGKILL);
    CHECK(waitpid(process, NULL, 0) == process);
}

/* It has the card's files too, so the driver keeps the memory. */
static void a_forked_child_keeps_what_its_dead_parent_took_until_it_ends(struct vc_region *region)
{
    pid_t child = orphan(WAITS);
    CHECK(vc_slots_reap(region) == 0);
    CHECK(vc_quota_used(region, 0) == 700);
    CHECK(!vc_quota_reserve(region, 0, 301));
    end(child);
    CHECK(reaped(region, 1));
    CHECK(vc_quota_reserve(region, 0, LIMIT));
    vc_quota_rollback(region, 0, LIMIT);
    CHECK(vc_quota_used(region, 0) == 0);
}

static void but_not_if_it_has_called_exec_or_closed_its_files_or_was_there_before(struct vc_region *region)
{
    for (enum child kind = EXECS; kind <= FORKED_BEFORE_THE_SLOT; kind++) {
        pid_t child = orphan(kind);
        CHECK(reaped(region, 1));
        CHECK(vc_quota_used(region, 0) == 0);
        end(child);
    }
}

/* The core's calls of madvise come here: the one with this number waits until it is 0. */
static int stop_at, calls;
static bool stopped;

int madvise(void *address, size_t bytes, int advice)
{
    if (vc_load(&stop_at) && vc_add(&calls, 1) == vc_load(&stop_at)) {
        vc_store(&stopped, true);
        while (vc_load(&stop_at))
            vc_sleep_ns(100000);
    }
    return (int)syscall(SYS_madvise, address, bytes, advice);
}

static void *open_region(void *unused)
{
    (void)unused;
    CHECK(region_at(folder)->state == VC_REGION_ENFORCED);
    return NULL;
}

/* A thread is at the first look for the region and holds its lock: making the page that forks wipe, or mapping a file. */
static void a_child_forked_while_another_thread_opens_the_region_can_open_it(void)
{
    for (int call = 1; call <= 3; call++) {
        pid_t parent = fork();
        if (parent == 0) {
            pthread_t thread;
            calls = 0;
            vc_store(&stop_at, call);
            pthread_create(&thread, NULL, open_region, NULL);
            while (!vc_load(&stopped))
                vc_sleep_ns(100000);
            pid_t child = fork();
            if (child == 0) {
                stop_at = 0;
                alarm(30); /* it would wait for the thread that is not there */
                _exit(vc_region_slot(region_at(folder)) == NULL);
            }
            join(child);
            vc_store(&stop_at, 0);
            pthread_join(thread, NULL);
            _exit(broken != 0);
        }
        join(parent);
    }
}

static void close_all_but(int kept)
{
    for (int descriptor = 3; descriptor < 1024; descriptor++) {
        if (descriptor != kept)
            close(descriptor);
    }
}

static void an_owner_that_closes_all_descriptors_keeps_its_slot(struct vc_region *region, bool also_before)
{
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        struct vc_region *region = region_at(folder);
        if (also_before)
            close_all_but(ready[1]);
        take(region, 100);
        close_all_but(ready[1]);
        ssize_t written = write(ready[1], "x", 1);
        (void)written;
        pause();
    }
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    CHECK(vc_slots_reap(region) == 0);
    CHECK(vc_quota_used(region, 0) == 100);
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    CHECK(reaped(region, 1));
    close(ready[0]);
    close(ready[1]);
}

static void an_unreaped_victim_holds_nothing(struct vc_region *region)
{
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        take(region_at(folder), 300);
        ssize_t written = write(ready[1], "x", 1);
        (void)written;
        pause();
    }
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    kill(child, SIGKILL);
    siginfo_t info;
    waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT);
    CHECK(kill(child, 0) == 0); /* it still answers */
    CHECK(reaped(region, 1));
    waitpid(child, NULL, 0);
    close(ready[0]);
    close(ready[1]);
}

/* As process 1 of a PID namespace: let a PID be used twice, and see that the second process does not keep the first one's slot. */
static int use_a_pid_twice(void)
{
    struct vc_region *region = region_at(folder);
    CHECK(vc_region_slot(region) != NULL);
    pid_t first = fork();
    if (first == 0) {
        take(region_at(folder), 100);
        region_at(folder)->slot->flags = 0; /* as on overlayfs: the lock alone decides nothing */
        _exit(broken != 0);
    }
    join(first);
    vc_sleep_ns(50000000); /* /proc tells start times in hundredths of a second */
    FILE *last = fopen("/proc/sys/kernel/ns_last_pid", "w");
    if (last) {
        fprintf(last, "%d", (int)first - 1);
        fclose(last);
    }
    pid_t second = fork();
    if (second == 0) {
        pause();
        _exit(0);
    }
    if (second != first)
        fprintf(stderr, "PID reuse not shown: this machine does not let the test choose a PID\n");
    CHECK(reaped(region, 1));
    kill(second, SIGKILL);
    waitpid(second, NULL, 0);
    return broken != 0;
}

static void a_process_with_a_reused_pid_is_not_the_owner(struct vc_region *region)
{
    pid_t outside = fork();
    if (outside == 0) {
        if (unshare(CLONE_NEWPID | CLONE_NEWNS) != 0) {
            fprintf(stderr, "PID reuse not shown: this machine does not let the test make a PID namespace\n");
            _exit(0);
        }
        pid_t inside = fork();
        if (inside == 0) {
            if (mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) != 0 || mount("proc", "/proc", "proc", 0, NULL) != 0)
                _exit(0);
            _exit(use_a_pid_twice());
        }
        join(inside);
        _exit(broken != 0);
    }
    join(outside);
    vc_slots_reap(region);
    CHECK(vc_quota_used(region, 0) == 0);
}

static void exec_gives_the_memory_back(struct vc_region *region)
{
    int ready[2];
    CHECK(pipe(ready) == 0);
    pid_t child = fork();
    if (child == 0) {
        struct vc_region *region = region_at(folder);
        take(region, 300);
        dup2(ready[1], 1);
        execl("/bin/sh", "sh", "-c", "echo; exec sleep 30", (char *)NULL);
        _exit(1);
    }
    char byte;
    CHECK(read(ready[0], &byte, 1) == 1);
    bool mapped = region->slot->flags & VC_SLOT_LOCK_MAPPED;
    CHECK(mapped ? reaped(region, 1) : vc_slots_reap(region) == 0); /* on overlayfs it can't be told from a closed descriptor */
    kill(child, SIGKILL);
    waitpid(child, NULL, 0);
    vc_slots_reap(region);
    CHECK(vc_quota_used(region, 0) == 0);
    close(ready[0]);
    close(ready[1]);
}

static void when_all_slots_are_taken_memory_is_refused(struct vc_region *region)
{
    int ready[2], go[2];
    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    pid_t children[VC_MAX_SLOTS];
    for (int number = 0; number < VC_MAX_SLOTS; number++) {
        children[number] = fork();
        if (children[number] != 0)
            continue;
        struct vc_region *region = region_at(folder);
        char has = vc_region_slot(region) != NULL;
        close(go[1]);
        CHECK(vc_quota_reserve(region, 0, 1) == has);
        ssize_t moved = write(ready[1], &has, 1);
        moved += read(go[0], &has, 1);
        _exit(broken != 0 || moved < 1);
    }
    int served = 0;
    char has;
    for (int number = 0; number < VC_MAX_SLOTS; number++)
        served += read(ready[0], &has, 1) == 1 && has;
    CHECK(served == VC_MAX_SLOTS - 1); /* ours is one */
    CHECK(vc_load(&region->usage->slot_shortage) >= 1);
    close(go[1]);
    for (int number = 0; number < VC_MAX_SLOTS; number++)
        join(children[number]);
    close(ready[0]);
    close(ready[1]);
    close(go[0]);
    CHECK(reaped(region, VC_MAX_SLOTS - 1));
}

int main(void)
{
    prctl(PR_SET_CHILD_SUBREAPER, 1);
    folder = make_region(LIMIT);
    a_child_forked_while_another_thread_opens_the_region_can_open_it();
    struct vc_region *region = region_at(folder);
    CHECK(vc_region_slot(region) == &region->usage->slots[0]);
    CHECK(is_locked(region, 0) && !is_locked(region, 1));
    a_forked_child_gets_a_slot_of_its_own(region);
    so_does_one_made_by_the_bare_system_call(region);
    a_forked_child_keeps_what_its_dead_parent_took_until_it_ends(region);
    but_not_if_it_has_called_exec_or_closed_its_files_or_was_there_before(region);
    an_owner_that_closes_all_descriptors_keeps_its_slot(region, false);
    an_owner_that_closes_all_descriptors_keeps_its_slot(region, true);
    an_unreaped_victim_holds_nothing(region);
    a_process_with_a_reused_pid_is_not_the_owner(region);
    exec_gives_the_memory_back(region);
    when_all_slots_are_taken_memory_is_refused(region);
    remove_region(folder);
    return broken != 0;
}
