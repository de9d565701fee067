/* The few members of a JSON text that are kept: to make Python's objects of a whole pod costs more than to decide for it.
 *
 * What is left out is checked as a parser checks it, so that no text means one thing here and another there. What a
 * parser could take in two ways, or what is rare, is not read here at all: the caller has the whole text parsed. */
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler/scheduler.h"
#include "scheduler/text.h"

#define MOST_DEPTH 64
#define MOST_MEMBERS 128
#define MOST_BESIDE 32 /* bits of what has been seen of an object */
#define MOST_SLOTS 16
#define MOST_DIGITS 18 /* fits 64 bits, whatever the sign */

struct member {
    char *name;
    size_t bytes;
    enum vc_way way;
    int slot;
    int first, next; /* what is within it, and what is beside it; 0: nothing, since that is the root */
};

struct vc_kept {
    struct member members[MOST_MEMBERS];
    int count;
};

struct vc_kept *vc_kept_new(int only)
{
    struct vc_kept *kept = calloc(1, sizeof *kept);

    if (kept != NULL) {
        kept->count = 1;
        kept->members[0].way = only ? VC_ONLY : VC_WITHIN;
    }
    return kept;
}

void vc_kept_free(struct vc_kept *kept)
{
    for (int each = 0; each < kept->count; each++)
        free(kept->members[each].name);
    free(kept);
}

int vc_kept_add(struct vc_kept *kept, int within, const char *name, size_t bytes, int way, int slot)
{
    int place = kept->count, beside = 0;

    for (int each = kept->members[within].first; each; each = kept->members[each].next)
        beside++;
    if (place == MOST_MEMBERS || beside == MOST_BESIDE || slot >= MOST_SLOTS)
        return -1;
    struct member *fresh = kept->members + place;

    *fresh = (struct member){malloc(bytes + 1), bytes, (enum vc_way)way, slot, 0, kept->members[within].first};
    if (fresh->name == NULL)
        return -1;
    memcpy(fresh->name, name, bytes);
    kept->members[within].first = place;
    return kept->count++;
}

struct reader {
    const struct member *members;
    const char *at, *end;
    const char *hole, *behind; /* what somebody else has read */
    char *out;
    struct slot {
        const char *begin;
        size_t bytes;
    } slots[MOST_SLOTS];
};

static void skip_space(struct reader *reader)
{
    while (reader->at < reader->end && (*reader->at == ' ' || *reader->at == '\t' || *reader->at == '\n' || *reader->at == '\r'))
        reader->at++;
}

static bool comes(const struct reader *reader, char what)
{
    return reader->at < reader->end && *reader->at == what;
}

/* Whether this comes; it is left behind then. */
static bool took(struct reader *reader, char what)
{
    bool there = comes(reader, what);

    reader->at += there;
    return there;
}

static int digit_of(char one)
{
    if (one >= '0' && one <= '9')
        return one - '0';
    one |= 0x20;
    return one >= 'a' && one <= 'f' ? one - 'a' + 10 : -1;
}

/* Leave behind what follows a backslash. Halves of characters (UTF-16) are for a whole parser. */
static bool read_escape(struct reader *reader)
{
    int code = 0;

    if (!took(reader, 'u')) {
        bool known = reader->at < reader->end && memchr("\"\\/bfnrt", *reader->at, 8) != NULL;

        reader->at += known;
        return known;
    }
    for (int each = 0; each < 4; each++) {
        int digit = reader->at < reader->end ? digit_of(*reader->at++) : -1;

        if (digit < 0)
            return false;
        code = 16 * code + digit;
    }
    return code < 0xd800 || code > 0xdfff;
}

/* Leave a string behind; whether it is one, of ASCII alone: a whole parser knows UTF-8. */
static bool read_string(struct reader *reader, bool *escaped)
{
    *escaped = false;
    if (!took(reader, '"'))
        return false;
    for (;;) {
        reader->at = vc_text_after_plain(reader->at, reader->end);
        if (took(reader, '"'))
            return true;
        if (!took(reader, '\\') || !read_escape(reader))
            return false;
        *escaped = true;
    }
}

/* A whole number that no parser takes for another one. */
static bool read_number(struct reader *reader)
{
    took(reader, '-');
    const char *begin = reader->at;

    while (reader->at < reader->end && *reader->at >= '0' && *reader->at <= '9')
        reader->at++;
    ptrdiff_t digits = reader->at - begin;

    /* A fraction or an exponent is seen as what should not follow a value. */
    return digits > 0 && digits <= MOST_DIGITS && (digits == 1 || *begin != '0');
}

static bool read_word(struct reader *reader, const char *word)
{
    size_t bytes = strlen(word);
    bool there = (size_t)(reader->end - reader->at) >= bytes && memcmp(reader->at, word, bytes) == 0;

    reader->at += there ? bytes : 0;
    return there;
}

/* Leave a key and its colon behind. */
static bool read_key(struct reader *reader, bool *escaped)
{
    skip_space(reader);
    if (!read_string(reader, escaped))
        return false;
    skip_space(reader);
    return took(reader, ':');
}

/* Behind a member of an object or list: whether there is another one. Wrong: anything but a comma or the end. */
enum more { WRONG = -1, NO, YES };

static enum more more_before(struct reader *reader, char close)
{
    skip_space(reader);
    if (took(reader, ','))
        return YES;
    return took(reader, close) ? NO : WRONG;
}

/* Leave behind the bracket that begins an object or list; whether it has members. */
static enum more begins(struct reader *reader, char close)
{
    reader->at++;
    skip_space(reader);
    return took(reader, close) ? NO : YES;
}

/* Leave any value behind; whether it is one. */
static bool read_value(struct reader *reader, int depth)
{
    bool escaped;

    skip_space(reader);
    if (reader->at == reader->hole) {
        reader->at = reader->behind;
        return true;
    }
    if (reader->at >= reader->end || depth > MOST_DEPTH)
        return false;
    switch (*reader->at) {
    case '"':
        return read_string(reader, &escaped);
    case 't':
        return read_word(reader, "true");
    case 'f':
        return read_word(reader, "false");
    case 'n':
        return read_word(reader, "null");
    case '{':
    case '[':
        break;
    default:
        return read_number(reader);
    }
    bool object = *reader->at == '{';
    char close = object ? '}' : ']';
    enum more more = begins(reader, close);

    while (more == YES) {
        if ((object && !read_key(reader, &escaped)) || !read_value(reader, depth + 1))
            return false;
        more = more_before(reader, close);
    }
    return more == NO;
}

static void put(struct reader *reader, const char *text, size_t bytes)
{
    memcpy(reader->out, text, bytes);
    reader->out += bytes;
}

static bool copy_value(struct reader *reader, int depth)
{
    skip_space(reader);
    const char *begin = reader->at;
    bool valid = read_value(reader, depth);

    put(reader, begin, (size_t)(reader->at - begin));
    return valid;
}

static bool read_slot(struct reader *reader, int slot)
{
    bool escaped;
    const char *begin = reader->at + 1;

    if (!read_string(reader, &escaped))
        return false;
    reader->slots[slot] = (struct slot){begin, (size_t)(reader->at - begin) - 1};
    return reader->slots[slot].bytes > 0;
}

static bool read_object(struct reader *reader, const struct member *within, int depth);

/* Of a list what is kept of each object in it; by VC_NAMING those of its members that say a text, whole. */
static bool read_list(struct reader *reader, const struct member *list, int depth)
{
    const struct member *said = list->way == VC_NAMING ? reader->members + list->first : NULL;
    enum more more = begins(reader, ']');
    bool first = true;

    put(reader, "[", 1);
    for (; more == YES; more = more_before(reader, ']')) {
        char *before = reader->out;

        if (!first)
            put(reader, ",", 1);
        skip_space(reader);
        const char *begin = reader->at;
        bool valid = said == NULL && comes(reader, '{') ? read_object(reader, list, depth + 1) : copy_value(reader, depth + 1);

        if (!valid)
            return false;
        size_t bytes = (size_t)(reader->at - begin);

        /* What is escaped may say it, too. */
        if (said != NULL && memmem(begin, bytes, said->name, said->bytes) == NULL && memchr(begin, '\\', bytes) == NULL)
            reader->out = before;
        else
            first = false;
    }
    put(reader, "]", 1);
    return more == NO;
}

static bool read_kept(struct reader *reader, const struct member *member, int depth)
{
    if ((member->way == VC_WITHIN || member->way == VC_ONLY) && comes(reader, '{'))
        return read_object(reader, member, depth);
    if ((member->way == VC_EACH || member->way == VC_NAMING) && comes(reader, '['))
        return read_list(reader, member, depth);
    return copy_value(reader, depth);
}

/* Of an object what is kept. A key that is there twice, or written in an unusual way, is for a whole parser. */
static bool read_object(struct reader *reader, const struct member *within, int depth)
{
    enum more more = begins(reader, '}');
    uint32_t seen = 0;
    bool first = true;

    put(reader, "{", 1);
    for (; more == YES; more = more_before(reader, '}')) {
        bool escaped;

        skip_space(reader);
        const char *key = reader->at;

        if (!read_key(reader, &escaped) || escaped)
            return false;
        const char *name = key + 1, *close = memchr(name, '"', (size_t)(reader->at - name));
        size_t bytes = (size_t)(close - name);
        uint32_t bit = 1;
        int place = within->first;

        for (; place; place = reader->members[place].next, bit <<= 1)
            if (reader->members[place].bytes == bytes && memcmp(reader->members[place].name, name, bytes) == 0)
                break;
        const struct member *member = reader->members + place;

        if (place == 0 || member->way == VC_UNREAD) {
            if ((place == 0 && within->way == VC_ONLY) || seen & (place ? bit : 0) || !read_value(reader, depth + 1))
                return false;
            seen |= place ? bit : 0;
            continue;
        }
        if (seen & bit)
            return false;
        seen |= bit;
        skip_space(reader);
        if (member->way == VC_SLOT) {
            if (!read_slot(reader, member->slot))
                return false;
            continue;
        }
        if (!first)
            put(reader, ",", 1);
        first = false;
        put(reader, key, (size_t)(close + 1 - key));
        put(reader, ":", 1);
        if (!read_kept(reader, member, depth + 1))
            return false;
    }
    put(reader, "}", 1);
    return more == NO;
}

int64_t vc_kept_read(const struct vc_kept *kept, const char *text, size_t bytes, size_t from, size_t to, int slots, char *rest)
{
    struct reader reader = {
        .members = kept->members, .at = text, .end = text + bytes, .out = rest,
        .hole = from < to ? text + from : NULL, .behind = text + to,
    };

    skip_space(&reader);
    if (!comes(&reader, '{') || !read_object(&reader, kept->members, 1))
        return -1;
    skip_space(&reader);
    if (reader.at != reader.end)
        return -1;
    for (int slot = 0; slot < slots; slot++) {
        put(&reader, "\n", 1);
        if (reader.slots[slot].bytes > 0)
            put(&reader, reader.slots[slot].begin, reader.slots[slot].bytes);
    }
    return reader.out - rest;
}
