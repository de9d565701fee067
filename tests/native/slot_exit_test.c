/* A process that is ending keeps its slot until the kernel has closed the last of its files, the card's among them; however
 * many threads it has and whichever of them ends last. */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include "check.h"
#include "base/clock.h"
#include "region/slot.h"

#define FILES 30000 /* so many to close that the end takes a while */
#define FEWEST 2000
#define ROUNDS 40 /* at most, until the end was watched */
#define WATCHED 2

static char *folder;

enum ending { KILLED, KILLED_WITH_THREADS, KILLED_WITHOUT_ITS_MAIN_THREAD, EXITED_BY_A_THREAD, ENDINGS };
static const char *const names[] = {"killed", "killed with threads", "killed when its main thread had ended", "exit in a thread"};

static void *wait_for_ever(void *unused)
{
    for (;;)
        pause();
    return unused;
}

static void *leave(void *gate)
{
    char byte;
    ssize_t got = read(*(int *)gate, &byte, 1);
    (void)got;
    _exit(0);
}

static void *end_thread(void *unused)
{
    (void)unused;
    pthread_exit(NULL);
}

/* Like a process with a card: `card` is among its first descriptors and stays open as long as the kernel lets it. */
static void victim(enum ending ending, int ready, int gate)
{
    struct vc_region *region = region_at(folder);
    CHECK(vc_quota_reserve(region, 0, 300));
    vc_quota_commit(region, 0, 300, VC_QUOTA_PLAIN);
    while (eventfd(0, EFD_CLOEXEC) >= 0)
        ;
    pthread_t thread;
    for (int count = 0; ending != KILLED && count < 4; count++)
        pthread_create(&thread, NULL, wait_for_ever, NULL);
    if (ending == EXITED_BY_A_THREAD)
        pthread_create(&thread, NULL, leave, &gate);
    ssize_t written = write(ready, broken ? "-" : "+", 1);
    (void)written;
    if (ending == KILLED_WITHOUT_ITS_MAIN_THREAD)
        pthread_exit(NULL);
    wait_for_ever(NULL);
}

/* Returns how often the slot's lock was seen free while the card was still held. */
static unsigned watch(enum ending ending)
{
    int card[2], ready[2], gate[2];
    CHECK(pipe(card) == 0 && pipe(ready) == 0 && pipe(gate) == 0);
    pid_t child = fork();
    if (child == 0) {
        close(card[0]);
        victim(ending, ready[1], gate[0]);
    }
    close(card[1]);
    char byte = 0;
    CHECK(read(ready[0], &byte, 1) == 1 && byte == '+');

    struct vc_region *region = region_at(folder);
    struct vc_identity self;
    vc_identify_self(&self);
    const struct vc_slot *slot = &region->usage->slots[1];
    CHECK(slot->pid == child);
    if (ending == EXITED_BY_A_THREAD)
        CHECK(write(gate[1], "x", 1) == 1);
    else
        kill(child, SIGKILL);
    unsigned seen = 0, lost = 0;
    bool held = true;
    while (held) {
        bool locked = vc_slot_locked(region->file.descriptor, 1);
        bool alive = vc_slot_alive(&self, slot, locked);
        struct pollfd end = {.fd = card[0], .events = POLLIN};
        held = poll(&end, 1, 0) == 0; /* all its ends closed: hung up */
        seen += held && !locked;
        lost += held && !alive;
    }
    CHECK(lost == 0);
    siginfo_t info;
    waitid(P_PID, (id_t)child, &info, WEXITED | WNOWAIT);
    CHECK(reaped(region, 1));
    CHECK(vc_quota_used(region, 0) == 0);
    waitpid(child, NULL, 0);
    for (int end = 0; end < 2; end++) {
        close(ready[end]);
        close(gate[end]);
    }
    close(card[0]);
    return seen;
}

int main(void)
{
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max < FILES ? files.rlim_max : FILES;
    setrlimit(RLIMIT_NOFILE, &files);
    folder = make_region(1000);
    /* The C library loads what it needs for pthread_exit at the first one, which takes a descriptor. */
    pthread_t thread;
    pthread_create(&thread, NULL, end_thread, NULL);
    pthread_join(thread, NULL);
    CHECK(vc_region_slot(region_at(folder)) != NULL);
    for (int ending = 0; ending < ENDINGS; ending++) {
        int watched = 0;
        for (int round = 0; round < ROUNDS && watched < WATCHED && !broken; round++)
            watched += watch((enum ending)ending) > 0;
        if (watched == 0 && files.rlim_cur >= FEWEST)
            fprintf(stderr, "%s: its lock was never seen free before its files were closed; nothing was shown\n", names[ending]);
        if (broken)
            fprintf(stderr, "broken when %s\n", names[ending]);
    }
    remove_region(folder);
    return broken != 0;
}
