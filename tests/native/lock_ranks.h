/* The order of locks, asserted: included before every source of a shim that a test builds (tests/model/test_model.py).
 *
 * A thread may take a lock only of a higher rank than all that it holds. A lock that is tried waits for nobody, so it may be tried in any order.
 * The table is the one in docs/architecture.md; a lock that is in no row ends the program. */
#ifndef LOCK_RANKS_H
#define LOCK_RANKS_H

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *file, *lock;
    int rank;
} lock_ranks[] = {
    {"context/context.c", "&measuring", 1},
    {"memory/pool.c", "&mutex", 2},
    {"memory/departure.c", "&mutex", 2},
    {"memory/small_array.c", "&mutex", 2},
    {"memory/exported.c", "&mutex", 2},
    {"memory/ipc.c", "&mutex", 2},
    {"work/helper.c", "&looking", 2},
    {"memory/meter.c", "&meter->mutex", 3},
    {"memory/object.c", "&mutex", 3},
    {"memory/holder.c", "&mutex", 3},
    {"work/gates.c", "&mutex", 3},
    {"work/capture.c", "&mutex", 3},
    {"work/tracker.c", "&trackers_mutex", 4},
    {"work/", "&tracker->mutex", 5},
    {"gate/enter.c", "&gate->mutex", 6},
    {"gate/charge.c", "&gate->mutex", 6},
    {"gate/comes.c", "&gate->mutex", 6},
    {"gate/seen.c", "&gate->mutex", 6},
    {"region/slot.c", "&region->slow_mutex", 7},
    {"region/shared.c", "&region->slow_mutex", 7},
    {"region/charged.c", "&region->charged.mutex", 7},
    {"region/witness.c", "&mine->mutex", 8},
    {"region/file.c", "&own_writers", 8},
};

enum { MOST_LOCKS_HELD = 8 };
struct held_locks {
    int count, ranks[MOST_LOCKS_HELD];
    const void *locks[MOST_LOCKS_HELD];
};
__attribute__((weak)) struct held_locks *held_locks_of_this_thread(void)
{
    static __thread struct held_locks held;
    return &held;
}

static inline int rank_of_lock(const char *file, const char *lock)
{
    for (size_t row = 0; row < sizeof lock_ranks / sizeof *lock_ranks; row++)
        if (strstr(file, lock_ranks[row].file) && strcmp(lock, lock_ranks[row].lock) == 0)
            return lock_ranks[row].rank;
    fprintf(stderr, "lock ranks: %s of %s is in no row of tests/native/lock_ranks.h\n", lock, file);
    abort();
}

static inline void hold_lock(const void *lock, int rank)
{
    struct held_locks *held = held_locks_of_this_thread();
    if (held->count == MOST_LOCKS_HELD)
        abort();
    held->ranks[held->count] = rank;
    held->locks[held->count++] = lock;
}

static inline int lock_ranked(pthread_mutex_t *mutex, const char *file, const char *lock)
{
    const struct held_locks *held = held_locks_of_this_thread();
    int rank = rank_of_lock(file, lock);
    for (int index = 0; index < held->count; index++) {
        if (held->ranks[index] < rank)
            continue;
        fprintf(stderr, "lock ranks: %s of %s (rank %d) is taken while one of rank %d is held\n", lock, file, rank, held->ranks[index]);
        abort();
    }
    hold_lock(mutex, rank);
    return pthread_mutex_lock(mutex);
}

static inline int try_lock_ranked(pthread_mutex_t *mutex, const char *file, const char *lock)
{
    int result = pthread_mutex_trylock(mutex);
    if (result == 0)
        hold_lock(mutex, rank_of_lock(file, lock));
    return result;
}

static inline int unlock_ranked(pthread_mutex_t *mutex)
{
    struct held_locks *held = held_locks_of_this_thread();
    for (int index = held->count - 1; index >= 0; index--) {
        if (held->locks[index] != mutex)
            continue;
        held->count--;
        held->ranks[index] = held->ranks[held->count];
        held->locks[index] = held->locks[held->count];
        break;
    }
    return pthread_mutex_unlock(mutex);
}

#define pthread_mutex_lock(mutex) lock_ranked(mutex, __FILE__, #mutex)
#define pthread_mutex_trylock(mutex) try_lock_ranked(mutex, __FILE__, #mutex)
#define pthread_mutex_unlock(mutex) unlock_ranked(mutex)
/* With a condition variable the mutex is given up and taken again while nothing else may be held: the waiter's rank stays. */
#endif
