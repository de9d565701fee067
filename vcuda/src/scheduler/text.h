/* What both readers of JSON here ask of the bytes of a string. */
#ifndef VC_SCHEDULER_TEXT_H
#define VC_SCHEDULER_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define VC_EACH_BYTE UINT64_C(0x0101010101010101)

static inline bool vc_text_is_plain(char one)
{
    return (unsigned char)one >= 0x20 && (unsigned char)one < 0x80 && one != '"' && one != '\\';
}

/* Behind the bytes of ASCII that mean themselves in a string, eight at a time. */
static inline const char *vc_text_after_plain(const char *at, const char *end)
{
    for (; end - at >= (ptrdiff_t)sizeof(uint64_t); at += sizeof(uint64_t)) {
        uint64_t part;

        memcpy(&part, at, sizeof part);
        uint64_t quotes = part ^ VC_EACH_BYTE * '"', escapes = part ^ VC_EACH_BYTE * '\\';
        /* The top bit of each byte that is not plain. A borrow may set it in a byte above one of those, never below. */
        uint64_t others = (quotes - VC_EACH_BYTE) | (escapes - VC_EACH_BYTE) | (part - VC_EACH_BYTE * 0x20) | part;

        others &= VC_EACH_BYTE << 7;
        if (others)
            return at + __builtin_ctzll(others) / 8;
    }
    while (at < end && vc_text_is_plain(*at))
        at++;
    return at;
}

#endif
