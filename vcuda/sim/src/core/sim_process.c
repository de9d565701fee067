/* Process slots: claimed by a record lock that ends with the process, seen through it by everyone else. */
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim_engine.h"

/* A watcher misses the dead so soon: each that is missed later has the card for longer than it lived. */
#define WATCH_NS 50000
/* A stopped one that goes on has left a card's lock within this, if it is let run. */
#define LEAVE_NS 1000000

static uint64_t own_namespace(void)
{
    struct stat status;
    return stat("/proc/self/ns/pid", &status) ? 0 : (uint64_t)status.st_ino;
}

static uint64_t own_start_ticks(void)
{
    char text[1024];
    const int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    unsigned long long ticks = 0;
    if (fd >= 0)
        close(fd);
    if (got <= 0)
        return 0;
    text[got] = 0;
    const char *p = strrchr(text, ')');
    for (int field = 2; p && field < 22; field++)
        p = strchr(p + 1, ' ');
    if (!p || sscanf(p, "%llu", &ticks) != 1)
        return 0;
    return ticks;
}

static void own_name(char *name, size_t size)
{
    const int fd = open("/proc/self/cmdline", O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, name, size - 1);
    if (fd >= 0)
        close(fd);
    name[got > 0 ? got : 0] = 0; /* the arguments are separated by zeros: this keeps the first */
}

static struct flock slot_lock(int32_t slot)
{
    return (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
}

static int is_self(const sim_state *state, int32_t slot)
{
    const sim_process *process = &state->shared->processes[slot];
    return slot == state->slot || (process->pid == getpid() && process->pid_namespace == own_namespace() &&
                                   process->start_ticks == own_start_ticks());
}

int sim_process_alive(sim_state *state, int32_t slot, int *pid)
{
    const sim_process *process = &state->shared->processes[slot];
    struct flock lock = slot_lock(slot);
    *pid = 0;
    if (atomic_load_explicit(&process->pid, memory_order_acquire) == 0)
        return 0;
    if (is_self(state, slot)) { /* one's own record locks are never in one's own way */
        *pid = (int)getpid();
        return 1;
    }
    if (fcntl(state->lock_fd, F_GETLK, &lock) || lock.l_type == F_UNLCK)
        return 0;
    *pid = lock.l_pid > 0 ? (int)lock.l_pid : 0;
    if (*pid && !process->host_pid && own_namespace() == state->config.pid_namespace)
        atomic_store_explicit(&state->shared->processes[slot].host_pid, *pid, memory_order_relaxed);
    return 1;
}

int sim_process_join(sim_state *state)
{
    if (state->slot != SIM_NONE)
        return 0;
    sim_shared *shared = state->shared;
    if (sim_lock(&shared->process_mutex))
        pthread_mutex_consistent(&shared->process_mutex);
    for (int32_t i = 0; i < SIM_MAX_PROCESSES && state->slot == SIM_NONE; i++) {
        sim_process *process = &shared->processes[i];
        struct flock lock = slot_lock(i);
        if ((process->pid && is_self(state, i)) || fcntl(state->lock_fd, F_SETLK, &lock))
            continue;
        process->generation++;
        process->start_ticks = own_start_ticks();
        process->pid_namespace = own_namespace();
        process->host_pid = process->pid_namespace == state->config.pid_namespace ? getpid() : 0;
        own_name(process->name, sizeof process->name);
        atomic_store_explicit(&process->pid, getpid(), memory_order_release);
        state->slot = i;
    }
    pthread_mutex_unlock(&shared->process_mutex);
    return state->slot == SIM_NONE ? -1 : 0;
}

/* Whether the slot had something on the card, and its process is gone. */
static int is_left(sim_state *state, const sim_card *card, int32_t slot)
{
    int pid;
    const uint32_t generation = card->usage[slot].generation;
    return generation && (generation != state->shared->processes[slot].generation || !sim_process_alive(state, slot, &pid));
}

void sim_reap(sim_state *state, int index)
{
    sim_card *card = &state->shared->cards[index];
    for (int32_t i = 0; i < SIM_MAX_PROCESSES; i++)
        if (is_left(state, card, i))
            sim_purge(card, i);
}

static void look_for_the_dead(sim_state *state, int index)
{
    int32_t slot = 0;
    while (slot < SIM_MAX_PROCESSES && !is_left(state, &state->shared->cards[index], slot))
        slot++;
    if (slot == SIM_MAX_PROCESSES)
        return;
    sim_card_lock(state, index);
    sim_reap(state, index);
    sim_card_unlock(state, index);
}

/* The thread that holds the card's lock, as this PID namespace knows it; 0: none does. */
static pid_t holder(const sim_card *card)
{
    return __atomic_load_n(&card->mutex.__data.__lock, __ATOMIC_RELAXED) & FUTEX_TID_MASK;
}

static int is_stopped(pid_t thread)
{
    char path[64], text[256], *name_end;
    snprintf(path, sizeof path, "/proc/%d/stat", (int)thread);
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[got > 0 ? got : 0] = 0;
    name_end = strrchr(text, ')');
    return name_end && name_end[1] == ' ' && name_end[2] == 'T';
}

/* A driver's locks are the kernel's: nobody is stopped within them. Here somebody may be, and all others would wait: until it has left it goes on. */
static void look_for_the_stopped(const sim_card *card)
{
    const pid_t thread = holder(card);
    if (!thread || !is_stopped(thread))
        return;
    const uint64_t end = sim_now() + LEAVE_NS;
    kill(thread, SIGCONT);
    while (holder(card) == thread && sim_now() < end)
        sched_yield();
    kill(thread, SIGSTOP);
}

void sim_watch(sim_state *state, uint64_t for_ns)
{
    const struct timespec pause = {.tv_nsec = WATCH_NS};
    const uint64_t end = sim_now() + for_ns;
    const int slack = prctl(PR_GET_TIMERSLACK);
    prctl(PR_SET_TIMERSLACK, 1);
    while (sim_now() < end) {
        nanosleep(&pause, NULL);
        for (int i = 0; i < state->config.card_count; i++) {
            look_for_the_stopped(&state->shared->cards[i]);
            look_for_the_dead(state, i);
        }
    }
    prctl(PR_SET_TIMERSLACK, slack);
}
