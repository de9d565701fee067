/* The arbiter's thread: it listens to the bells of tenants at work, reads their usage, decides card by card and writes the grants. */
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "arbiter/watch.h"
#include "base/atomic.h"
#include "base/clock.h"
#include "arbiter/native.h"

/* A card and its tenants; seats[i] says whose limits tenants[i] is. */
struct card {
    char uuid[VC_UUID_BYTES];
    struct vc_card_plan plan;
    struct seat {
        struct vc_member *member;
        uint32_t index;
        uint32_t news; /* of the member, as the card was last decided */
    } *seats;
    unsigned capacity;
    uint64_t next_ns; /* decide by then, even if no tenant says anything new */
};

struct vc_arbiter {
    pthread_t thread;
    struct vc_crew crew; /* its mutex also guards what follows, but for the bells: they are the thread's */
    struct card **cards;
    unsigned card_count;
    uint64_t decisions, leases;
    struct vc_watch watches[VC_WATCHES];
    struct vc_bells bells;
};

static const uint64_t SHORTEST_SLEEP_NS = 20000;
/* A heartbeat at least so often; a tenant misses it after VC_HEARTBEAT_LIMIT_NS. */
static const uint64_t LONGEST_SLEEP_NS = 30000000;
/* Tenants that did something so lately are listened to here, without a watch in between. */
static const uint64_t LATELY_NS = 10000000000;

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
    if (getrandom(&card->plan.random, sizeof card->plan.random, GRND_NONBLOCK) != (ssize_t)sizeof card->plan.random)
        card->plan.random = vc_now_ns();
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
    card->seats[plan->count] = (struct seat){member, index, 0};
    plan->count++;
    card->next_ns = 0;
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
            card->next_ns = 0;
        }
    }
}

/* --- one round --- */

static void decide_card(struct vc_arbiter *arbiter, struct card *card, uint64_t now_ns)
{
    struct vc_card_plan *plan = &card->plan;
    uint64_t sequence = plan->sequence;
    for (unsigned i = 0; i < plan->count; i++) {
        const struct vc_card_limit *limit = &card->seats[i].member->limits->cards[card->seats[i].index];
        vc_tenant_resize(&plan->tenants[i], vc_load_relaxed(&limit->cores), vc_load_relaxed(&limit->core_limit));
        vc_tenant_prioritise(&plan->tenants[i], vc_load_relaxed(&limit->priority));
        vc_member_observation(card->seats[i].member, card->seats[i].index, &plan->tenants[i].seen);
        card->seats[i].news = card->seats[i].member->news;
    }
    card->next_ns = vc_plan_decide(plan, now_ns);
    for (unsigned i = 0; i < plan->count; i++)
        if (plan->tenants[i].active || plan->tenants[i].seen.open || (int)i == plan->holder)
            card->seats[i].member->active_ns = now_ns;
    /* Take the card from its last holder before the next one gets it. */
    for (int holders = 0; holders < 2; holders++)
        for (unsigned i = 0; i < plan->count; i++)
            if (((int)i == plan->holder) == (holders == 1))
                vc_member_write(card->seats[i].member, card->seats[i].index, &plan->tenants[i]);
    arbiter->decisions++;
    arbiter->leases += plan->sequence - sequence;
}

static bool has_news(const struct card *card)
{
    for (unsigned i = 0; i < card->plan.count; i++)
        if (card->seats[i].news != card->seats[i].member->news)
            return true;
    return false;
}

/* Whether to decide it now. Its holder may have started without a ring, so nothing is decided without a look at it. */
static bool is_due(const struct card *card, uint64_t now_ns)
{
    bool due = now_ns >= card->next_ns || has_news(card);
    if (card->plan.holder < 0)
        return due;
    const struct seat *seat = &card->seats[card->plan.holder];
    if (seat->member->read_ns != now_ns && (due || now_ns - seat->member->read_ns >= LONGEST_SLEEP_NS))
        vc_member_read(seat->member, now_ns);
    return due || seat->news != seat->member->news;
}

/* Returns when to decide again at the latest. */
static uint64_t decide(struct vc_arbiter *arbiter, uint64_t now_ns)
{
    const struct vc_crew *crew = &arbiter->crew;
    uint64_t next = now_ns + LONGEST_SLEEP_NS;
    for (unsigned i = 0; i < crew->member_count; i++)
        if (vc_member_due(crew->members[i], now_ns))
            vc_member_read(crew->members[i], now_ns);
    for (unsigned i = 0; i < arbiter->card_count; i++) {
        struct card *card = arbiter->cards[i];
        if (card->plan.count == 0)
            continue;
        if (is_due(card, now_ns))
            decide_card(arbiter, card, now_ns);
        next = card->next_ns < next ? card->next_ns : next;
    }
    for (unsigned i = 0; i < crew->member_count; i++)
        vc_member_beat(crew->members[i], now_ns);
    return next;
}

/* Our own bell and those of the tenants at work, as many as fit; watches listen to the others. Returns when somebody must be
 * looked at, because it can't be heard. */
static uint64_t collect_bells(struct vc_arbiter *arbiter, uint64_t now_ns)
{
    struct vc_crew *crew = &arbiter->crew;
    uint64_t until = UINT64_MAX;
    vc_bells_start(&arbiter->bells, &crew->changed_futex);
    for (unsigned i = 0; i < crew->member_count; i++) {
        struct vc_member *member = crew->members[i];
        member->listened = !vc_load(&crew->deaf) && now_ns - member->active_ns < LATELY_NS && vc_member_heard(member) &&
                           vc_bells_add(&arbiter->bells, member);
    }
    vc_watch_assign(crew, arbiter->watches);
    for (unsigned i = 0; i < crew->member_count; i++) {
        const struct vc_member *member = crew->members[i];
        uint64_t look = member->read_ns + vc_member_age_limit(member, now_ns);
        if (!member->listened && !member->watched && look < until)
            until = look;
    }
    return until;
}

/* Note who rang; a ring that doesn't tell means everyone who was listened to. */
static void note_ring(struct vc_crew *crew, enum vc_ring ring, const struct vc_member *owner)
{
    if (ring == VC_RING_NONE)
        return;
    pthread_mutex_lock(&crew->mutex);
    for (unsigned i = 0; i < crew->member_count; i++) {
        struct vc_member *member = crew->members[i];
        if (ring == VC_RING_OWNER ? member == owner : member->listened) /* it may have been removed meanwhile */
            member->rang = true;
    }
    pthread_mutex_unlock(&crew->mutex);
}

static void sleep_until(struct vc_arbiter *arbiter, uint64_t until_ns)
{
    struct vc_crew *crew = &arbiter->crew;
    uint64_t now = vc_now_ns();
    if (until_ns <= now)
        return;
    if (vc_load(&crew->deaf)) {
        uint64_t sleep = until_ns - now;
        struct timespec timeout = {.tv_sec = (time_t)(sleep / 1000000000u), .tv_nsec = (long)(sleep % 1000000000u)};
        syscall(SYS_futex, &crew->changed_futex, FUTEX_WAIT, (uint32_t)arbiter->bells.waiters[0].value, &timeout, NULL, 0);
        return;
    }
    const struct vc_member *owner;
    enum vc_ring ring = vc_bells_wait(&arbiter->bells, until_ns, &owner);
    if (ring == VC_RING_DEAF)
        vc_store(&crew->deaf, 1);
    if (ring == VC_RING_BROKEN) /* a tenant has cut its file short: all are read, this one then left out */
        vc_sleep_ns(SHORTEST_SLEEP_NS);
    note_ring(crew, ring, owner);
}

static void *run(void *argument)
{
    struct vc_arbiter *arbiter = argument;
    prctl(PR_SET_NAME, "vcuda-arbiter");
    prctl(PR_SET_TIMERSLACK, 1000);
    while (!vc_load(&arbiter->crew.stopping)) {
        pthread_mutex_lock(&arbiter->crew.mutex);
        uint64_t now = vc_now_ns();
        uint64_t next = decide(arbiter, now), look = collect_bells(arbiter, now);
        pthread_mutex_unlock(&arbiter->crew.mutex);
        sleep_until(arbiter, look < next ? look : next);
        /* Bounds the cost of tenants that ring all the time. */
        uint64_t spent = vc_now_ns() - now;
        if (spent < SHORTEST_SLEEP_NS)
            vc_sleep_ns(SHORTEST_SLEEP_NS - spent);
    }
    return NULL;
}

/* --- the interface --- */

struct vc_arbiter *vc_arbiter_start(char *error, size_t error_bytes)
{
    struct vc_arbiter *arbiter = calloc(1, sizeof *arbiter);
    if (!arbiter) {
        snprintf(error, error_bytes, "no memory for the arbiter");
        return NULL;
    }
    pthread_mutex_init(&arbiter->crew.mutex, NULL);
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
    for (unsigned i = 0; i < arbiter->crew.member_count; i++)
        if (strcmp(arbiter->crew.members[i]->name, name) == 0) {
            *index = i;
            return arbiter->crew.members[i];
        }
    return NULL;
}

static bool join(struct vc_arbiter *arbiter, struct vc_member *member)
{
    struct vc_member **grown = realloc(arbiter->crew.members, (arbiter->crew.member_count + 1) * sizeof *grown);
    if (!grown)
        return false;
    arbiter->crew.members = grown;
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
    grown[arbiter->crew.member_count++] = member;
    return true;
}

int vc_arbiter_add(struct vc_arbiter *arbiter, const char *name, const char *limits_path, const char *usage_path,
                   char *error, size_t error_bytes)
{
    struct vc_error reason = {""};
    unsigned index;
    struct vc_member *member = vc_member_open(name, limits_path, usage_path, &reason);
    if (member) {
        pthread_mutex_lock(&arbiter->crew.mutex);
        bool added = false;
        if (find(arbiter, name, &index))
            vc_fail(&reason, "the arbiter has a region named %s already", name);
        else if (!(added = join(arbiter, member)))
            vc_fail(&reason, "no memory for region %s", name);
        pthread_mutex_unlock(&arbiter->crew.mutex);
        if (added) {
            vc_crew_ring(&arbiter->crew.changed_futex);
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
    pthread_mutex_lock(&arbiter->crew.mutex);
    struct vc_member *member = find(arbiter, name, &index);
    if (member) {
        leave_seats(arbiter, member);
        vc_watch_release(member);
        arbiter->crew.members[index] = arbiter->crew.members[--arbiter->crew.member_count];
        /* A thread may sleep on this member's bells: unmapped they only end its sleep early. */
        vc_member_close(member);
    }
    pthread_mutex_unlock(&arbiter->crew.mutex);
    vc_crew_ring(&arbiter->crew.changed_futex);
    return member ? 0 : -1;
}

void vc_arbiter_report(struct vc_arbiter *arbiter, struct vc_arbiter_report *report)
{
    clockid_t clock;
    struct timespec spent = {0};
    if (pthread_getcpuclockid(arbiter->thread, &clock) == 0)
        clock_gettime(clock, &spent);
    pthread_mutex_lock(&arbiter->crew.mutex);
    *report = (struct vc_arbiter_report){
        .decisions = arbiter->decisions,
        .leases = arbiter->leases,
        .thread_cpu_ns = (uint64_t)spent.tv_sec * 1000000000u + (uint64_t)spent.tv_nsec + vc_watch_cpu_ns(arbiter->watches),
        .regions = arbiter->crew.member_count,
    };
    pthread_mutex_unlock(&arbiter->crew.mutex);
}

void vc_arbiter_stop(struct vc_arbiter *arbiter)
{
    vc_store(&arbiter->crew.stopping, 1);
    vc_crew_ring(&arbiter->crew.changed_futex);
    pthread_join(arbiter->thread, NULL);
    vc_watch_stop(arbiter->watches);
    for (unsigned i = 0; i < arbiter->crew.member_count; i++)
        vc_member_close(arbiter->crew.members[i]);
    for (unsigned i = 0; i < arbiter->card_count; i++) {
        free(arbiter->cards[i]->plan.tenants);
        free(arbiter->cards[i]->seats);
        free(arbiter->cards[i]);
    }
    free(arbiter->crew.members);
    free(arbiter->cards);
    free(arbiter);
}
