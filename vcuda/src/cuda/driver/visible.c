/* CUDA_VISIBLE_DEVICES within a share: numbers count the share's cards.
 *
 * In a container the driver sees no others and counts as the tenant does. On a bare machine (`vcuda run`) it sees them all: there `0` set by
 * a program inside would be the machine's first card, which the share may not have. So numbers become UUIDs before the driver reads them. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda/driver/cards.h"

#define VC__VARIABLE "CUDA_VISIBLE_DEVICES="

static char chosen[sizeof VC__VARIABLE + VC_MAX_PROCESS_CARDS * (VC_UUID_BYTES + 1)] = VC__VARIABLE;

/* The UUID of the share's `wanted`th card in the order of the machine; NULL: it has not so many. */
static const char *uuid_of(const struct vc_regions *regions, long wanted)
{
    const struct vc_card *cards = regions->cards;
    for (uint32_t card = 0; card < regions->card_count; card++) {
        long before = 0;
        for (uint32_t other = 0; other < regions->card_count; other++)
            before += cards[other].limit->minor < cards[card].limit->minor ||
                      (cards[other].limit->minor == cards[card].limit->minor && other < card);
        if (before == wanted)
            return cards[card].limit->uuid;
    }
    return NULL;
}

/* False: it names cards otherwise than by numbers. The list ends at the first number that is no card, as the driver has it. */
static bool choose(const struct vc_regions *regions, const char *numbers)
{
    char *end = chosen + strlen(VC__VARIABLE), *after;
    for (;; numbers = after + 1) {
        long number = strtol(numbers, &after, 10);
        if (after == numbers || (*after && *after != ','))
            return false;
        const char *uuid = end - chosen < (ptrdiff_t)(sizeof chosen - VC_UUID_BYTES - 2) ? uuid_of(regions, number) : NULL;
        if (uuid && end[-1] != '=')
            *end++ = ',';
        if (uuid)
            end = stpcpy(end, uuid);
        if (!uuid || !*after)
            break;
    }
    if (end[-1] == '=')
        strcpy(end, "-1"); /* none */
    return true;
}

static void translate(void)
{
    const struct vc_regions *regions = vc_regions_get();
    bool all_known = regions->card_count > 0 && !regions->lost;
    for (char **variable = environ; all_known && variable && *variable; variable++) {
        if (strncmp(*variable, VC__VARIABLE, strlen(VC__VARIABLE)) == 0 && choose(regions, *variable + strlen(VC__VARIABLE)))
            *variable = chosen;
    }
}

CUresult vc_hook_cuInit(unsigned int flags)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, translate);
    return vc_real.cuInit(flags);
}
