/* Names of nodes as rows, read from a request's own bytes: to make thousands of strings of them costs more than to decide. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "scheduler/scheduler.h"
#include "scheduler/text.h"

#define FIRST_PLACES 1024
#define KEY "nodenames" /* encoding/json reads keys in any case */

/* One behind the other: thousands are looked up at a time, and lie in as few cache lines as can be. */
struct entry {
    int64_t row;
    uint32_t hash, bytes;
    char name[];
};

#define UNIT 8 /* bytes; entries begin at multiples of it */
enum { FREE, DROPPED, FIRST };

struct vc_names {
    uint32_t *at; /* where in `entries`, in units; open addressing, each place after the other; never more than half full */
    size_t places, used, live; /* a power of two; dropped ones count as used */
    char *entries;
    size_t end, room; /* units */
};

struct vc_names *vc_names_new(void)
{
    struct vc_names *names = calloc(1, sizeof *names);

    if (names == NULL)
        return NULL;
    names->places = FIRST_PLACES;
    names->at = calloc(names->places, sizeof *names->at);
    names->end = FIRST;
    if (names->at == NULL) {
        free(names);
        return NULL;
    }
    return names;
}

void vc_names_free(struct vc_names *names)
{
    free(names->at);
    free(names->entries);
    free(names);
}

static struct entry *entry_at(const struct vc_names *names, uint32_t at)
{
    return (struct entry *)(void *)(names->entries + (size_t)at * UNIT);
}

static uint64_t mixed(uint64_t hash, uint64_t more)
{
    unsigned __int128 product = (unsigned __int128)(hash ^ more) * UINT64_C(0x9e3779b97f4a7c15);

    return (uint64_t)product ^ (uint64_t)(product >> 64); /* every bit of the name reaches the low ones */
}

#define QUOTES (VC_EACH_BYTE * '"')

/* How long the text before a quote (or `end`) is, and its hash: both in one pass, eight bytes at a time. */
static size_t measured(const char *text, const char *end, uint64_t *hash)
{
    const char *at = text;

    for (*hash = 0;; at += sizeof(uint64_t)) {
        uint64_t part = QUOTES;
        size_t left = (size_t)(end - at);

        if (left >= sizeof part)
            memcpy(&part, at, sizeof part); /* one load; of a length that is not known here it is a call: a fifth of all */
        else
            memcpy(&part, at, left);
        uint64_t others = part ^ QUOTES;
        uint64_t found = (others - VC_EACH_BYTE) & ~others & VC_EACH_BYTE << 7; /* its lowest bit is in the first quote */

        if (found) {
            unsigned before = (unsigned)__builtin_ctzll(found) / 8;
            size_t bytes = (size_t)(at - text) + before;

            *hash = mixed(mixed(*hash, part & ((UINT64_C(1) << 8 * before) - 1)), bytes);
            return bytes;
        }
        *hash = mixed(*hash, part);
    }
}

/* Whether two texts of the same length are one. Names are short: to call memcmp for each is a fifth of all. */
static bool is_same(const char *one, const char *other, size_t bytes)
{
    uint64_t left, right;

    if (bytes < sizeof left) {
        while (bytes > 0 && one[bytes - 1] == other[bytes - 1])
            bytes--;
        return bytes == 0;
    }
    for (size_t at = 0;; at = at + 2 * sizeof left <= bytes ? at + sizeof left : bytes - sizeof left) {
        memcpy(&left, one + at, sizeof left);
        memcpy(&right, other + at, sizeof right);
        if (left != right || at + sizeof left == bytes)
            return left == right;
    }
}

/* The place of a name, or the free one where it would be. */
static size_t find(const struct vc_names *names, const char *name, size_t bytes, uint64_t hash)
{
    for (size_t place = hash & (names->places - 1);; place = (place + 1) & (names->places - 1)) {
        uint32_t at = names->at[place];

        if (at == FREE)
            return place;
        if (at == DROPPED)
            continue;
        const struct entry *entry = entry_at(names, at);

        if (entry->hash == (uint32_t)hash && entry->bytes == bytes && is_same(entry->name, name, bytes))
            return place;
    }
}

static size_t units(size_t bytes)
{
    return (sizeof(struct entry) + bytes + UNIT - 1) / UNIT;
}

/* Append an entry for a name that is not there. */
static int add(struct vc_names *names, const char *name, size_t bytes, uint64_t hash, int64_t row)
{
    size_t end = names->end + units(bytes);

    if (end > UINT32_MAX)
        return -1;
    if (end > names->room) {
        char *larger = realloc(names->entries, 2 * end * UNIT);

        if (larger == NULL)
            return -1;
        names->entries = larger;
        names->room = 2 * end;
    }
    struct entry *entry = entry_at(names, (uint32_t)names->end);

    entry->row = row;
    entry->hash = (uint32_t)hash;
    entry->bytes = (uint32_t)bytes;
    memcpy(entry->name, name, bytes);
    names->at[find(names, name, bytes, hash)] = (uint32_t)names->end;
    names->end = end;
    names->used++;
    names->live++;
    return 0;
}

/* Make room, by forgetting what was dropped or, if that is little, with more places. */
static int more_places(struct vc_names *names)
{
    size_t places = 4 * names->live > names->places ? 2 * names->places : names->places;
    struct vc_names fresh = {calloc(places, sizeof *names->at), places, 0, 0, NULL, FIRST, 0};
    int problem = fresh.at == NULL ? -1 : 0;

    for (size_t place = 0; !problem && place < names->places; place++) {
        if (names->at[place] < FIRST)
            continue;
        const struct entry *old = entry_at(names, names->at[place]);
        uint64_t hash;

        measured(old->name, old->name + old->bytes, &hash);
        problem = add(&fresh, old->name, old->bytes, hash, old->row);
    }
    struct vc_names *gone = problem ? &fresh : names;

    free(gone->at);
    free(gone->entries);
    if (!problem)
        *names = fresh;
    return problem;
}

int vc_names_put(struct vc_names *names, const char *name, size_t bytes, int64_t row)
{
    if (2 * (names->used + 1) > names->places && more_places(names) != 0)
        return -1;
    uint64_t hash;

    if (measured(name, name + bytes, &hash) != bytes)
        return 0; /* with a quote in it; in JSON that is escaped, and never read here */
    uint32_t at = names->at[find(names, name, bytes, hash)];

    if (at == FREE)
        return add(names, name, bytes, hash, row);
    entry_at(names, at)->row = row;
    return 0;
}

void vc_names_drop(struct vc_names *names, const char *name, size_t bytes)
{
    uint64_t hash;

    measured(name, name + bytes, &hash);
    size_t place = find(names, name, bytes, hash);

    if (names->at[place] == FREE)
        return;
    names->at[place] = DROPPED;
    names->live--;
}

static const char *after_space(const char *at, const char *end)
{
    while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r'))
        at++;
    return at;
}

/* Behind the quote that ends a string; NULL if none does. `at` is behind the one that begins it. */
static const char *after_string(const char *at, const char *end)
{
    for (;;) {
        at = vc_text_after_plain(at, end);
        if (at >= end)
            return NULL;
        if (*at == '"')
            return at + 1;
        at += *at == '\\' ? 2 : 1;
    }
}

/* Behind a value, up to the comma or bracket that follows; NULL if nothing does. */
static const char *after_value(const char *at, const char *end)
{
    int64_t depth = 0;

    while (at != NULL && at < end) {
        char next = *at;

        if (depth == 0 && (next == ',' || next == '}' || next == ']'))
            return at;
        at++;
        if (next == '"')
            at = after_string(at, end);
        else if (next == '{' || next == '[')
            depth++;
        else if (next == '}' || next == ']')
            depth--;
    }
    return NULL;
}

/* Nothing that would have to be decoded, or that a parser would refuse. */
static bool is_plain(const char *name, size_t bytes)
{
    for (size_t at = 0; at < bytes; at++)
        if (name[at] < 0x20 || name[at] > 0x7e || name[at] == '\\')
            return false;
    return true;
}

struct word {
    const char *text;
    size_t bytes;
    uint64_t hash;
};

/* Look up some names, whose places have been fetched meanwhile; -1 if one would have to be decoded. */
static int look_up(const struct vc_names *names, const struct word *words, size_t count, int64_t *rows)
{
    /* Most are where they belong: fetch all of their entries before the first is compared. */
    for (size_t each = 0; names->live && each < count; each++)
        __builtin_prefetch(entry_at(names, names->at[words[each].hash & (names->places - 1)]));
    for (size_t each = 0; each < count; each++) {
        const struct word *word = words + each;
        uint32_t at = names->at[find(names, word->text, word->bytes, word->hash)];

        /* A known name is one that nothing is wrong with. */
        if (at == FREE && !is_plain(word->text, word->bytes))
            return -1;
        rows[each] = at == FREE ? -1 : entry_at(names, at)->row;
    }
    return 0;
}

#define AT_ONCE 32

/* Read `["a","b"]`; how many, and in `at` what is behind; -1 if it has another form. */
static int64_t read_names(const struct vc_names *names, const char **at, const char *end, int64_t *rows)
{
    const char *next = *at + 1;
    struct word words[AT_ONCE];
    int64_t count = 0;
    size_t waiting = 0;

    if (next < end && *next == ']') {
        *at = next + 1;
        return 0;
    }
    for (;;) {
        if (next >= end || *next++ != '"')
            return -1;
        struct word *word = words + waiting++;

        word->text = next;
        word->bytes = measured(next, end, &word->hash);
        next += word->bytes + 1;
        if (next >= end)
            return -1;
        __builtin_prefetch(names->at + (word->hash & (names->places - 1)));
        char behind = *next++;

        if (waiting == AT_ONCE || behind == ']') {
            if (look_up(names, words, waiting, rows + count) != 0)
                return -1;
            count += (int64_t)waiting;
            waiting = 0;
        }
        if (behind == ']') {
            *at = next;
            return count;
        }
        if (behind != ',')
            return -1;
    }
}

int64_t vc_names_offered(const struct vc_names *names, const char *body, size_t bytes, int64_t *rows, size_t *from, size_t *to)
{
    const char *end = body + bytes, *at = after_space(body, end);
    int64_t found = -1;

    if (at >= end || *at != '{')
        return -1;
    do {
        const char *key = after_space(at + 1, end);

        if (key >= end || *key != '"')
            return -1;
        at = after_string(++key, end);
        if (at == NULL)
            return -1;
        bool wanted = at - key == sizeof KEY && strncasecmp(key, KEY, sizeof KEY - 1) == 0;

        at = after_space(at, end);
        if (at >= end || *at != ':')
            return -1;
        at = after_space(at + 1, end);
        if (wanted) {
            if (found >= 0 || at >= end || *at != '[')
                return -1;
            *from = (size_t)(at - body);
            found = read_names(names, &at, end, rows);
            if (found < 0)
                return -1;
            *to = (size_t)(at - body);
            at = after_space(at, end);
        } else {
            at = after_value(at, end);
        }
        if (at == NULL || at >= end)
            return -1;
    } while (*at == ',');
    return *at == '}' ? found : -1;
}
