/* Somebody takes the wake-up that was for whoever waits for a card's lock, and does not take the lock: as a process that is woken and killed. 0: the other one gets it all the same. */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "sim_state.h"

static sim_state *state;

static void *take_wakeup(void *word)
{
    syscall(SYS_futex, word, FUTEX_WAIT, *(volatile int *)word, NULL, NULL, 0);
    return NULL;
}

static void *take_lock(void *unused)
{
    sim_card_lock(state, 0);
    sim_card_unlock(state, 0);
    return unused;
}

int main(int count, char **arguments)
{
    char why[256] = "";
    pthread_t thief, waiter;
    const struct timespec pause = {.tv_nsec = 100000000};
    state = count > 1 ? sim_attach(arguments[1], why, sizeof why) : NULL;
    if (!state) {
        fputs(why, stderr);
        return 2;
    }
    sim_card_lock(state, 0);
    pthread_create(&thief, NULL, take_wakeup, &state->shared->cards[0].mutex.__data.__lock);
    nanosleep(&pause, NULL); /* first in the row … */
    pthread_create(&waiter, NULL, take_lock, NULL);
    nanosleep(&pause, NULL); /* … before this one */
    sim_card_unlock(state, 0);
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 5;
    return pthread_timedjoin_np(waiter, NULL, &until) == 0 ? 0 : 1;
}
