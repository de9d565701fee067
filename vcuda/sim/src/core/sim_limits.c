/* Limits of device memory per control group, which drivers have since 615. Two things can count there (NVIDIA's page "MPS v3 Memory
 * Partitioning" and the open kernel module 615.71.09, memacct.c):
 *
 *   dmem  the kernel's controller: hierarchical, each group above a process counts it, and what was held before the limit came too
 *   misc  the driver itself: the nearest group with a limit counts, that one alone, and only what is taken from then on
 *
 * Managed memory counts in neither. A process is of the group in which it last took memory, with all that it holds.
 */
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "sim_engine.h"

void sim_own_group(char group[SIM_GROUP_TEXT])
{
    char text[4096];
    const int fd = open("/proc/self/cgroup", O_RDONLY | O_CLOEXEC);
    const ssize_t got = fd < 0 ? -1 : read(fd, text, sizeof text - 1);
    if (fd >= 0)
        close(fd);
    text[got > 0 ? got : 0] = 0;
    snprintf(group, SIM_GROUP_TEXT, "/");
    for (char *rest = NULL, *line = strtok_r(text, "\n", &rest); line; line = strtok_r(NULL, "\n", &rest))
        if (!strncmp(line, "0::", 3))
            snprintf(group, SIM_GROUP_TEXT, "%s", line + 3);
}

static int holds(const sim_limit *limit, const char *group)
{
    const size_t length = strlen(limit->path);
    return limit->group && !strncmp(limit->path, group, length) && (!group[length] || group[length] == '/');
}

/* The next limit that counts a process of this group, after `last` (NULL: the first), or NULL. */
static const sim_limit *next_counting(const sim_state *state, const sim_card *card, const char *group, const sim_limit *last)
{
    const sim_limit *nearest = NULL;
    for (const sim_limit *limit = last ? last + 1 : card->limits; limit < card->limits + card->limits_used; limit++) {
        if (!holds(limit, group))
            continue;
        if (state->config.memory_limits == SIM_LIMITS_DMEM)
            return limit;
        if (!nearest || strlen(limit->path) > strlen(nearest->path))
            nearest = limit;
    }
    return last ? NULL : nearest; /* of misc there is one */
}

static int counts(const sim_state *state, const sim_card *card, const sim_limit *limit, const char *group)
{
    const sim_limit *one = NULL;
    while ((one = next_counting(state, card, group, one)))
        if (one == limit)
            return 1;
    return 0;
}

static uint64_t held(const sim_card *card, int32_t slot)
{
    const sim_usage *usage = &card->usage[slot];
    return usage->generation ? usage->context_bytes + usage->memory_bytes - usage->managed_bytes : 0;
}

uint64_t sim_limit_used(const sim_state *state, const sim_card *card, const sim_limit *limit)
{
    uint64_t used = 0;
    for (int32_t slot = 0; slot < SIM_MAX_PROCESSES; slot++) {
        const uint64_t now = held(card, slot), before = limit->before_bytes[slot];
        if (now > before && counts(state, card, limit, state->shared->processes[slot].group))
            used += now - before;
    }
    return used;
}

void sim_limit_given_back(sim_card *card, int32_t slot)
{
    const uint64_t now = held(card, slot);
    for (int32_t i = 0; i < card->limits_used; i++)
        if (card->limits[i].before_bytes[slot] > now)
            card->limits[i].before_bytes[slot] = now;
}

int sim_limit_refused(sim_state *state, sim_card *card, int32_t slot, uint64_t bytes)
{
    if (state->config.memory_limits == SIM_LIMITS_NONE)
        return 0;
    char *group = state->shared->processes[slot].group;
    if (slot == state->slot)
        sim_own_group(group);
    sim_limit_given_back(card, slot);
    for (const sim_limit *limit = NULL; (limit = next_counting(state, card, group, limit));) {
        const uint64_t used = sim_limit_used(state, card, limit);
        if (bytes > (used < limit->hard_bytes ? limit->hard_bytes - used : 0))
            return 1;
    }
    return 0;
}

const sim_limit *sim_limit_seen(const sim_state *state, const sim_card *card, const char *group)
{
    const sim_limit *limit = NULL;
    while ((limit = next_counting(state, card, group, limit)))
        if (state->config.memory_limits == SIM_LIMITS_MISC || !strcmp(limit->path, group)) /* dmem: the group's own file says it */
            return limit;
    return NULL;
}

sim_limit *sim_limit_find(sim_card *card, uint64_t group)
{
    for (int32_t i = 0; i < card->limits_used; i++)
        if (card->limits[i].group == group)
            return &card->limits[i];
    return NULL;
}

int sim_limit_set(const sim_state *state, sim_card *card, uint64_t group, const char *path, uint64_t soft_bytes, uint64_t hard_bytes)
{
    const int own = state->config.memory_limits == SIM_LIMITS_MISC;
    sim_limit *limit = sim_limit_find(card, group);
    if (limit && own && sim_limit_used(state, card, limit) > hard_bytes)
        return -2;
    if (!limit) {
        if (!(limit = sim_limit_find(card, 0)) && card->limits_used < SIM_MAX_LIMITS)
            limit = &card->limits[card->limits_used++];
        if (!limit)
            return -1;
        *limit = (sim_limit){.group = group};
        snprintf(limit->path, sizeof limit->path, "%s", path);
        for (int32_t slot = 0; own && slot < SIM_MAX_PROCESSES; slot++)
            limit->before_bytes[slot] = held(card, slot);
    }
    limit->soft_bytes = soft_bytes;
    limit->hard_bytes = hard_bytes;
    return 0;
}

void sim_limit_clear(sim_limit *limit)
{
    limit->group = 0;
}
