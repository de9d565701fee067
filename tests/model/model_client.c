/* Runs the steps of a seed and prints what each call answered, a line per step: the same natively and in a share.
 *
 *   model_client STATE USAGE|- LIMIT0 LIMIT1 DRIVER SEED COUNT|- [WITHOUT]
 *
 * STATE is the simulated machine's mapping, USAGE the share's file, LIMIT its limits in bytes (0: the whole card), DRIVER the
 * simulated libcuda. COUNT steps are run, or those whose numbers are read from standard input; none of the kinds in WITHOUT
 * (names between commas; and of parts of kinds: look for wanted("…")). Some steps belong to a second and a third process, which some steps start and end. */
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "model.h"

enum { WORKERS = 2, LINE = 8192, END = -1 };

static void workers_step(struct dice *dice);
static void forked_step(struct dice *dice);
static const struct kind process_kinds[] = {{"workers", 3, false, workers_step, NULL}, {"forked", 1, false, forked_step, NULL}, {0}};
static const struct kind *const tables[] = {memory_kinds, pool_kinds,  map_kinds,     array_kinds,   code_kinds, sharing_kinds,
                                            work_kinds,   graph_kinds, context_kinds, process_kinds, NULL};

struct world world;
static char line[LINE];
static size_t used;
static const char *without = "";
static char **arguments;
static bool is_worker, broken;
static struct worker {
    pid_t pid;
    int in, out;
} workers[WORKERS];
static int audit_in, audit_out;

void say(const char *format, ...)
{
    va_list list;
    va_start(list, format);
    const int length = vsnprintf(line + used, LINE - used, format, list);
    va_end(list);
    used += length > 0 ? (size_t)length : 0;
    used = used < LINE ? used : LINE - 1;
}

/* splitmix64 */
static uint64_t next(struct dice *dice)
{
    uint64_t z = dice->state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

unsigned roll(struct dice *dice, unsigned sides)
{
    return (unsigned)(next(dice) % sides);
}

size_t roll_bytes(struct dice *dice)
{
    const unsigned chance = roll(dice, 100);
    if (chance < 2)
        return 0;
    if (chance < 4 && wanted("huge"))
        return (size_t[]){(size_t)1 << 63, SIZE_MAX, (size_t)1 << 47, (size_t)1 << 40}[roll(dice, 4)];
    if (chance < 44)
        return 1 + roll(dice, 8192);
    if (chance < 69)
        return 1 + roll(dice, 1 << 20);
    return 1 + roll(dice, chance < 97 ? 16 << 20 : 128 << 20);
}

CUstream some_stream(struct dice *dice, int *index)
{
    const unsigned which = roll(dice, STREAMS + 4), other = roll(dice, 3);
    if (index)
        *index = which < STREAMS && world.streams[which].held ? (int)which : NONE;
    if (which < STREAMS && world.streams[which].held)
        return world.streams[which].handle;
    return (CUstream)(uintptr_t)other;
}

/* ---- one step ---- */

bool wanted(const char *name)
{
    const size_t length = strlen(name);
    for (const char *at = without; (at = strstr(at, name)); at += length)
        if ((at == without || at[-1] == ',') && (at[length] == ',' || !at[length]))
            return false;
    return true;
}

static const struct kind *kind_of(struct dice *dice)
{
    unsigned sum = 0;
    for (int pass = 0; pass < 2; pass++) {
        unsigned left = pass ? roll(dice, sum) : 0;
        for (int t = 0; tables[t]; t++)
            for (const struct kind *kind = tables[t]; kind->name; kind++) {
                if (!pass)
                    sum += kind->weight;
                else if (left < kind->weight)
                    return kind;
                else
                    left -= kind->weight;
            }
    }
    return NULL;
}

static const struct kind *named(const char *name)
{
    for (int t = 0; tables[t]; t++)
        for (const struct kind *kind = tables[t]; kind->name; kind++)
            if (!strcmp(kind->name, name))
                return kind;
    abort();
}

static void run(struct dice *dice)
{
    const struct kind *kind = kind_of(dice);
    bool capturing = false;
    for (int i = 0; i < STREAMS; i++)
        capturing |= world.streams[i].capturing;
    if (capturing && !roll(dice, 6))
        kind = named("capture_ended");
    const bool without_context = !roll(dice, 16);
    say(" %s:", kind->name);
    if (!wanted(kind->name) || (is_worker && kind->run == workers_step))
        return;
    if (!kind->needs_context || without_context || has_context())
        kind->run(dice);
}

static void begin(void)
{
    int count = 0;
    const int first = cuInit(0), second = cuDeviceGetCount(&count);
    world.devices = count < DEVICES || !wanted("second_card") ? 1 : DEVICES;
    world.current = NONE;
    say(" cuInit = %d, cuDeviceGetCount = %d %d", first, second, count);
    if (first || second || !count)
        exit(2);
}

static void finish(void)
{
    struct dice dice = {0};
    say(" end:");
    for (int i = 0; i < STREAMS; i++)
        named("capture_ended")->run(&dice);
    has_context();
    say(" %d", cuCtxSynchronize());
    static const char *const order[] = {"graph", "plain", "given", "pool", "handle", "array", "module", "capture_ended"};
    for (size_t i = 0; i < sizeof order / sizeof *order; i++) {
        say(" %s:", order[i]);
        named(order[i])->end();
        say(" %d", cuCtxSynchronize());
        broken |= books_check();
    }
    named("context")->end();
    named("graph")->end(); /* trims, now that all streams have come to their end */
    named("pool")->end();
}

static void send_line(int file)
{
    line[used++] = '\n';
    for (size_t sent = 0; sent < used;) {
        const ssize_t count = write(file, line + sent, used - sent);
        if (count <= 0)
            exit(2);
        sent += (size_t)count;
    }
    used = 0;
}

static struct dice dice_of(uint64_t seed, int step)
{
    struct dice dice = {seed * 0x2545f4914f6cdd1du + (uint64_t)(unsigned)step};
    dice.state = next(&dice);
    return dice;
}

static void own_step(struct dice *dice)
{
    run(dice);
    broken |= books_check();
}

/* ---- other processes ---- */

/* Let the machine notice the dead: it looks only when somebody asks. */
static void audit(void)
{
    char word = 0;
    if (write(audit_in, &word, 1) != 1 || read(audit_out, &word, 1) != 1)
        exit(2);
}

static void start_auditor(const char *driver)
{
    int in[2], out[2];
    if (pipe(in) || pipe(out))
        exit(2);
    if (!fork()) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        static char report[1 << 20];
        int (*tell)(const char *, char *, size_t) = NULL;
        void *library = dlopen(driver, RTLD_NOW | RTLD_LOCAL);
        if (library)
            *(void **)&tell = dlsym(library, "simReport");
        close(in[1]);
        for (char word; tell && read(in[0], &word, 1) == 1;) {
            tell(getenv("VCUDA_SIM_DIR"), report, sizeof report);
            if (write(out[1], &word, 1) != 1)
                break;
        }
        _exit(0);
    }
    close(in[0]);
    close(out[1]);
    audit_in = in[1];
    audit_out = out[0];
}

/* The answer of a worker to a step: its line, into ours. */
static bool ask(struct worker *worker, int step)
{
    char word;
    if (write(worker->in, &step, sizeof step) != sizeof step)
        return false;
    while (read(worker->out, &word, 1) == 1) {
        if (word == '\n')
            return true;
        say("%c", word);
    }
    return false;
}

static void start_worker(struct worker *worker)
{
    int in[2], out[2];
    if (pipe(in) || pipe(out))
        exit(2);
    worker->pid = fork();
    if (!worker->pid) {
        dup2(in[0], STEPS_IN);
        dup2(out[1], LINES_OUT);
        for (int file = 3; file < 1024; file++)
            if (file < PARCELS_IN || file > LINES_OUT)
                close(file);
        setenv("MODEL_WORKER", "1", 1);
        execv("/proc/self/exe", arguments);
        _exit(127);
    }
    close(in[0]);
    close(out[1]);
    worker->in = in[1];
    worker->out = out[0];
    ask(worker, 0);
}

static void end_worker(struct worker *worker, int how)
{
    static const char *const names[] = {"tidily", "leaving all", "by SIGKILL"};
    int status = 0;
    say(" ends %s:", names[how]);
    if (how == 0)
        ask(worker, END);
    if (how == 2)
        kill(worker->pid, SIGKILL);
    close(worker->in);
    waitpid(worker->pid, &status, 0);
    close(worker->out);
    say(" %d", how == 2 ? 0 : status);
    worker->pid = 0;
    audit();
}

static void workers_step(struct dice *dice)
{
    struct worker *worker = &workers[roll(dice, WORKERS)];
    if (!worker->pid)
        start_worker(worker);
    else if (!roll(dice, 3))
        end_worker(worker, (int)roll(dice, 3));
}

/* A forked child that does not begin another program may use nothing of CUDA. */
static void forked_step(struct dice *dice)
{
    int status = 0;
    (void)dice;
    const pid_t child = fork();
    if (!child) {
        CUdeviceptr at;
        int count = 0, result = cuDeviceGetCount(&count);
        result += cuMemAlloc_v2(&at, 4096);
        _exit(result);
    }
    waitpid(child, &status, 0);
    say(" answers %d, signal %d", WEXITSTATUS(status), WTERMSIG(status));
}

static int be_worker(uint64_t seed)
{
    is_worker = true;
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (int step; read(STEPS_IN, &step, sizeof step) == sizeof step;) {
        if (step == 0) {
            begin();
        } else if (step == END) {
            finish();
        } else {
            struct dice dice = dice_of(seed, step);
            roll(&dice, 8);
            own_step(&dice);
        }
        send_line(LINES_OUT);
        if (step == END)
            break;
    }
    exit(broken ? 3 : 0);
}

/* ---- the run ---- */

static void do_step(uint64_t seed, int step)
{
    struct dice dice = dice_of(seed, step);
    const unsigned whose = roll(&dice, 8);
    struct worker *worker = whose < 5 ? NULL : &workers[whose == 7];
    const bool given = worker && worker->pid;
    say("%d %s", step, given ? whose == 7 ? "third" : "second" : "first");
    if (!given) {
        own_step(&dice);
    } else if (!ask(worker, step)) {
        broken = true;
        say(" !worker-died");
        end_worker(worker, 1);
    }
    send_line(STDOUT_FILENO);
}

int main(int count, char **values)
{
    if (count < 8)
        return 2;
    arguments = values;
    const uint64_t limits[DEVICES] = {strtoull(values[3], NULL, 10), strtoull(values[4], NULL, 10)};
    const uint64_t seed = strtoull(values[6], NULL, 10);
    without = count > 8 ? values[8] : "";
    books_open(values[1], strcmp(values[2], "-") ? values[2] : NULL, limits);
    if (getenv("MODEL_WORKER"))
        return be_worker(seed);
    signal(SIGPIPE, SIG_IGN);
    start_auditor(values[5]);
    int parcels[2];
    if (socketpair(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0, parcels) || dup2(parcels[0], PARCELS_IN) < 0 ||
        dup2(parcels[1], PARCELS_OUT) < 0)
        return 2;
    close(parcels[0]);
    close(parcels[1]);
    begin();
    send_line(STDOUT_FILENO);
    if (!strcmp(values[7], "-"))
        for (int step; scanf("%d", &step) == 1;)
            do_step(seed, step);
    else
        for (int step = 1, last = atoi(values[7]); step <= last; step++)
            do_step(seed, step);
    for (int i = 0; i < WORKERS; i++)
        if (workers[i].pid)
            end_worker(&workers[i], 0);
    finish();
    for (int card = 0; card < world.devices; card++) {
        say(" books %llu", (unsigned long long)books_of(card));
        if (ledger_of(card) > books_of(card)) /* a descriptor that is on its way keeps memory */
            say(" !ledger-left card %d ledger %llu KiB", card, (unsigned long long)ledger_of(card) >> 10);
    }
    broken |= books_check();
    send_line(STDOUT_FILENO);
    return broken ? 3 : 0;
}
