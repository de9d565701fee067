/* One line on stderr per condition. */
#include "base/log.h"

#include <errno.h>
#include <poll.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/atomic.h"

_Static_assert(VC_NOTICE_COUNT <= 32, "one bit per notice");

static bool silenced(void)
{
    static const char name[] = "VCUDA_LOG";
    for (char **variable = environ; variable && *variable; variable++)
        if (strncmp(*variable, name, sizeof name - 1) == 0 && strcmp(*variable + sizeof name - 1, "=0") == 0)
            return true;
    return false;
}

void vc_log_once(enum vc_notice notice, const char *format, ...)
{
    static uint32_t said;
    uint32_t bit = 1u << notice;
    if (__atomic_fetch_or(&said, bit, __ATOMIC_RELAXED) & bit)
        return;

    if (silenced())
        return;

    int saved_errno = errno;
    char line[1024];
    int length = snprintf(line, sizeof line, "vcuda: ");
    va_list arguments;
    va_start(arguments, format);
    int more = vsnprintf(line + length, sizeof line - (size_t)length - 1, format, arguments);
    va_end(arguments);
    if (more < 0)
        more = 0;
    length += more;
    if (length > (int)sizeof line - 2)
        length = (int)sizeof line - 2;
    line[length++] = '\n';

    /* A full pipe would block the tenant and a closed one would raise SIGPIPE: then we stay silent. */
    struct pollfd standard_error = {.fd = STDERR_FILENO, .events = POLLOUT};
    if (poll(&standard_error, 1, 0) == 1 && standard_error.revents == POLLOUT) {
        ssize_t written = write(STDERR_FILENO, line, (size_t)length);
        (void)written;
    }
    errno = saved_errno;
}
