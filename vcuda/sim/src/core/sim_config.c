/* Reads state/machine.conf. */
#include "sim_config.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_FILE = 256 * 1024, VALUE = 512 };

static char *read_text(const char *path, char *why, size_t why_size)
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    struct stat status;
    char *text = NULL;
    if (fd < 0) {
        snprintf(why, why_size, "no simulated machine: %s: %s", path, strerror(errno));
        return NULL;
    }
    if (fstat(fd, &status) == 0 && status.st_size <= MAX_FILE && (text = malloc((size_t)status.st_size + 1))) {
        size_t have = 0;
        ssize_t got;
        while (have < (size_t)status.st_size && (got = read(fd, text + have, (size_t)status.st_size - have)) > 0)
            have += (size_t)got;
        text[have] = 0;
    } else {
        snprintf(why, why_size, "%s is too large for a machine description (%d bytes at most)", path, MAX_FILE);
    }
    close(fd);
    return text;
}

/* The next `key=value` at *cursor within one line. 1 found, 0 end of line, -1 malformed. */
static int next_pair(const char **cursor, char *key, size_t key_size, char *value, size_t value_size)
{
    const char *p = *cursor;
    size_t n = 0;
    while (*p == ' ' || *p == '\t' || *p == '\r')
        p++;
    if (*p == 0 || *p == '\n')
        return 0;
    while (*p && *p != '=' && *p != ' ' && *p != '\n') {
        if (n + 1 >= key_size)
            return -1;
        key[n++] = *p++;
    }
    key[n] = 0;
    if (*p != '=' || n == 0)
        return -1;
    p++;
    char end = ' ';
    if (*p == '"') {
        end = '"';
        p++;
    }
    n = 0;
    while (*p && *p != '\n' && *p != '\r' && *p != end && !(end == ' ' && *p == '\t')) {
        if (n + 1 >= value_size)
            return -1;
        value[n++] = *p++;
    }
    value[n] = 0;
    if (end == '"') {
        if (*p != '"')
            return -1;
        p++;
    }
    *cursor = p;
    return 1;
}

static int to_number(const char *value, uint64_t limit, uint64_t *number)
{
    char *end;
    errno = 0;
    unsigned long long parsed = strtoull(value, &end, 10);
    if (errno || end == value || *end || value[0] == '-' || parsed > limit)
        return -1;
    *number = parsed;
    return 0;
}

static int set_text(char *target, size_t size, const char *value)
{
    if (strlen(value) >= size || !*value)
        return -1;
    strcpy(target, value);
    return 0;
}

static int set_capability(sim_card_config *card, const char *value)
{
    return sscanf(value, "%d.%d", &card->cc_major, &card->cc_minor) == 2 ? 0 : -1;
}

static int set_caps(sim_card_config *card, const char *value)
{
    card->cap_count = 0;
    while (*value) {
        char *end;
        long number = strtol(value, &end, 10);
        if (end == value || number < 0 || card->cap_count == SIM_MAX_CAPS || (*end && *end != ','))
            return -1;
        card->caps[card->cap_count++] = (int32_t)number;
        value = *end ? end + 1 : end;
    }
    return 0;
}

static int set_key(sim_card_config *card, int index, const char *key, const char *value)
{
    static const struct {
        const char *key;
        size_t offset;
        uint64_t scale; /* 0: an int32 */
    } numbers[] = {
        {"minor", offsetof(sim_card_config, minor), 0},
        {"parent", offsetof(sim_card_config, parent), 0},
        {"mig", offsetof(sim_card_config, mig), 0},
        {"texels", offsetof(sim_card_config, texels), 0},
        {"sms", offsetof(sim_card_config, sms), 0},
        {"run_to_completion", offsetof(sim_card_config, run_to_completion), 0},
        {"slice_spread_us", offsetof(sim_card_config, slice_spread_ns), 1000},
        {"switch_spread_us", offsetof(sim_card_config, switch_spread_ns), 1000},
        {"cold_us", offsetof(sim_card_config, cold_ns), 1000},
        {"cold_ppm", offsetof(sim_card_config, cold_ppm), 1},
        {"drag_ppm", offsetof(sim_card_config, drag_ppm), 1},
        {"gap_ns", offsetof(sim_card_config, gap_ns), 1},
        {"gap_spread_ns", offsetof(sim_card_config, gap_spread_ns), 1},
        {"call_ns", offsetof(sim_card_config, call_ns), 1},
        {"reach_ns", offsetof(sim_card_config, reach_ns), 1},
        {"event_step_ns", offsetof(sim_card_config, event_step_ns), 1},
        {"event_jitter_ns", offsetof(sim_card_config, event_jitter_ns), 1},
        {"kernel_jitter_ppm", offsetof(sim_card_config, kernel_jitter_ppm), 1},
        {"timing_seed", offsetof(sim_card_config, timing_seed), 1},
        {"pool_seed", offsetof(sim_card_config, pool_seed), 1},
        {"memory", offsetof(sim_card_config, memory_bytes), 1},
        {"context", offsetof(sim_card_config, context_bytes), 1},
        {"context_ms", offsetof(sim_card_config, context_ns), 1000000},
        {"unlisted_kib", offsetof(sim_card_config, unlisted_bytes), 1024},
        {"stream_kib", offsetof(sim_card_config, stream_bytes), 1024},
        {"slice_us", offsetof(sim_card_config, slice_ns), 1000},
        {"switch_us", offsetof(sim_card_config, switch_ns), 1000},
    };
    uint64_t number;
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        if (strcmp(key, numbers[i].key))
            continue;
        if (to_number(value, numbers[i].scale ? UINT64_MAX >> 12 : INT32_MAX, &number))
            return -1;
        char *field = (char *)card + numbers[i].offset;
        if (numbers[i].scale)
            *(uint64_t *)(void *)field = number * numbers[i].scale;
        else
            *(int32_t *)(void *)field = (int32_t)number;
        return 0;
    }
    if (!strcmp(key, "index"))
        return to_number(value, SIM_MAX_CARDS, &number) || (int)number != index ? -1 : 0;
    if (!strcmp(key, "numa")) {
        if (!strcmp(value, "-1"))
            return 0;
        if (to_number(value, INT32_MAX, &number))
            return -1;
        card->numa = (int32_t)number;
        return 0;
    }
    if (!strcmp(key, "uuid"))
        return set_text(card->uuid, sizeof card->uuid, value);
    if (!strcmp(key, "model"))
        return set_text(card->model, sizeof card->model, value);
    if (!strcmp(key, "pci"))
        return set_text(card->pci, sizeof card->pci, value);
    if (!strcmp(key, "profile"))
        return set_text(card->profile, sizeof card->profile, value);
    if (!strcmp(key, "cc"))
        return set_capability(card, value);
    if (!strcmp(key, "caps"))
        return set_caps(card, value);
    if (!strcmp(key, "pools")) {
        card->ragged_pools = !strncmp(value, "ragged", 6) && (!value[6] || value[6] == ':');
        if (card->ragged_pools && value[6])
            return to_number(value + 7, UINT64_MAX >> 1, &card->pool_seed);
        return card->ragged_pools || !strcmp(value, "even") ? 0 : -1;
    }
    return 0;
}

static int set_driver_key(sim_config *config, const char *key, const char *value)
{
    uint64_t number;
    if (!strcmp(key, "version"))
        return set_text(config->driver_version, sizeof config->driver_version, value);
    if (!strcmp(key, "cuda")) {
        if (to_number(value, 99999, &number))
            return -1;
        config->cuda_version = (int)number;
    }
    if (!strcmp(key, "memory_limits")) {
        static const char *const names[] = {[SIM_LIMITS_NONE] = "none", [SIM_LIMITS_DMEM] = "dmem", [SIM_LIMITS_MISC] = "misc"};
        int found = 0;
        while (found < 3 && strcmp(names[found], value))
            found++;
        if (found == 3)
            return -1;
        config->memory_limits = (sim_memory_limits)found;
    }
    if (!strcmp(key, "pid_namespace") && to_number(value, UINT64_MAX >> 1, &config->pid_namespace))
        return -1;
    return 0;
}

static void card_defaults(sim_card_config *card, int index)
{
    memset(card, 0, sizeof *card);
    card->minor = -1;
    card->parent = -1;
    card->numa = -1;
    card->cc_major = 8;
    card->sms = 108;
    card->context_bytes = 64ull << 20;
    card->slice_ns = 2000000;
    card->switch_ns = 75000;
    card->event_step_ns = 1;
    strcpy(card->model, "NVIDIA Simulated GPU");
    snprintf(card->pci, sizeof card->pci, "0000:%02x:00.0", (unsigned)(index + 1) & 0xffu);
}

static const char *card_problem(const sim_config *config, const sim_card_config *card)
{
    if (card->minor < 0 || !card->uuid[0] || !card->memory_bytes)
        return "a card needs index, minor, uuid and memory";
    if (card->parent >= config->card_count || (card->parent >= 0 && !config->cards[card->parent].mig))
        return "parent must be the index of an earlier card that says mig=1";
    if (card->slice_ns == 0 || card->sms <= 0 || card->event_step_ns == 0)
        return "slice_us, sms and event_step_ns must be at least 1";
    if (card->context_bytes > card->memory_bytes)
        return "context is larger than the card's memory";
    return NULL;
}

static int parse_line(sim_config *config, const char *line, const char **problem)
{
    char key[64], value[VALUE];
    const int is_card = !strncmp(line, "card ", 5), is_driver = !strncmp(line, "driver ", 7);
    sim_card_config *card = &config->cards[config->card_count];
    *problem = NULL;
    if (!is_card && !is_driver) {
        *problem = "expected `card …`, `driver …` or a comment";
        return -1;
    }
    if (is_card && config->card_count == SIM_MAX_CARDS) {
        *problem = "too many cards (32 at most)";
        return -1;
    }
    if (is_card)
        card_defaults(card, config->card_count);
    line += is_card ? 5 : 7;
    int found;
    while ((found = next_pair(&line, key, sizeof key, value, sizeof value)) > 0) {
        if (is_card ? set_key(card, config->card_count, key, value) : set_driver_key(config, key, value)) {
            static _Thread_local char bad[160];
            snprintf(bad, sizeof bad, "bad value %.60s=%.60s", key, value);
            *problem = bad;
            return -1;
        }
    }
    if (found < 0) {
        *problem = "expected key=value pairs";
        return -1;
    }
    if (is_card) {
        *problem = card_problem(config, card);
        config->card_count++;
    }
    return *problem ? -1 : 0;
}

int sim_config_read(const char *path, sim_config *config, char *why, size_t why_size)
{
    memset(config, 0, sizeof *config);
    snprintf(config->driver_version, sizeof config->driver_version, "%s", VC_SIM_DRIVER_VERSION);
    config->cuda_version = 12040;
    config->pid_namespace = 0xeffffffcull; /* PROC_PID_INIT_INO */
    config->text = read_text(path, why, why_size);
    if (!config->text)
        return -1;
    int number = 0;
    for (const char *line = config->text, *next; line && *line; line = next) {
        const char *problem;
        const char *end = strchr(line, '\n');
        next = end ? end + 1 : NULL;
        number++;
        while (*line == ' ' || *line == '\t' || *line == '\r')
            line++;
        if (*line == '\n' || *line == '#' || !*line)
            continue;
        if (parse_line(config, line, &problem)) {
            snprintf(why, why_size, "%s line %d: %s", path, number, problem);
            sim_config_free(config);
            return -1;
        }
    }
    return 0;
}

void sim_config_free(sim_config *config)
{
    free(config->text);
    config->text = NULL;
    config->card_count = 0;
}

int sim_config_extra(const sim_config *config, int card, const char *key, char *value, size_t value_size)
{
    int index = -1;
    for (const char *line = config->text; line && *line;) {
        while (*line == ' ' || *line == '\t')
            line++;
        const int is_card = !strncmp(line, "card ", 5), is_driver = !strncmp(line, "driver ", 7);
        index += is_card;
        if ((is_card && index == card) || (is_driver && card < 0)) {
            char found_key[64], found[VALUE];
            const char *cursor = line + (is_card ? 5 : 7);
            while (next_pair(&cursor, found_key, sizeof found_key, found, sizeof found) > 0) {
                if (!strcmp(found_key, key)) {
                    snprintf(value, value_size, "%s", found);
                    return 1;
                }
            }
        }
        line = strchr(line, '\n');
        line = line ? line + 1 : NULL;
    }
    return 0;
}
