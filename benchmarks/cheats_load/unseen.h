/* Programs in which nobody can look at what they launch: without memory, descriptors or threads, or with the library's own thread ended or held. */
#pragma once
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include "work.h"

/* Kernels that were never measured, each on another stream; refused launches are none. */
static void long_and_new(struct place *place, unsigned streams, const char *lasts)
{
    static int (*start)();
    static handle functions[FUNCTIONS];
    if (!functions[0]) {
        static char image[FUNCTIONS * 48 + 1024];
        handle module;
        int length = sprintf(image, ".version 7.0\n.target sm_70\n.address_size 64\n");
        for (unsigned i = 0; i < FUNCTIONS; i++)
            length += sprintf(image + length, ".entry long_%u_%s() {ret;}\n", i, lasts);
        CALL(cuModuleLoadData, &module, image);
        for (unsigned i = 0; i < FUNCTIONS; i++) {
            char name[64];
            snprintf(name, sizeof name, "long_%u_%s", i, lasts);
            CALL(cuModuleGetFunction, &functions[i], module, name);
        }
        start = driver("cuLaunchKernel");
        return;
    }
    if (start(functions[place->round % FUNCTIONS], 1, 1, 1, 32, 1, 1, 0, place->streams[place->round % streams], NULL, NULL, NULL))
        sleep_us(100);
}

/* For one system call, where its first argument is this one (or any). */
static void filter(int number, unsigned argument, bool any, unsigned action)
{
    struct sock_filter program[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (unsigned)number, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, argument, 0, any ? 0 : 1),
        BPF_STMT(BPF_RET | BPF_K, action),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
    struct sock_fprog filter = {sizeof program / sizeof *program, program};
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &filter))
        exit(4);
}

static void no_threads(struct place *place)
{
    long_and_new(place, 1, "20ms");
    if (place->round == 0) {
        filter(SYS_clone, 0, true, SECCOMP_RET_ERRNO | EAGAIN);
        filter(SYS_clone3, 0, true, SECCOMP_RET_ERRNO | EAGAIN);
    }
}

/* It ends at the first thing that it does: to take its name. */
static void helper_ended(struct place *place)
{
    long_and_new(place, 4, "20ms");
    if (place->round == 0)
        filter(SYS_prctl, PR_SET_NAME, false, SECCOMP_RET_KILL_THREAD);
}

static int thread_named(const char *name)
{
    char path[320], comm[32];
    DIR *tasks = opendir("/proc/self/task");
    int found = 0;
    for (struct dirent *task = readdir(tasks); task; task = readdir(tasks)) {
        snprintf(path, sizeof path, "/proc/self/task/%s/comm", task->d_name);
        FILE *file = task->d_name[0] == '.' ? NULL : fopen(path, "r");
        if (file && fgets(comm, sizeof comm, file) && strncmp(comm, name, strlen(name)) == 0)
            found = atoi(task->d_name);
        if (file)
            fclose(file);
    }
    closedir(tasks);
    return found;
}

static void helper_held(struct place *place)
{
    long_and_new(place, 8, "900ms");
    if (place->round != 0)
        return;
    launch(place, "spin_10us", place->streams[0]);
    sleep_us(20000);
    int thread = thread_named("vcuda-helper");
    prctl(PR_SET_PTRACER, -1, 0, 0, 0);
    if (thread && fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        ptrace(PTRACE_SEIZE, thread, 0, 0);
        ptrace(PTRACE_INTERRUPT, thread, 0, 0);
        for (;;)
            pause();
    }
    sleep_us(50000);
}

/* All address space is taken before a thread's first launch on a stream. */
static void no_memory(struct place *place)
{
    long_and_new(place, 8, "20ms");
    if (place->round != 0)
        return;
    struct rlimit limit;
    unsigned long pages;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%lu", &pages) != 1)
        exit(4);
    fclose(file);
    getrlimit(RLIMIT_AS, &limit);
    limit.rlim_cur = pages * 4096;
    setrlimit(RLIMIT_AS, &limit);
    for (size_t bytes = MIB; bytes >= 16; bytes = bytes > 256 ? bytes / 2 : bytes - 16)
        while (malloc(bytes))
            ;
}

/* All descriptors are taken at the first cuInit. */
static void no_descriptors(struct place *place)
{
    if (!place->context) {
        static int (*initialize)();
        initialize = driver("cuInit");
        int last = -1, opened;
        while ((opened = open("/dev/null", O_RDONLY | O_CLOEXEC)) >= 0)
            last = opened;
        initialize(0);
        for (int i = 0; i < 3; i++)
            close(last - i);
        open_context(place);
        for (unsigned i = 0; i < MOST_STREAMS; i++)
            CALL(cuStreamCreate, &place->streams[i], 1);
    }
    long_and_new(place, 1, "20ms");
}
