/* The arbiter's thread: it listens to the tenants' bells, reads their usage, decides card by card and writes the grants. */
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "arbiter_member.h"
#include "vc_atomic.h"
#include "vc_clock.h"
#include "vc_native.h"

#ifndef SYS_futex_waitv
#define SYS_futex_waitv 449
#endif

enum { MAX_BELLS = 128 /* the kernel's limit */, FUTEX_IS_32_BITS = 2 };

/* As in <linux/futex.h> since 5.16. */
struct waiter {
    uint64_t value;
    uint64_t address;
    uint32_t flags;
    uint32_t reserved;
};

/* What the thread listens to while it sleeps. */
struct bells {
    struct waiter waiters[MAX_BELLS];
    struct vc_member *owners[MAX_BELLS];
    unsigned count;
    uint64_t until_ns; /* some tenant must be looked at by then, because it can't be heard */
};

/* A card and its tenants; seats[i] says whose limits tenants[i] is. */
struct card {
    char uuid[VC_UUID_BYTES];
    struct vc_card_plan plan;
    struct seat {
        struct vc_member *member;
        uint32_t index;
    } *seats;
    unsigned capacity;
};

struct vc_arbiter {
    pthread_t thread;
    pthread_mutex_t mutex; /* guards everything below; held while deciding, never while sleeping */
    struct vc_member **members;
    unsigned member_count;
    struct card **cards;
    unsigned card_count;
    uint64_t decisions, leases;
    uint32_t changed_futex;
    uint32_t stopping;
    bool deaf; /* the kernel can't wait for several futexes (before 5.16) */
};

static const uint64_t SHORTEST_SLEEP_NS = 20000;
/* Tenants that did something so lately are listened to first. */
static const uint64_t FIRST_NS = 10000000000;

/* --- seats --- */

static struct card *card_of(struct vc_arbiter *arbiter, const char *uuid)
{
    for (unsigned i = 0; i < arbiter->card_count; i++)
        if (strncasecmp(arbiter->cards[i]->uuid, uuid, VC_UUID_BYTES) == 0)
            return arbiter->cards[i];
    struct card **grown = realloc(arbiter->cards, (arbiter->card_count + 1) * sizeof *grown);
    if (!grown)
        return NULL;
    arbiter->cards = grown;
    struct card *card = calloc(1, sizeof *card);
    if (!card)
        return NULL;
    memcpy(card->uuid, uuid, VC_UUID_BYTES);
    vc_plan_init(&card->plan);
    grown[arbiter->card_count++] = card;
    return card;
}

static bool take_seat(struct card *card, struct vc_member *member, uint32_t index)
{
    struct vc_card_plan *plan = &card->plan;
    if (plan->count == card->capacity) {
        unsigned capacity = card->capacity ? card->capacity * 2 : 8;
        struct vc_tenant *tenants = realloc(plan->tenants, capacity * sizeof *tenants);
        if (tenants)
            plan->tenants = tenants;
        struct seat *seats = realloc(card->seats, capacity * sizeof *seats);
        if (seats)
            card->seats = seats;
        if (!tenants || !seats)
            return false;
        card->capacity = capacity;
    }
    const struct vc_card_limit *limit = &member->limits->cards[index];
    vc_tenant_init(&plan->tenants[plan->count], limit->cores, limit->core_limit);
    card->seats[plan->count] = (struct seat){member, index};
    plan->count++;
    return true;
}

static void leave_seats(struct vc_arbiter *arbiter, const struct vc_member *member)
{
    for (unsigned c = 0; c < arbiter->card_count; c++) {
        struct card *card = arbiter->cards[c];
        for (unsigned i = 0; i < card->plan.count;) {
            if (card->seats[i].member != member) {
                i++;
                continue;
            }
            card->seats[i] = card->seats[card->plan.count - 1];
            vc_plan_remove(&card->plan, i);
        }
    }
}

/* --- one round --- */

/* Returns when to decide again at the latest. */
static uint64_t decide_card(struct vc_arbiter *arbiter, struct card *card, uint64_t now_ns)
{
    struct vc_card_plan *plan = &card->plan;
    uint64_t sequence = plan->sequence;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_card_limit *limit = &card->seats[i].member->limits->cards[card->seats[i].index];
        vc_tenant_resize(&plan->tenants[i], vc_load_relaxed(&limit->cores), vc_load_relaxed(&limit->core_limit));
        vc_tenant_prioritise(&plan->tenants[i], vc_load_relaxed(&limit->priority));
        vc_member_observation(card->seats[i].member, card->seats[i].index, &plan->tenants[i].seen);
    }
    uint64_t next = vc_plan_decide(plan, now_ns);
    /* A holder may start without a ring. */
    for (unsigned i = 0; i < plan->count; i++)
        if (plan->tenants[i].active || (int)i == plan->holder)
            card->seats[i].member->active_ns = now_ns;
    /* Take the card from its last holder before the next one gets it. */
    for (int holders = 0; holders < 2; holders++)
        for (unsigned i = 0; i < plan->count; i++)
            if (((int)i == plan->holder) == (holders == 1))
                vc_member_write(card->seats[i].member, card->seats[i].index, &plan->tenants[i]);
    arbiter->decisions++;
    arbiter->leases += plan->sequence - sequence;
    return next;
}

static uint64_t decide(struct vc_arbiter *arbiter, uint64_t now_ns)
{
    uint64_t next = now_ns + VC_ARBITER_REST_NS;
    for (unsigned i = 0; i < arbiter->member_count; i++)
        if (vc_member_due(arbiter->members[i], now_ns))
            vc_member_read(arbiter->members[i], now_ns);
    for (unsigned i = 0; i < arbiter->card_count; i++) {
        if (arbiter->cards[i]->plan.count == 0)
            continue;
        uint64_t wanted = decide_card(arbiter, arbiter->cards[i], now_ns);
        next = wanted < next ? wanted : next;
    }
    for (unsigned i = 0; i < arbiter->member_count; i++)
        vc_member_beat(arbiter->members[i], now_ns);
    return next;
}

static void collect_bells_of(struct bells *bells, struct vc_member *member, bool deaf)
{
    member->listened = !deaf && vc_member_heard(member) && bells->count + member->card_count <= MAX_BELLS;
    for (uint32_t card = 0; member->listened && card < member->card_count; card++) {
        bells->owners[bells->count] = member;
        bells->waiters[bells->count++] = (struct waiter){
            member->last_ring[card], (uintptr_t)vc_member_bell(member, card), FUTEX_IS_32_BITS, 0};
    }
}

/* Our own bell and those of all tenants, as many as fit; whom we can't hear must be looked at. */
static void collect_bells(struct vc_arbiter *arbiter, struct bells *bells, uint64_t now_ns)
{
    bells->waiters[0] = (struct waiter){vc_load(&arbiter->changed_futex), (uintptr_t)&arbiter->changed_futex,
                                        FUTEX_IS_32_BITS, 0};
    bells->owners[0] = NULL;
    bells->count = 1;
    bells->until_ns = UINT64_MAX;
    for (unsigned lately = 2; lately-- > 0;)
        for (unsigned i = 0; i < arbiter->member_count; i++)
            if ((now_ns - arbiter->members[i]->active_ns < FIRST_NS) == lately)
                collect_bells_of(bells, arbiter->members[i], arbiter->deaf);
    for (unsigned i = 0; i < arbiter->member_count; i++) {
        const struct vc_member *member = arbiter->members[i];
        uint64_t look = member->read_ns + vc_member_age_limit(member, now_ns);
        if (!member->listened && look < bells->until_ns)
            bells->until_ns = look;
    }
}

/* Note who rang; the answer of a call that can't say it means everyone. */
static void note_ring(struct vc_arbiter *arbiter, const struct bells *bells, long woken)
{
    const struct vc_member *owner = woken > 0 && woken < (long)bells->count ? bells->owners[woken] : NULL;
    pthread_mutex_lock(&arbiter->mutex);
    for (unsigned i = 0; i < arbiter->member_count; i++)
        if (!owner || arbiter->members[i] == owner) /* it may have been removed meanwhile */
            arbiter->members[i]->rang = true;
    pthread_mutex_unlock(&arbiter->mutex);
}

static void sleep_until(struct vc_arbiter *arbiter, const struct bells *bells, uint64_t until_ns)
{
    uint64_t now = vc_now_ns();
    if (bells->until_ns < until_ns)
        until_ns = bells->until_ns;
    if (until_ns <= now)
        return;
    long woken;
    if (arbiter->deaf) {
        uint64_t sleep = until_ns - now;
        struct timespec timeout = {.tv_sec = (time_t)(sleep / 1000000000u), .tv_nsec = (long)(sleep % 1000000000u)};
        woken = syscall(SYS_futex, &arbiter->changed_futex, FUTEX_WAIT, (uint32_t)bells->waiters[0].value, &timeout, NULL, 0);
    } else {
        struct timespec deadline = {.tv_sec = (time_t)(until_ns / 1000000000u), .tv_nsec = (long)(until_ns % 1000000000u)};
        woken = syscall(SYS_futex_waitv, bells->waiters, bells->count, 0, &deadline, CLOCK_MONOTONIC);
    }
    if (woken < 0 && errno == ETIMEDOUT)
        return;
    if (woken < 0 && (errno == ENOSYS || errno == EPERM)) /* EPERM: a sandbox's way to say so */
        arbiter->deaf = true;
    else if (woken < 0 && errno != EAGAIN && errno != EINTR) /* a tenant has cut its file short: all are read, this one then left out */
        vc_sleep_ns(SHORTEST_SLEEP_NS);
    note_ring(arbiter, bells, woken);
}

static void *run(void *argument)
{
    struct vc_arbiter *arbiter = argument;
    struct bells bells;
    prctl(PR_SET_NAME, "vcuda-arbiter");
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!vc_load(&arbiter->stopping)) {
        pthread_mutex_lock(&arbiter->mutex);
        uint64_t now = vc_now_ns();
        uint64_t next = decide(arbiter, now);
        collect_bells(arbiter, &bells, now);
        pthread_mutex_unlock(&arbiter->mutex);
        sleep_until(arbiter, &bells, next);
        /* Bounds the cost of tenants that ring all the time. */
        uint64_t spent = vc_now_ns() - now;
        if (spent < SHORTEST_SLEEP_NS)
            vc_sleep_ns(SHORTEST_SLEEP_NS - spent);
    }
    return NULL;
}

static void ring(struct vc_arbiter *arbiter)
{
    vc_add(&arbiter->changed_futex, 1);
    syscall(SYS_futex, &arbiter->changed_futex, FUTEX_WAKE, 1, NULL, NULL, 0);
}

/* --- the interface --- */

struct vc_arbiter *vc_arbiter_start(char *error, size_t error_bytes)
{
    struct vc_arbiter *arbiter = calloc(1, sizeof *arbiter);
    if (!arbiter) {
        snprintf(error, error_bytes, "no memory for the arbiter");
        return NULL;
    }
    pthread_mutex_init(&arbiter->mutex, NULL);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are the program's, not this thread's */
    int failed = pthread_create(&arbiter->thread, NULL, run, arbiter);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (failed) {
        snprintf(error, error_bytes, "cannot start the arbiter's thread: %s", strerror(failed));
        free(arbiter);
        return NULL;
    }
    return arbiter;
}

static struct vc_member *find(struct vc_arbiter *arbiter, const char *name, unsigned *index)
{
    for (unsigned i = 0; i < arbiter->member_count; i++)
        if (strcmp(arbiter->members[i]->name, name) == 0) {
            *index = i;
            return arbiter->members[i];
        }
    return NULL;
}

static bool join(struct vc_arbiter *arbiter, struct vc_member *member)
{
    struct vc_member **grown = realloc(arbiter->members, (arbiter->member_count + 1) * sizeof *grown);
    if (!grown)
        return false;
    arbiter->members = grown;
    for (uint32_t index = 0; index < member->card_count; index++) {
        const struct vc_card_limit *limit = &member->limits->cards[index];
        if (limit->flags & VC_CARD_WHOLE)
            continue;
        struct card *card = card_of(arbiter, limit->uuid);
        if (!card || !take_seat(card, member, index)) {
            leave_seats(arbiter, member);
            return false;
        }
    }
    grown[arbiter->member_count++] = member;
    return true;
}

int vc_arbiter_add(struct vc_arbiter *arbiter, const char *name, const char *limits_path, const char *usage_path,
                   char *error, size_t error_bytes)
{
    struct vc_error reason = {""};
    unsigned index;
    struct vc_member *member = vc_member_open(name, limits_path, usage_path, &reason);
    if (member) {
        pthread_mutex_lock(&arbiter->mutex);
        bool added = false;
        if (find(arbiter, name, &index))
            vc_fail(&reason, "the arbiter has a region named %s already", name);
        else if (!(added = join(arbiter, member)))
            vc_fail(&reason, "no memory for region %s", name);
        pthread_mutex_unlock(&arbiter->mutex);
        if (added) {
            ring(arbiter);
            return 0;
        }
        vc_member_close(member);
    }
    snprintf(error, error_bytes, "%s", reason.text);
    return -1;
}

int vc_arbiter_remove(struct vc_arbiter *arbiter, const char *name)
{
    unsigned index = 0;
    pthread_mutex_lock(&arbiter->mutex);
    struct vc_member *member = find(arbiter, name, &index);
    if (member) {
        leave_seats(arbiter, member);
        arbiter->members[index] = arbiter->members[--arbiter->member_count];
        /* The thread may sleep on this member's bells: unmapped they only end its sleep early. */
        vc_member_close(member);
    }
    pthread_mutex_unlock(&arbiter->mutex);
    ring(arbiter);
    return member ? 0 : -1;
}

void vc_arbiter_report(struct vc_arbiter *arbiter, struct vc_arbiter_report *report)
{
    clockid_t clock;
    struct timespec spent = {0};
    if (pthread_getcpuclockid(arbiter->thread, &clock) == 0)
        clock_gettime(clock, &spent);
    pthread_mutex_lock(&arbiter->mutex);
    *report = (struct vc_arbiter_report){
        .decisions = arbiter->decisions,
        .leases = arbiter->leases,
        .thread_cpu_ns = (uint64_t)spent.tv_sec * 1000000000u + (uint64_t)spent.tv_nsec,
        .regions = arbiter->member_count,
    };
    pthread_mutex_unlock(&arbiter->mutex);
}

void vc_arbiter_stop(struct vc_arbiter *arbiter)
{
    vc_store(&arbiter->stopping, 1);
    ring(arbiter);
    pthread_join(arbiter->thread, NULL);
    for (unsigned i = 0; i < arbiter->member_count; i++)
        vc_member_close(arbiter->members[i]);
    for (unsigned i = 0; i < arbiter->card_count; i++) {
        free(arbiter->cards[i]->plan.tenants);
        free(arbiter->cards[i]->seats);
        free(arbiter->cards[i]);
    }
    free(arbiter->members);
    free(arbiter->cards);
    free(arbiter);
}
