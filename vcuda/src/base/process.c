/* Process identity and liveness from /proc. */
#include "base/process.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define VC__PF_EXITING 0x4u /* <linux/sched.h>; field 9 of /proc/<pid>/stat shows it */

struct proc_stat {
    char comm[16];
    char state;
    unsigned long flags;
    unsigned long threads;
    uint64_t start_ticks;
};

/* Read /proc/<pid>/stat; the command may hold spaces and parentheses, so parse from the last ')'. */
static bool read_stat(const char *pid, struct proc_stat *stat)
{
    char path[64], text[1024];
    snprintf(path, sizeof path, "/proc/%s/stat", pid);
    int descriptor = open(path, O_RDONLY | O_CLOEXEC);
    if (descriptor < 0)
        return false;
    ssize_t length = read(descriptor, text, sizeof text - 1);
    close(descriptor);
    if (length <= 0)
        return false;
    text[length] = '\0';
    char *open_mark = strchr(text, '('), *close_mark = strrchr(text, ')');
    if (!open_mark || !close_mark || close_mark < open_mark)
        return false;
    *close_mark = '\0';
    snprintf(stat->comm, sizeof stat->comm, "%s", open_mark + 1);
    unsigned long long start = 0;
    /* Fields 3 (state), 9 (flags), 20 (num_threads), 22 (starttime) of proc(5). */
    int got = sscanf(close_mark + 1, " %c %*s %*s %*s %*s %*s %lu %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %lu %*s %llu",
                     &stat->state, &stat->flags, &stat->threads, &start);
    stat->start_ticks = start;
    return got == 4;
}

/* Whether /proc counts processes as we do: it may be the host's, mounted into our PID namespace. */
static bool proc_is_ours(void)
{
    char target[32];
    ssize_t length = readlink("/proc/self", target, sizeof target - 1);
    if (length <= 0)
        return false;
    target[length] = '\0';
    return atol(target) == (long)getpid();
}

void vc_identify_self(struct vc_identity *self)
{
    memset(self, 0, sizeof *self);
    self->pid = getpid();
    struct proc_stat stat;
    if (read_stat("self", &stat)) {
        memcpy(self->comm, stat.comm, sizeof self->comm);
        if (proc_is_ours())
            self->start_ticks = stat.start_ticks;
    }
    struct stat namespace_file;
    if (fstatat(AT_FDCWD, "/proc/self/ns/pid", &namespace_file, 0) == 0)
        self->pid_namespace = namespace_file.st_ino;
}

enum vc_presence vc_process_presence(const struct vc_identity *self, const struct vc_identity *other)
{
    if (self->pid_namespace != other->pid_namespace)
        return VC_UNSEEN;
    if (other->pid <= 0 || (kill(other->pid, 0) != 0 && errno == ESRCH))
        return VC_GONE;
    if (self->start_ticks == 0)
        return VC_PRESENT; /* no /proc of our own to look further */
    char pid[16];
    snprintf(pid, sizeof pid, "%d", (int)other->pid);
    struct proc_stat stat;
    if (!read_stat(pid, &stat))
        return kill(other->pid, 0) != 0 && errno == ESRCH ? VC_GONE : VC_PRESENT; /* hidepid hides it from us */
    if (other->start_ticks != 0 && stat.start_ticks != other->start_ticks)
        return VC_GONE;
    /* A main thread that ended before its siblings is a zombie too: the last of them closes the files. */
    if ((stat.state == 'Z' || stat.state == 'X') && stat.threads <= 1)
        return VC_GONE;
    return stat.flags & VC__PF_EXITING ? VC_EXITING : VC_PRESENT;
}
