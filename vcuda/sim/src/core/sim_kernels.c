/* Kernel times: reads state/kernels when it changes and matches names against it. */
#include "sim_kernels.h"

#include <fnmatch.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define CHECK_NS 10000000ull
enum { MAX_RULES = 256, PATTERN = 192 };

typedef struct {
    char pattern[PATTERN];
    uint64_t ns, ns_per_block, other_ns, every_ns;
} rule;

static pthread_mutex_t rules_mutex = PTHREAD_MUTEX_INITIALIZER;
static rule rules[MAX_RULES];
static int rule_count;
static struct timespec rules_time;
static off_t rules_size = -1;
static ino_t rules_inode;
static _Atomic uint64_t rules_version = 1;
static _Atomic uint64_t checked_ns;

static void read_rules(FILE *file)
{
    char line[512];
    rule_count = 0;
    while (rule_count < MAX_RULES && fgets(line, sizeof line, file)) {
        rule *next = &rules[rule_count];
        unsigned long long ns, per_block = 0, other = 0, every = 0;
        if (line[0] == '#' || sscanf(line, "%191s %llu %llu %llu %llu", next->pattern, &ns, &per_block, &other, &every) < 2)
            continue;
        next->ns = ns;
        next->ns_per_block = per_block;
        next->other_ns = other;
        next->every_ns = every;
        rule_count++;
    }
}

static void check_file(const sim_state *state)
{
    char path[3136];
    struct stat status;
    snprintf(path, sizeof path, "%s/kernels", state->directory);
    if (stat(path, &status)) {
        if (rules_size != -1) {
            rule_count = 0;
            rules_size = -1;
            rules_version++;
        }
        return;
    }
    if (status.st_size == rules_size && status.st_ino == rules_inode &&
        !memcmp(&status.st_mtim, &rules_time, sizeof rules_time))
        return;
    FILE *file = fopen(path, "re");
    if (!file)
        return;
    read_rules(file);
    fclose(file);
    rules_size = status.st_size;
    rules_inode = status.st_ino;
    rules_time = status.st_mtim;
    rules_version++;
}

static uint64_t time_in_name(const char *name)
{
    const char *last = strrchr(name, '_');
    char *unit;
    if (!last || last[1] < '0' || last[1] > '9')
        return 0;
    const unsigned long long number = strtoull(last + 1, &unit, 10);
    const uint64_t scale = !strcmp(unit, "ns")   ? 1
                           : !strcmp(unit, "us") ? 1000
                           : !strcmp(unit, "ms") ? 1000000
                           : !strcmp(unit, "s")  ? 1000000000
                                                 : 0;
    return number < 1000000 ? number * scale : 0;
}

static void match(const char *name, sim_kernel_time *cache)
{
    for (int i = 0; i < rule_count; i++) {
        if (fnmatch(rules[i].pattern, name, 0) == 0) {
            cache->ns = rules[i].ns;
            cache->ns_per_block = rules[i].ns_per_block;
            cache->other_ns = rules[i].other_ns;
            cache->every_ns = rules[i].every_ns;
            return;
        }
    }
    cache->ns = time_in_name(name);
    cache->ns_per_block = cache->every_ns = 0;
    if (!cache->ns)
        cache->ns = SIM_KERNEL_NS;
}

uint64_t sim_kernel_ns(const sim_state *state, const char *name, uint64_t blocks, uint64_t now, sim_kernel_time *cache)
{
    if (now - checked_ns >= CHECK_NS || __atomic_load_n(&cache->version, __ATOMIC_ACQUIRE) != rules_version) {
        pthread_mutex_lock(&rules_mutex);
        if (now - checked_ns >= CHECK_NS) {
            check_file(state);
            checked_ns = now;
        }
        if (cache->version != rules_version) {
            match(name, cache);
            __atomic_store_n(&cache->version, rules_version, __ATOMIC_RELEASE);
        }
        pthread_mutex_unlock(&rules_mutex);
    }
    const int other = cache->every_ns && now / cache->every_ns % 2;
    return (other ? cache->other_ns : cache->ns) + cache->ns_per_block * blocks;
}
