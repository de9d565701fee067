/* All threads of the throttle at once on the real clock: launching threads with lanes of their own, a helper that settles
 * per process, two processes' gates per container, two containers, the arbiter, and someone who changes, removes and asks.
 * Everything is launched, counted once and seen to end; under the thread sanitizer: no data race. The card only adds up. */
#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>

#include "check.h"
#include "gate/gate.h"
#include "gate/lane.h"
#include "base/atomic.h"
#include "region/abandoned.h"
#include "arbiter/native.h"

enum {
    CONTAINERS = 2,
    PROCESSES = 2,
    THREADS = 6, /* more than sleep at the gate */
    OPERATIONS = 200,
    REFUSED_EVERY = 16,
    QUEUE = THREADS * OPERATIONS + 1,
};

static const uint64_t COSTS_NS[] = {100000, 300000};

struct ending {
    uint64_t from_ns, to_ns;
    struct vc_gate_others others;
    struct vc_lane_step step;
};

struct process {
    struct vc_gate gate;
    struct vc_estimate estimates[2];
    pthread_mutex_t mutex; /* guards what follows */
    struct ending endings[QUEUE];
    unsigned submitted, settled;
    bool over;
};

struct container {
    char *folder, limits_path[300], usage_path[300];
    struct vc_limits *limits;
    struct vc_usage *usage;
    struct process processes[PROCESSES];
};

static struct container containers[CONTAINERS];
static pthread_mutex_t card_mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t card_free_ns; /* when the card has done all that was launched */
static uint32_t running;

static uint64_t on_card(uint64_t cost_ns, uint64_t *from_ns)
{
    pthread_mutex_lock(&card_mutex);
    uint64_t now = vc_now_ns();
    *from_ns = card_free_ns > now ? card_free_ns : now;
    uint64_t to_ns = card_free_ns = *from_ns + cost_ns;
    pthread_mutex_unlock(&card_mutex);
    return to_ns;
}

static void submit(struct process *process, uint64_t from_ns, uint64_t to_ns, const struct vc_lane_step *step)
{
    struct vc_gate_others others = vc_gate_others(&process->gate);
    pthread_mutex_lock(&process->mutex);
    process->endings[process->submitted++] = (struct ending){from_ns, to_ns, others, *step};
    pthread_mutex_unlock(&process->mutex);
}

/* One operation through the gate, as vcuda/src/cuda/work/work.c does it; false: the driver refused it. */
static bool launch(struct process *process, struct vc_lane *lane, uint64_t *opened_ns, unsigned kind, bool refused)
{
    struct vc_estimate *estimate = &process->estimates[kind];
    uint64_t from_ns;
    if (!refused && vc_lane_pass(lane, estimate)) {
        on_card(COSTS_NS[kind], &from_ns);
        return true;
    }
    struct vc_gate_answer answer;
    struct vc_lane_step step;
    for (bool waited = false;; waited = true) {
        struct vc_gate_words words = vc_gate_words(lane->gate);
        vc_lane_ask(lane, estimate, vc_now_ns(), vc_ticks(), &answer, &step);
        if (answer.reason == VC_GATE_GO && waited)
            vc_gate_passed(lane->gate);
        if (answer.reason == VC_GATE_GO)
            break;
        vc_gate_wait(lane->gate, words, &answer);
    }
    if (step.mark_before)
        vc_lane_opened(lane, true);
    if (refused) {
        *opened_ns = step.mark_before ? vc_now_ns() : *opened_ns;
        vc_lane_refused(lane, &step);
        return false;
    }
    vc_lane_launched(lane, estimate, &answer, &step);
    uint64_t to_ns = on_card(COSTS_NS[kind], &from_ns);
    if (step.mark_before)
        *opened_ns = from_ns;
    if (step.mark_after) {
        submit(process, *opened_ns, to_ns, &step);
        *opened_ns = to_ns;
    }
    return true;
}

static void *application(void *argument)
{
    struct process *process = argument;
    struct vc_lane lane;
    uint64_t opened_ns = 0;
    vc_lane_init(&lane, &process->gate);
    for (unsigned done = 0, tried = 0; done < OPERATIONS; tried++) {
        done += launch(process, &lane, &opened_ns, tried % 3 == 0, tried % REFUSED_EVERY == REFUSED_EVERY - 1);
        if (tried % 50 == 49)
            vc_estimate_reset(&process->estimates[0]);
    }
    vc_lane_end(&lane, vc_now_ns());
    vc_sub(&running, 1);
    return NULL;
}

static void settle(struct process *process, const struct ending *ending)
{
    uint64_t now = vc_now_ns();
    struct vc_gate_others others = vc_gate_others(&process->gate);
    struct vc_interval interval = ending->step.interval;
    if (!interval.loose) /* else no mark tells its begin: the lane told when it was launched */
        interval.from_ns = ending->from_ns;
    interval.to_ns = ending->to_ns;
    interval.measurable &= interval.to_ns > interval.from_ns;
    interval.others_gpu_ns = vc_gate_others_ns(&process->gate, now, &ending->others, &others);
    struct vc_settlement settlement = vc_gate_seen(&process->gate, now, &interval);
    vc_gate_learnt(&process->gate, settlement.charged_ns, vc_lane_learn(ending->step.learners, ending->step.distinct, &interval, &settlement));
    vc_gate_notify(&process->gate);
}

/* Much sooner than helpers do it: as if the sibling stood still. What is charged for it so is settled by itself. */
static void look_after_siblings(struct process *process)
{
    const struct vc_turns *turns = &process->gate.turns;
    struct container *container = process >= containers[1].processes ? &containers[1] : &containers[0];
    uint32_t other = 1 - turns->own;
    uint64_t now = vc_now_ns();
    if (vc_load(&container->usage->slots[other].cards[0].predicted_finish_ns) + 300000 < now)
        vc_gate_owe(&process->gate, vc_abandoned_take(container->limits, container->usage, 0, other, now, false), 0);
}

static void *helper(void *argument)
{
    struct process *process = argument;
    for (;;) {
        pthread_mutex_lock(&process->mutex);
        bool waiting = process->settled < process->submitted, over = process->over;
        struct ending ending = process->endings[process->settled];
        pthread_mutex_unlock(&process->mutex);
        if (waiting && vc_now_ns() >= ending.to_ns) {
            settle(process, &ending);
            process->settled++; /* of this thread alone */
            continue;
        }
        if (!waiting && over)
            return NULL;
        if (waiting)
            vc_gate_overdue(&process->gate, vc_now_ns(), ending.to_ns, true);
        bool opened;
        vc_gate_rest(&process->gate, vc_now_ns(), &opened);
        look_after_siblings(process);
        vc_sleep_ns(50000);
    }
}

static void *map(const char *path, size_t bytes, int protection)
{
    int file = open(path, protection & PROT_WRITE ? O_RDWR : O_RDONLY);
    void *mapping = mmap(NULL, bytes, protection, MAP_SHARED, file, 0);
    if (mapping == MAP_FAILED) {
        perror(path);
        exit(2);
    }
    close(file);
    return mapping;
}

static const struct vc_card_limit CARD = {.uuid = "GPU-0", .memory_bytes = 1000, .cores = 40, .core_limit = 100,
                                          .priority = VC_PRIORITY_NORMAL, .flags = VC_CARD_SHARED};

static void make(struct container *container)
{
    const char *base = getenv("TMPDIR");
    char folder[256];
    snprintf(folder, sizeof folder, "%s/vcuda-native-XXXXXX", base && *base ? base : "/tmp");
    struct vc_error error;
    if (!mkdtemp(folder)) {
        perror(folder);
        exit(2);
    }
    container->folder = strdup(folder);
    snprintf(container->limits_path, sizeof container->limits_path, "%s/limits", container->folder);
    snprintf(container->usage_path, sizeof container->usage_path, "%s/usage", container->folder);
    if (vc_files_create(container->limits_path, container->usage_path, &CARD, 1, &error) != 0) {
        fprintf(stderr, "%s\n", error.text);
        exit(2);
    }
    container->limits = map(container->limits_path, VC_LIMITS_FILE_BYTES, PROT_READ);
    container->usage = map(container->usage_path, VC_USAGE_FILE_BYTES, PROT_READ | PROT_WRITE);
    container->usage->slot_high_water = PROCESSES;
    for (uint32_t slot = 0; slot < PROCESSES; slot++) {
        struct process *process = &container->processes[slot];
        struct vc_card_usage *usage = &container->usage->cards[0];
        vc_gate_init(&process->gate, container->limits, &container->limits->cards[0], usage,
                     &container->usage->slots[slot].cards[0]);
        process->gate.paid = &container->usage->paid[0];
        process->gate.turns =
            (struct vc_turns){usage, container->usage->slots, &container->usage->slot_high_water, 0, slot, 0};
        process->gate.watched = true;
        pthread_mutex_init(&process->mutex, NULL);
    }
}

static struct vc_arbiter *start_arbiter(void)
{
    char error[512] = "";
    struct vc_arbiter *arbiter = vc_arbiter_start(error, sizeof error);
    CHECK(arbiter != NULL);
    for (int i = 0; i < CONTAINERS; i++)
        CHECK(vc_arbiter_add(arbiter, containers[i].folder, containers[i].limits_path, containers[i].usage_path, error,
                             sizeof error) == 0);
    return arbiter;
}

static void stop_arbiter(struct vc_arbiter *arbiter, uint64_t *decisions, uint64_t *leases)
{
    struct vc_arbiter_report report;
    vc_arbiter_report(arbiter, &report);
    *decisions += report.decisions;
    *leases += report.leases;
    vc_arbiter_stop(arbiter);
}

/* What the manager does meanwhile: changes limits, takes a container out and back, restarts, asks. */
static void manage(void)
{
    struct vc_arbiter *arbiter = start_arbiter();
    uint64_t decisions = 0, leases = 0;
    char text[512];
    for (unsigned round = 1; vc_load(&running) != 0; round++) {
        struct container *container = &containers[round % CONTAINERS];
        struct vc_card_limit card = CARD;
        struct vc_error error;
        card.core_limit = 60 + round % 5 * 10;
        CHECK(vc_limits_update(container->limits_path, &card, 1, &error) == 0);
        if (round % 16 == 8) {
            CHECK(vc_arbiter_remove(arbiter, container->folder) == 0);
            CHECK(vc_arbiter_add(arbiter, container->folder, container->limits_path, container->usage_path, text,
                                 sizeof text) == 0);
        }
        vc_sleep_ns(5000000);
        if (round % 32 == 0) {
            stop_arbiter(arbiter, &decisions, &leases);
            arbiter = start_arbiter();
        }
    }
    stop_arbiter(arbiter, &decisions, &leases);
    CHECK(decisions > 0 && leases > 0);
}

int main(void)
{
    pthread_t applications[CONTAINERS][PROCESSES][THREADS], helpers[CONTAINERS][PROCESSES];
    running = CONTAINERS * PROCESSES * THREADS;
    for (int i = 0; i < CONTAINERS; i++)
        make(&containers[i]);
    for (int i = 0; i < CONTAINERS; i++)
        for (int p = 0; p < PROCESSES; p++) {
            struct process *process = &containers[i].processes[p];
            pthread_create(&helpers[i][p], NULL, helper, process);
            for (int t = 0; t < THREADS; t++)
                pthread_create(&applications[i][p][t], NULL, application, process);
        }
    manage();
    for (int i = 0; i < CONTAINERS; i++) {
        struct container *container = &containers[i];
        for (int p = 0; p < PROCESSES; p++) {
            struct process *process = &container->processes[p];
            for (int t = 0; t < THREADS; t++)
                pthread_join(applications[i][p][t], NULL);
            pthread_mutex_lock(&process->mutex);
            process->over = true;
            pthread_mutex_unlock(&process->mutex);
            pthread_join(helpers[i][p], NULL);
            CHECK(process->gate.unseen == 0 && process->gate.waiting_threads == 0);
            CHECK(process->gate.slot->launches == THREADS * OPERATIONS);
        }
        CHECK(container->usage->cards[0].launches == PROCESSES * THREADS * OPERATIONS);
        uint64_t charged = 0; /* on a busy machine a process may stand still for so long that its sibling pays */
        for (int p = 0; p < PROCESSES; p++)
            charged += container->processes[p].gate.slot->gpu_ns + container->processes[p].gate.slot->owed_ns;
        CHECK(container->usage->cards[0].gpu_ns == charged);
        remove_region(container->folder);
        free(container->folder);
    }
    return broken != 0;
}
