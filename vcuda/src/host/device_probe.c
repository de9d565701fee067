/* A child is born in the control group (clone3, CLONE_INTO_CGROUP), asks access(2), and is gone.
 *
 * Under control groups v2 a BPF program decides what may be opened, and no file shows what it allows. access(2) runs it without opening
 * the device (kernel, fs/namei.c: inode_permission calls devcgroup_inode_permission). */
#include "host/device_probe.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef SYS_clone3
#define SYS_clone3 435
#endif
#ifndef SYS_pidfd_send_signal
#define SYS_pidfd_send_signal 424
#endif

/* linux/sched.h of Linux 5.7; older headers lack the last field. */
struct clone_arguments {
    uint64_t flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls, set_tid, set_tid_size, cgroup;
};
#define CLONE_PIDFD_FLAG 0x1000ULL
#define CLONE_INTO_CGROUP_FLAG 0x200000000ULL
#define WAIT_ON_PIDFD 3

/* Only system calls: the other threads of the parent, and the locks that they held, do not exist here. */
static void answer(const char *const *paths, uint32_t count, int out) __attribute__((noreturn));
static void answer(const char *const *paths, uint32_t count, int out)
{
    uint64_t closed = 0;
    for (uint32_t index = 0; index < count; index++)
        if (syscall(SYS_faccessat, AT_FDCWD, paths[index], R_OK | W_OK) != 0) {
            if (errno != EPERM)
                _exit(1); /* the node itself is missing or closed: that says nothing of the group */
            closed |= UINT64_C(1) << index;
        }
    _exit(syscall(SYS_write, out, &closed, sizeof(closed)) == (long)sizeof(closed) ? 0 : 1);
}

int vc_devices_closed(int group, const char *const *paths, uint32_t count, uint32_t timeout_ms, uint64_t *closed)
{
    if (count > 64)
        return EINVAL;
    int ends[2], child = -1;
    if (pipe2(ends, O_CLOEXEC) != 0)
        return errno;
    struct clone_arguments arguments = {
        .flags = CLONE_PIDFD_FLAG | CLONE_INTO_CGROUP_FLAG,
        .pidfd = (uint64_t)(uintptr_t)&child,
        .cgroup = (uint64_t)group,
    };
    long made = syscall(SYS_clone3, &arguments, sizeof(arguments));
    if (made == 0)
        answer(paths, count, ends[1]);
    int wrong = made < 0 ? errno : 0;
    close(ends[1]);
    if (!wrong) {
        struct pollfd told = {.fd = ends[0], .events = POLLIN};
        int ready = poll(&told, 1, (int)timeout_ms); /* a frozen group never answers */
        if (ready <= 0)
            wrong = ready < 0 ? errno : ETIMEDOUT;
        else if (read(ends[0], closed, sizeof(*closed)) != (ssize_t)sizeof(*closed))
            wrong = ECHILD;
        if (wrong)
            syscall(SYS_pidfd_send_signal, child, SIGKILL, NULL, 0);
        siginfo_t ended;
        while (waitid(WAIT_ON_PIDFD, (id_t)child, &ended, WEXITED | __WALL) != 0 && errno == EINTR)
            continue;
        close(child);
    }
    close(ends[0]);
    return wrong;
}
