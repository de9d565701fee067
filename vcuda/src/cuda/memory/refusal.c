/* Why an allocation was refused, in one line on stderr: a program's own message says no more than "out of memory". */
#include "cuda/memory/refusal.h"

#include <stdio.h>

#include "base/log.h"
#include "region/quota.h"
#include "region/slot.h"

enum { VC__AMOUNT_CHARACTERS = 32 };

static const char *amount(char text[VC__AMOUNT_CHARACTERS], uint64_t bytes)
{
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    double value = (double)bytes;
    size_t unit = 0;
    for (; value >= 1024 && unit + 1 < sizeof units / sizeof *units; unit++)
        value /= 1024;
    snprintf(text, VC__AMOUNT_CHARACTERS, "%.5g %s", value, units[unit]);
    return text;
}

/* What the driver says is free on the card itself: a full card is another matter than a full share. Only a current context can ask. */
static bool free_on_card(uint32_t card, uint64_t *bytes)
{
    size_t free_bytes, total_bytes;
    if (vc_card_of_current(NULL) != (int)card || !vc_real.cuMemGetInfo_v2 ||
        vc_real.cuMemGetInfo_v2(&free_bytes, &total_bytes) != CUDA_SUCCESS)
        return false;
    *bytes = free_bytes;
    return true;
}

static uint64_t left(uint32_t number)
{
    const struct vc_card *card = vc_card(number);
    uint64_t limit = vc_quota_limit(card->region, card->index), used = vc_quota_used(card->region, card->index);
    return limit > used ? limit - used : 0;
}

static void explain(uint32_t fullest, uint64_t bytes)
{
    const struct vc_card *card = vc_card(fullest);
    char asked[VC__AMOUNT_CHARACTERS], limit[VC__AMOUNT_CHARACTERS], used[VC__AMOUNT_CHARACTERS], overhead[VC__AMOUNT_CHARACTERS];
    char physical[VC__AMOUNT_CHARACTERS + 32] = "", on_card[VC__AMOUNT_CHARACTERS + 32] = "", number[VC__AMOUNT_CHARACTERS];
    struct vc_card_view view;
    vc_limits_read(card->region->limits, card->index, &view);
    if (view.flags & VC_CARD_OVERSELL)
        snprintf(physical, sizeof physical, " (%s on the card)", amount(number, view.physical_bytes));
    uint64_t free_bytes;
    if (free_on_card(fullest, &free_bytes))
        snprintf(on_card, sizeof on_card, "; the card itself has %s free", amount(number, free_bytes));
    vc_log_once(VC_NOTICE_REFUSED,
                "refused %s of GPU memory: limit %s%s, %s in use by this container (%s of it overhead)%s; MemoryRefused, said once in a process",
                bytes ? amount(asked, bytes) : "an unknown amount", amount(limit, view.memory_bytes), physical,
                amount(used, vc_quota_used(card->region, card->index)), amount(overhead, view.overhead_bytes), on_card);
}

void vc_refused(vc_cards cards, uint64_t bytes)
{
    static uint32_t told;
    uint32_t fullest = 0;
    VC_EACH_CARD(card, cards) {
        vc_quota_refused(vc_card(card)->region, vc_card(card)->index);
        if (!(cards >> fullest & 1) || left(card) < left(fullest))
            fullest = card;
    }
    /* What refuses for another reason than the limit has a notice of its own. */
    struct vc_region *region = vc_card(fullest)->region;
    if (cards == 0 || (cards & VC_LOST_CARDS) || region->state != VC_REGION_ENFORCED || vc_load_relaxed(&region->damaged) ||
        !vc_region_slot(region))
        return;
    if (__atomic_exchange_n(&told, 1, __ATOMIC_RELAXED) != 0)
        return;
    if (vc_load_relaxed(&region->limits->flags) & VC_LIMITS_REFUSED)
        vc_log_once(VC_NOTICE_REFUSED, "refused GPU memory: gpu-manager gives this container no more, because it bypasses its limits; "
                                       "the events of its pod say how");
    else if (vc_quota_limit(region, vc_card(fullest)->index) != UINT64_MAX)
        explain(fullest, bytes);
}
