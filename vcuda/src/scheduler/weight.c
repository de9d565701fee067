/* What Python's objects of a JSON text take: up to fifty times its bytes, if it is made for that. So it is known before they are made.
 *
 * Each figure is the most that one thing takes: its object, a parser's note of it, and its place in what holds it. */
#include "scheduler/scheduler.h"
#include "scheduler/text.h"

#define LIST 80      /* an object with its head for the garbage collector, and the note */
#define EMPTY 80     /* the same of a dictionary, which has a table for its first member */
#define TABLE 120
#define TEXT 80      /* a string; its characters come beside, the widest for all if one is beyond ASCII */
#define WIDEST 4
#define NUMBER 32
#define MEMBER 24    /* behind a comma: a place in a list, and the note */
#define KEY 56       /* a place in a dictionary that is half empty, and the note */
#define MENDED 512   /* what has to be taken out of a text that no parser takes is copied in pieces (vcuda/kube/nesting.py): that takes time, too */
#define DEPTH 64     /* beyond this it may have to be */

/* Behind the string that begins there; `weight` grows by what it takes. */
static const char *weigh_string(const char *at, const char *end, int64_t *weight)
{
    const char *begin = at;
    bool wide = false;

    *weight += TEXT;
    for (;;) {
        at = vc_text_after_plain(at, end);
        if (at == end || *at == '"')
            break;
        wide |= *at != '\\';
        if (*at++ == '\\' && at < end) {
            if (*at == 'u') {
                wide = true;
                if (end - at > 1 && (at[1] | 0x20) == 'd') /* it may be half of a pair */
                    *weight += MENDED;
            }
            at++;
        }
    }
    *weight += (at - begin) * (wide ? WIDEST : 1);
    return at + (at < end);
}

static bool in_number(char one)
{
    return (one >= '0' && one <= '9') || one == '-' || one == '+' || one == '.' || (one | 0x20) == 'e';
}

int64_t vc_json_weight(const char *text, size_t bytes)
{
    const char *at = text, *end = text + bytes;
    int64_t weight = (int64_t)bytes, depth = 0; /* a parser copies it */

    while (at < end) {
        char one = *at++;

        switch (one) {
        case '"':
            at = weigh_string(at, end, &weight);
            break;
        case '{':
        case '[':
            weight += one == '[' ? LIST : at < end && *at == '}' ? EMPTY : EMPTY + TABLE;
            weight += ++depth > DEPTH ? MENDED : 0;
            break;
        case '}':
        case ']':
            depth--;
            break;
        case ',':
            weight += MEMBER;
            break;
        case ':':
            weight += KEY;
            break;
        default:
            if (one == '-' || (one >= '0' && one <= '9')) {
                weight += NUMBER;
                while (at < end && in_number(*at))
                    at++;
            }
        }
    }
    return weight;
}
