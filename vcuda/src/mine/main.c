/* `vcuda top`, `ls` and `show` inside a container whose image knows nothing of us: this container's share, nothing else.
 *
 * Linked statically, so that it runs on any C library and on none. It only reads, and needs no right but to read /etc/vcuda. */
#include <errno.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <termios.h>
#include <time.h>
#include <unistd.h>

#include "mine/text.h"

enum { VC__BAD_USAGE = 2, VC__NO_SHARE = 125, VC__MOST_SECONDS = 60 };

static const char USAGE[] = "usage: vcuda top|ls|show [--once] [--json] [--interval SECONDS] [--region DIR]\n"
                            "This container's share of its GPUs: top is live (q ends), ls looks once, show adds processes and times.\n"
                            "It knows no other container; `vcuda run` is on the machine, not here.\n";
static volatile sig_atomic_t ended;

static void end(int number)
{
    (void)number;
    ended = 1;
}

/* As the C library decides it, without its tables: an image may have none. */
static bool shows_blocks(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    for (size_t at = 0; at < sizeof names / sizeof *names; at++) {
        const char *value = getenv(names[at]);
        if (value && *value)
            return strcasestr(value, "utf-8") || strcasestr(value, "utf8");
    }
    return false;
}

static bool is_live(void)
{
    const char *terminal = getenv("TERM");
    return isatty(STDOUT_FILENO) && isatty(STDIN_FILENO) && terminal && *terminal && strcmp(terminal, "dumb") != 0;
}

static void wait_for(double seconds)
{
    struct timespec left = {(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
    while (!ended && nanosleep(&left, &left) != 0 && errno == EINTR)
        continue;
}

static void look(struct vc_mine *mine, int count)
{
    for (int at = 0; at < count; at++)
        vc_mine_look(&mine[at]);
}

/* Writes all of the text and frees it; false: nobody reads any more, or there was no memory. */
static bool say(char *text)
{
    bool said = text && fputs(text, stdout) >= 0 && fflush(stdout) == 0;
    free(text);
    return said;
}

static void watch(struct vc_mine *mine, int count, double seconds)
{
    struct termios before, keys;
    bool terminal = tcgetattr(STDIN_FILENO, &before) == 0;
    signal(SIGINT, end);
    signal(SIGTERM, end);
    signal(SIGHUP, end);
    if (terminal) {
        keys = before;
        keys.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
        tcsetattr(STDIN_FILENO, TCSANOW, &keys);
    }
    fputs("\033[?1049h\033[?25l", stdout);
    while (!ended) {
        look(mine, count);
        fputs("\033[H\033[2J", stdout);
        if (!say(vc_text_table(mine, count, shows_blocks())))
            break;
        struct pollfd keyboard = {STDIN_FILENO, POLLIN, 0};
        char key = 0;
        if (poll(&keyboard, 1, (int)(seconds * 1000)) > 0 && (read(STDIN_FILENO, &key, 1) <= 0 || key == 'q'))
            break;
    }
    fputs("\033[?25h\033[?1049l", stdout);
    fflush(stdout);
    if (terminal)
        tcsetattr(STDIN_FILENO, TCSANOW, &before);
}

static int misused(const char *what, const char *word)
{
    fprintf(stderr, "vcuda: %s %.60s\n%s", what, word, USAGE);
    return VC__BAD_USAGE;
}

int main(int word_count, char **words)
{
    static struct vc_mine mine[VC_MINE_MOST];
    const char *command = word_count > 1 ? words[1] : "--help", *directory = "/etc/vcuda";
    bool once = false, json = false;
    double seconds = strcmp(command, "top") == 0 ? 1.0 : 0.5;
    if (strcmp(command, "--help") == 0 || strcmp(command, "-h") == 0)
        return fputs(USAGE, stdout) < 0;
    if (strcmp(command, "top") != 0 && strcmp(command, "ls") != 0 && strcmp(command, "show") != 0)
        return misused("there is no command", command);
    for (int at = 2; at < word_count; at++) {
        bool last = at + 1 == word_count;
        char *rest = NULL;
        if (strcmp(words[at], "--once") == 0) {
            once = true;
        } else if (strcmp(words[at], "--json") == 0) {
            json = true;
        } else if (strcmp(words[at], "--region") == 0 && !last) {
            directory = words[++at];
        } else if (strcmp(words[at], "--interval") == 0 && !last) {
            seconds = strtod(words[++at], &rest);
            if (rest == words[at] || *rest || !(seconds >= 0 && seconds <= VC__MOST_SECONDS))
                return misused("--interval is seconds, 0 to 60, not", words[at]);
        } else {
            return misused(last && strncmp(words[at], "--", 2) == 0 ? "no such option, or no value behind it:" : "no such option:", words[at]);
        }
    }
    int count = vc_mine_find(directory, mine);
    if (count == 0) {
        fprintf(stderr, "vcuda: this container has no share: there are no limits in %.200s\n", directory);
        return VC__NO_SHARE;
    }
    if (strcmp(command, "top") == 0 && !once && !json && is_live()) {
        watch(mine, count, seconds < 0.1 ? 0.1 : seconds);
        return 0;
    }
    look(mine, count);
    wait_for(seconds);
    look(mine, count);
    bool details = strcmp(command, "show") == 0;
    char *text = json ? vc_text_json(mine, count) : (details ? vc_text_details : vc_text_table)(mine, count, shows_blocks());
    if (!say(text))
        return 1;
    for (int at = 0; at < count; at++) {
        if (!mine[at].readable)
            return 1;
    }
    return 0;
}
