/* Processes that do not live long: killed, stopped, ended or replaced in the middle of their work. */
#pragma once
#include <sys/prctl.h>
#include "costs.h"

static pid_t child(void (*pattern)(struct place *), unsigned kill_after_us)
{
    pid_t pid = fork();
    if (pid == 0) {
        struct place place = {0};
        open_context(&place);
        CALL(cuStreamCreate, &place.streams[0], 1);
        pattern(&place);
        if (kill_after_us)
            sleep_us(kill_after_us), raise(SIGKILL);
        synchronize();
        _exit(0);
    }
    return pid;
}

static void a_long_one(struct place *place) { launch(place, "spin_100ms", place->streams[0]); }

/* Each one is killed 20 ms into a kernel of 100 ms. */
static void killed_in_mid_kernel(struct place *place)
{
    (void)place;
    waitpid(child(a_long_one, 20000), NULL, 0);
}

static void a_very_long_one(struct place *place) { launch(place, "spin_900ms", place->streams[0]); }

static void stop(struct place *place)
{
    a_very_long_one(place);
    for (;; sleep_us(1000)) /* who watches the simulated card lets it go on until it has left the card's lock */
        raise(SIGSTOP);
}

/* It sleeps from its launch on, with all its threads, and is killed 20 ms later. */
static void stopped_after_launch(struct place *place)
{
    (void)place;
    pid_t pid = child(stop, 0);
    waitpid(pid, NULL, WUNTRACED);
    sleep_us(20000);
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
}

/* Three at a time, so that some of them are alive and wait at the gate meanwhile. */
static void stopped_in_turn(struct place *place)
{
    (void)place;
    pid_t pids[3];
    uint64_t stopped_ns[3] = {0};
    for (unsigned i = 0; i < 3; i++)
        pids[i] = child(stop, 0);
    for (unsigned left = 3; left != 0; sleep_us(500))
        for (unsigned i = 0; i < 3; i++) {
            if (!pids[i] || (!stopped_ns[i] && waitpid(pids[i], NULL, WUNTRACED | WNOHANG) != pids[i]))
                continue;
            stopped_ns[i] = stopped_ns[i] ? stopped_ns[i] : now_ns();
            if (now_ns() - stopped_ns[i] < 20000000)
                continue;
            kill(pids[i], SIGKILL);
            waitpid(pids[i], NULL, 0);
            pids[i] = 0;
            left--;
        }
}

static void without_end(struct place *place)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
        launch(place, "spin_20ms", place->streams[0]);
}

/* Each is let run for 4 ms, and then stopped while the others have their turns: it does not see its work end. */
static void run_in_turn(struct place *place)
{
    static pid_t pids[6];
    unsigned turn = place->round % 6;
    if (place->round == 0) {
        for (unsigned i = 0; i < 6; i++)
            pids[i] = child(without_end, 0);
        sleep_us(500000);
    }
    kill(pids[turn], SIGSTOP);
    sleep_us(4000);
    kill(pids[(turn + 1) % 6], SIGCONT);
    sleep_us(4000);
}

static void serve(struct place *place)
{
    for (unsigned i = 0; i < 4; i++)
        launch(place, "spin_100us", place->streams[0]);
    CALL(cuStreamSynchronize, place->streams[0]);
}

static void serve_without_end(struct place *place)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (;;)
        serve(place);
}

/* As in a debugger. What it left on the card is over in less than a millisecond. */
static void serve_and_stand_still(struct place *place)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (uint64_t until_ns = now_ns() + 300000000; now_ns() < until_ns;)
        serve(place);
    launch(place, "spin_100us", place->streams[0]);
    for (;; sleep_us(1000))
        raise(SIGSTOP);
}

/* One of several stands still for good, and the others go on. */
static void sibling_stopped(struct place *place)
{
    if (place->round == 0) {
        child(serve_and_stand_still, 0);
        child(serve_without_end, 0);
    }
    sleep_us(100000);
}

static void leave_a_long_one(struct place *place)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    a_long_one(place);
    for (;; sleep_us(1000))
        raise(SIGSTOP);
}

/* What others leave on the card, each for good, while one goes on. */
static void stopped_beside_a_sibling(struct place *place)
{
    if (place->round == 0)
        child(serve_without_end, 0);
    if (place->round % 5 == 0)
        child(leave_a_long_one, 0);
    sleep_us(100000);
}

static void prove_short(struct place *place, handle shortest, unsigned times)
{
    for (unsigned i = 0; i < times; i++) {
        launch_by_argument(place, shortest);
        CALL(cuStreamSynchronize, place->streams[0]);
    }
}

/* Long ones behind short ones of the same function: nobody looks before they are done. */
static void hide_and_stand_still(struct place *place, const char *what, unsigned times)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    handle shortest = launched_by_argument(place, "spin_10us"), hidden = launched_by_argument(place, what);
    for (;;) {
        prove_short(place, shortest, 20);
        for (unsigned i = 0; i < times; i++)
            launch_by_argument(place, hidden);
        raise(SIGSTOP);
    }
}

static void hide_short_ones(struct place *place) { hide_and_stand_still(place, "spin_100us", 9); }

static void hide_long_ones(struct place *place) { hide_and_stand_still(place, "spin_2000us", 5); }

/* Two that are let go on so long after they stopped, again and again. */
static void stop_two(struct place *place, void (*pattern)(struct place *), uint64_t for_ns)
{
    static pid_t pids[2];
    static uint64_t stopped_ns[2];
    for (unsigned i = 0; i < 2; i++) {
        if (place->round == 0)
            pids[i] = child(pattern, 0);
        if (stopped_ns[i] == 0 && waitpid(pids[i], NULL, WUNTRACED | WNOHANG) == pids[i]) {
            stopped_ns[i] = now_ns();
        } else if (stopped_ns[i] != 0 && now_ns() - stopped_ns[i] > for_ns) {
            stopped_ns[i] = 0;
            kill(pids[i], SIGCONT);
        }
    }
    sleep_us(200);
}

static void stopped_behind_hidden_work(struct place *place) { stop_two(place, hide_short_ones, 3000000); }

static void stopped_behind_hidden_long_work(struct place *place) { stop_two(place, hide_long_ones, 13000000); }

enum { AT_ONCE = 4 };

static void each_of(void (*pattern)(struct place *), unsigned kill_after_us)
{
    pid_t pids[AT_ONCE];
    for (unsigned i = 0; i < AT_ONCE; i++)
        pids[i] = child(pattern, kill_after_us);
    for (unsigned i = 0; i < AT_ONCE; i++)
        waitpid(pids[i], NULL, 0);
}

static void killed_after_launch(struct place *place)
{
    (void)place;
    each_of(a_very_long_one, 1500);
}

static void one_and_end(struct place *place)
{
    launch(place, "spin_2000us", place->streams[0]);
    CALL(cuCtxSynchronize);
    _exit(0);
}

/* What each launches nobody has measured before. */
static void short_processes(struct place *place)
{
    (void)place;
    waitpid(child(one_and_end, 0), NULL, 0);
}

static void long_after_it_was_proven_short(struct place *place)
{
    handle shortest = launched_by_argument(place, "spin_10us"), longest = launched_by_argument(place, "spin_100ms");
    prove_short(place, shortest, 10);
    launch_by_argument(place, longest);
}

static void many_long_ones_at_once(struct place *place)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    handle shortest = launched_by_argument(place, "spin_10us"), longest = launched_by_argument(place, "spin_20ms");
    prove_short(place, shortest, 12);
    for (unsigned i = 0; i < 16; i++)
        launch_by_argument(place, longest);
    for (;; sleep_us(1000))
        raise(SIGSTOP);
}

/* Each leaves a third of a second on the card, by what was proven short, and stands still for good; some of them at a time. */
static void stopped_for_good(struct place *place)
{
    static pid_t pids[6];
    pid_t *pid = &pids[place->round % 6];
    if (*pid) {
        kill(*pid, SIGKILL);
        waitpid(*pid, NULL, 0);
    }
    *pid = child(many_long_ones_at_once, 0);
    waitpid(*pid, NULL, WUNTRACED);
}

static void some_hidden_ones(struct place *place)
{
    handle shortest = launched_by_argument(place, "spin_10us"), longer = launched_by_argument(place, "spin_1000us");
    prove_short(place, shortest, 12);
    for (unsigned i = 0; i < 12; i++)
        launch_by_argument(place, longer);
    sleep_us(100000);
}

/* Before anybody takes it to stand still. */
static void killed_soon(struct place *place)
{
    (void)place;
    each_of(some_hidden_ones, 10000);
}

/* Within what the gate had handed out in advance, and before anybody asks whether the card is done. */
static void killed_within_permit(struct place *place)
{
    (void)place;
    each_of(long_after_it_was_proven_short, 1800);
}

static void end(struct place *place)
{
    a_very_long_one(place);
    sleep_us(1500);
    _exit(0);
}

static void ended_after_launch(struct place *place)
{
    (void)place;
    each_of(end, 0);
}

static void become_another(struct place *place)
{
    a_very_long_one(place);
    sleep_us(1500);
    execl("/bin/sleep", "sleep", "0.02", (char *)NULL);
    _exit(1);
}

static void exec_after_launch(struct place *place)
{
    (void)place;
    each_of(become_another, 0);
}

static void some(struct place *place) { greedy(place, "spin_1000us", 8); }

static void fork_tree(struct place *place)
{
    pid_t pids[4];
    (void)place;
    for (unsigned i = 0; i < 4; i++)
        pids[i] = child(some, 0);
    for (unsigned i = 0; i < 4; i++)
        waitpid(pids[i], NULL, 0);
}
