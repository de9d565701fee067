/* Attaching to a machine: finds, makes and checks state/shared, and locks its cards. */
#include "sim_state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "sim_engine.h"

/* How soon the dead are missed. A driver ends what a process had running while the kernel closes its files; here somebody has to look. */
#define REAP_NS 2000000ull
/* How soon who waits for a lock looks again. */
#define LOOK_AGAIN_NS 1000000

uint64_t sim_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000ull + (uint64_t)now.tv_nsec;
}

const char *sim_default_directory(void)
{
    const char *named = secure_getenv("VCUDA_SIM_DIR");
    return named && *named ? named : "/run/vcuda-sim";
}

static uint64_t hash_text(const char *text)
{
    uint64_t hash = 14695981039346656037ull;
    for (; *text; text++)
        hash = (hash ^ (unsigned char)*text) * 1099511628211ull;
    return hash;
}

static uint64_t shared_size(int cards)
{
    return sizeof(sim_shared) + (uint64_t)cards * sizeof(sim_card);
}

static void make_mutex(pthread_mutex_t *mutex)
{
    pthread_mutexattr_t attributes;
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(mutex, &attributes);
    pthread_mutexattr_destroy(&attributes);
}

static void fill(sim_shared *shared, const sim_config *config)
{
    shared->layout = SIM_LAYOUT;
    shared->card_count = (uint32_t)config->card_count;
    shared->size = shared_size(config->card_count);
    shared->config_hash = hash_text(config->text);
    shared->cuda_version = config->cuda_version;
    memcpy(shared->driver_version, config->driver_version, sizeof shared->driver_version);
    make_mutex(&shared->process_mutex);
    make_mutex(&shared->making_mutex);
    for (int i = 0; i < config->card_count; i++) {
        sim_card *card = &shared->cards[i];
        make_mutex(&card->mutex);
        card->config = config->cards[i];
        card->time_ns = sim_now();
        card->random = (card->config.timing_seed + 1) * 0x9e3779b97f4a7c15ull | 1;
        card->current = card->switching = card->first_free_event = SIM_NONE;
    }
    shared->magic = SIM_MAGIC;
}

/* Make `path` complete under another name first: whoever sees it sees it whole. */
static int make_shared(const char *path, const sim_config *config, char *why, size_t why_size)
{
    char temporary[3200];
    snprintf(temporary, sizeof temporary, "%s.new", path);
    const uint64_t size = shared_size(config->card_count);
    int fd = open(temporary, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0 || fchmod(fd, 0666) || ftruncate(fd, (off_t)size)) {
        snprintf(why, why_size, "cannot make %s: %s", temporary, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    sim_shared *shared = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (shared == MAP_FAILED) {
        snprintf(why, why_size, "cannot map %s: %s", temporary, strerror(errno));
        return -1;
    }
    fill(shared, config);
    munmap(shared, size);
    if (rename(temporary, path)) {
        snprintf(why, why_size, "cannot make %s: %s", path, strerror(errno));
        return -1;
    }
    return 0;
}

static int open_shared(const sim_state *state, char *why, size_t why_size)
{
    char path[3136], lock_path[3136];
    snprintf(path, sizeof path, "%s/shared", state->directory);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd >= 0 || errno != ENOENT)
        goto opened;
    snprintf(lock_path, sizeof lock_path, "%s/init.lock", state->directory);
    const int lock = open(lock_path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
    if (lock < 0 || flock(lock, LOCK_EX)) {
        snprintf(why, why_size, "cannot lock %s: %s", lock_path, strerror(errno));
        if (lock >= 0)
            close(lock);
        return -1;
    }
    fchmod(lock, 0666);
    int made = 0;
    if (access(path, F_OK))
        made = make_shared(path, &state->config, why, why_size);
    close(lock);
    if (made)
        return -1;
    fd = open(path, O_RDWR | O_CLOEXEC);
opened:
    if (fd < 0)
        snprintf(why, why_size, "cannot open %s: %s", path, strerror(errno));
    return fd;
}

static sim_shared *map_shared(const sim_state *state, char *why, size_t why_size)
{
    const uint64_t size = shared_size(state->config.card_count);
    const int fd = open_shared(state, why, why_size);
    struct stat status;
    if (fd < 0)
        return NULL;
    if (fstat(fd, &status) || (uint64_t)status.st_size < size) {
        snprintf(why, why_size, "%s/shared is truncated; stop its clients and remove it", state->directory);
        close(fd);
        return NULL;
    }
    sim_shared *shared = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    close(fd);
    if (shared == MAP_FAILED) {
        snprintf(why, why_size, "cannot map %s/shared: %s", state->directory, strerror(errno));
        return NULL;
    }
    if (shared->magic != SIM_MAGIC || shared->layout != SIM_LAYOUT || shared->size != size ||
        shared->config_hash != hash_text(state->config.text)) {
        snprintf(why, why_size,
                 "%s/shared does not belong to machine.conf or to this driver build; stop its clients and remove it",
                 state->directory);
        munmap(shared, size);
        return NULL;
    }
    return shared;
}

sim_state *sim_attach(const char *directory, char *why, size_t why_size)
{
    char path[3136];
    sim_state *state = calloc(1, sizeof *state);
    if (!state) {
        snprintf(why, why_size, "out of host memory");
        return NULL;
    }
    state->slot = SIM_NONE;
    state->lock_fd = -1;
    if (!directory)
        directory = sim_default_directory();
    if (strlen(directory) > 3000) {
        snprintf(why, why_size, "the state directory's name is too long");
        free(state);
        return NULL;
    }
    snprintf(state->root, sizeof state->root, "%s", directory);
    snprintf(state->directory, sizeof state->directory, "%s/state", directory);
    snprintf(path, sizeof path, "%s/machine.conf", state->directory);
    if (sim_config_read(path, &state->config, why, why_size)) {
        free(state);
        return NULL;
    }
    state->shared = map_shared(state, why, why_size);
    if (state->shared) {
        snprintf(path, sizeof path, "%s/locks", state->directory);
        state->lock_fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
        if (state->lock_fd < 0)
            snprintf(why, why_size, "cannot open %s: %s", path, strerror(errno));
        else
            fchmod(state->lock_fd, 0666);
    }
    if (!state->shared || state->lock_fd < 0) {
        if (state->shared)
            munmap(state->shared, shared_size(state->config.card_count));
        sim_config_free(&state->config);
        free(state);
        return NULL;
    }
    return state;
}

void sim_detach(sim_state *state)
{
    if (!state)
        return;
    int client = state->slot != SIM_NONE;
    for (int32_t i = 0; !client && i < SIM_MAX_PROCESSES; i++)
        client = atomic_load_explicit(&state->shared->processes[i].pid, memory_order_relaxed) == getpid();
    if (!client)
        close(state->lock_fd);
    munmap(state->shared, state->shared->size);
    sim_config_free(&state->config);
    free(state);
}

sim_card *sim_card_at(sim_state *state, int card)
{
    return &state->shared->cards[card];
}

/* Who is woken and killed before it has taken the lock leaves nobody a wake-up where another was faster: the next in the row would sleep for ever before a lock that is free. */
int sim_lock(pthread_mutex_t *mutex)
{
    int error = pthread_mutex_trylock(mutex);
    while (error == EBUSY || error == ETIMEDOUT) {
        struct timespec until;
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += LOOK_AGAIN_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        error = pthread_mutex_timedlock(mutex, &until);
    }
    return error == EOWNERDEAD;
}

static uint64_t lock_and_advance(sim_state *state, int index)
{
    sim_card *card = &state->shared->cards[index];
    if (sim_lock(&card->mutex)) {
        sim_repair(card);
        card->reap_ns = 0;
        pthread_mutex_consistent(&card->mutex);
    }
    const uint64_t now = sim_now();
    sim_advance(state, card, now); /* what the dead had running ran until they are missed */
    if (now - card->reap_ns >= REAP_NS) {
        card->reap_ns = now;
        sim_reap(state, index);
        sim_advance(state, card, now);
    }
    return now;
}

/* The card whose event a stream of this one waits for, or SIM_NONE. */
static int foreign_card(const sim_card *card)
{
    for (int32_t c = 0; c < card->contexts_used; c++)
        if (card->contexts[c].process != SIM_NONE && card->contexts[c].foreign)
            return card->contexts[c].foreign - 1;
    return SIM_NONE;
}

uint64_t sim_card_lock(sim_state *state, int index)
{
    const uint64_t now = lock_and_advance(state, index);
    const int other = foreign_card(&state->shared->cards[index]);
    if (other == SIM_NONE)
        return now;
    /* That card's timeline has to be evaluated first; two cards are never locked at once. */
    sim_card_unlock(state, index);
    lock_and_advance(state, other);
    sim_card_unlock(state, other);
    return lock_and_advance(state, index);
}

void sim_card_unlock(sim_state *state, int index)
{
    pthread_mutex_unlock(&state->shared->cards[index].mutex);
}
