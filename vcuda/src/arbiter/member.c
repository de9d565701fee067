/* Reading a tenant's usage without trusting it, and writing its grants word by word. */
#include "arbiter/member.h"

#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "region/charged.h"
#include "region/share.h"
#include "region/slot.h"

static const uint64_t RING_WINDOW_NS = 10000000;
static const uint32_t RINGS_PER_WINDOW = 100;
static const uint64_t BEAT_NS = 5000000;
/* Whose bell is heard needs no looking at; but a tenant that saw no heartbeat started without ringing it. */
static const uint64_t LISTENED_AGE_NS = 1000000000;
/* A tenant that can't be heard is looked at: often after it did something, else rarely, because many cost much. */
static const uint64_t RECENTLY_NS = 1000000000;
static const uint64_t LOOK_OFTEN_NS = 500000;
static const uint64_t LOOK_RARELY_NS = 20000000;

/* What processes tell by their locks is asked for so often, and takes so small a part of the time at most. */
static const uint64_t TOLD_AGE_NS = 10000000;
/* … and so soon after the last time where somebody rang: who begins on an idle card does. */
static const uint64_t TOLD_SOON_NS = 1000000;
static const uint64_t TOLD_COST = 100;
/* A process that closes its own says so in the file, and lets go of its lock within that. */
static const uint64_t HIDES_AFTER_NS = 1500000;

static void withdraw(struct vc_member *member)
{
    vc_store_release(&member->limits->arbiter_heartbeat_ns, 0);
    for (uint32_t card = 0; card < member->card_count; card++) {
        struct vc_card_limit *limit = &member->limits->cards[card];
        vc_store_release(&limit->lease_end_ns, 0);
        vc_store_release(&limit->lease_sequence, 0);
        vc_store_release(&limit->granted_ppm, 0);
        vc_store_release(&limit->closed_until_ns, 0);
        vc_store_release(&limit->saved_ns, 0);
        vc_add(&limit->grant_futex, 1);
        syscall(SYS_futex, &limit->grant_futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

struct vc_member *vc_member_open(const char *name, const char *limits_path, const char *usage_path,
                                 struct vc_error *error)
{
    struct vc_header header;
    if (strlen(name) >= VC_MEMBER_NAME_BYTES) {
        vc_fail(error, "the name of a region has at most %d bytes: %.40s…", VC_MEMBER_NAME_BYTES - 1, name);
        return NULL;
    }
    struct vc_member *member = calloc(1, sizeof *member);
    if (!member) {
        vc_fail(error, "no memory for region %s", name);
        return NULL;
    }
    member->usage_descriptor = -1;
    snprintf(member->name, sizeof member->name, "%s", name);
    member->limits = vc_limits_map_writable(limits_path, error);
    if (member->limits && vc_limits_valid(member->limits, error))
        member->usage_descriptor = vc_file_open(usage_path, VC_KIND_USAGE, O_RDONLY | O_NOFOLLOW, &header, error);
    if (member->usage_descriptor < 0) {
        if (member->limits)
            munmap(member->limits, VC_LIMITS_FILE_BYTES);
        free(member);
        return NULL;
    }
    member->card_count = member->limits->card_count;
    void *mapping = mmap(NULL, VC_USAGE_FILE_BYTES, PROT_READ, MAP_SHARED, member->usage_descriptor, 0);
    member->usage_mapping = mapping == MAP_FAILED ? NULL : mapping;
    withdraw(member);
    return member;
}

void vc_member_close(struct vc_member *member)
{
    withdraw(member);
    munmap(member->limits, VC_LIMITS_FILE_BYTES);
    if (member->usage_mapping)
        munmap(member->usage_mapping, VC_USAGE_FILE_BYTES);
    close(member->usage_descriptor);
    free(member);
}

uint64_t vc_member_age_limit(const struct vc_member *member, uint64_t now_ns)
{
    if (member->listened || member->watched)
        return LISTENED_AGE_NS;
    return now_ns - member->active_ns < RECENTLY_NS ? LOOK_OFTEN_NS : LOOK_RARELY_NS;
}

bool vc_member_due(const struct vc_member *member, uint64_t now_ns)
{
    return member->rang || member->active_ns >= member->read_ns || (member->unheard && now_ns >= member->told_soon_ns) ||
           now_ns - member->read_ns >= vc_member_age_limit(member, now_ns);
}

/* A process that is gone was alive until now at the latest, where the last look did not find it gone already. Where that found it alive it ended in
 * between, as far as anybody knows in the middle. */
static void look_for_the_living(struct vc_member *member, uint32_t card, uint64_t last_ns, uint64_t now_ns)
{
    bool alive = false;
    member->open[card] = 0;
    for (uint32_t slot = 0; slot < VC_MAX_SLOTS; slot++) {
        uint64_t bit = UINT64_C(1) << slot % 64, *gone = &member->gone_slots[card][slot / 64], *living = &member->living_slots[card][slot / 64];
        bool open = member->cards[card].open_slots[slot / 64] & bit, lives = open && vc_slot_locked(member->usage_descriptor, slot);
        bool ends = open && !lives && !(*gone & bit);
        member->open[card] += lives;
        alive = alive || lives || ends;
        if (ends || (lives && vc_load_relaxed(&member->limits->ended_ns[slot]) != 0))
            vc_store_relaxed(&member->limits->ended_ns[slot], lives ? 0 : *living & bit ? now_ns - (now_ns - last_ns) / 2 : now_ns);
        *gone = open && !lives ? *gone | bit : *gone & ~bit;
        *living = lives ? *living | bit : *living & ~bit;
    }
    if (alive)
        vc_store_relaxed(&member->limits->cards[card].alive_ns, now_ns);
}

static void nobody_is_open(struct vc_member *member, uint32_t card)
{
    member->open[card] = 0;
    member->living_slots[card][0] = member->living_slots[card][1] = 0;
}

/* The latest of what processes say that the card was, when it was asked for what stopped siblings left. */
static uint64_t latest_asked(const struct vc_member *member, uint32_t card, enum vc_charged_time kind)
{
    uint64_t latest = 0;
    for (uint32_t slot = 0; slot < member->told_slots[card]; slot++)
        latest = vc_later(latest, vc_charged_time(member->usage_descriptor, slot, card, kind));
    return latest;
}

static void listen_to_answers(struct vc_member *member, uint32_t card)
{
    uint64_t *last = member->asked_ns[card], now[2] = {latest_asked(member, card, VC_CHARGED_FREE), latest_asked(member, card, VC_CHARGED_BUSY)};
    unsigned first = now[1] < now[0];
    for (unsigned i = 0; i < 2; i++) {
        unsigned busy = i == 0 ? first : !first;
        if (now[busy] > last[busy])
            vc_stood_asked(&member->stood[card], now[busy], busy);
        last[busy] = now[busy];
    }
}

static uint64_t others_ns(const struct vc_member *member, uint32_t card)
{
    return vc_load_relaxed(&member->limits->cards[card].others_gpu_ns);
}

/* When the process of a slot ended that told `until_ns` last, and whose successor tells since `since_ns`, if there is one. */
static uint64_t ended_at(const struct vc_member *member, uint32_t slot, uint64_t until_ns, uint64_t since_ns)
{
    uint64_t ended = vc_load_relaxed(&member->limits->ended_ns[slot]);
    ended = ended > until_ns ? ended : member->read_ns;
    return since_ns > until_ns && since_ns < ended ? since_ns : ended;
}

static void listen_to_open(struct vc_member *member, uint32_t card, uint32_t slot)
{
    const struct vc_stood_slot *known = &member->stood[card].slots[slot];
    uint64_t until = vc_charged_time(member->usage_descriptor, slot, card, VC_CHARGED_UNTIL);
    if (until == known->until_ns)
        return;
    uint64_t since = vc_charged_time(member->usage_descriptor, slot, card, VC_CHARGED_SINCE);
    if (since != known->since_ns || (until == 0 && member->stood[card].hides)) /* … or a sibling took over its other locks */
        vc_stood_ends(&member->stood[card], slot, ended_at(member, slot, known->until_ns, since), member->read_ns, member->told_ns[card], others_ns(member, card));
    vc_stood_tells(&member->stood[card], slot, since, until);
}

static void look_at_standing(struct vc_member *member, uint32_t card, uint64_t now_ns)
{
    vc_stood_look(&member->stood[card], now_ns, member->told_ns[card], others_ns(member, card));
}

/* Who has work on the card and says nothing stands still. */
static void look_for_standing(struct vc_member *member, uint32_t card, uint64_t now_ns)
{
    struct vc_stood *stood = &member->stood[card];
    for (uint32_t slot = 0; slot < member->told_slots[card]; slot++)
        listen_to_open(member, card, slot);
    look_at_standing(member, card, now_ns);
    if (stood->standing != 0) /* what passed is known by now: what it was excused is counted */
        listen_to_answers(member, card);
}

/* Slot by slot: others, that have nothing there, may say that they have. */
static bool is_hidden(const struct vc_member *member, uint32_t card)
{
    const struct vc_stood *stood = &member->stood[card];
    for (uint32_t slot = 0; stood->open != 0 && slot < VC_MAX_SLOTS; slot++) {
        bool said = member->living_slots[card][slot / 64] >> slot % 64 & 1;
        if (stood->slots[slot].until_ns != 0 && !said)
            return true;
    }
    return false;
}

/* Whether processes have work on the card of which the file says nothing; they may have told that it is over since. Such a one is looked at each time, as it may be killed soon. */
static void look_for_hidden(struct vc_member *member, uint32_t card, uint64_t now_ns)
{
    struct vc_stood *stood = &member->stood[card];
    bool may_hide = is_hidden(member, card);
    stood->hidden = stood->hidden && may_hide;
    if (may_hide) {
        for (uint32_t slot = 0; slot < VC_MAX_SLOTS; slot++)
            if (stood->slots[slot].until_ns != 0)
                listen_to_open(member, card, slot);
        stood->hidden = is_hidden(member, card);
    }
    uint64_t *since = &member->hidden_since_ns[card];
    *since = !stood->hidden ? 0 : *since != 0 ? *since : now_ns;
    stood->hides = stood->hidden && now_ns > *since + HIDES_AFTER_NS;
    if (stood->hidden)
        look_at_standing(member, card, now_ns);
}

/* What its processes found together, each of which may end before it is sure. */
static void add_found(struct vc_member *member, uint32_t card, uint64_t now_ns, int64_t found_ns)
{
    struct vc_samples *found = &member->found[card];
    struct vc_card_limit *limit = &member->limits->cards[card];
    vc_samples_hear(found, now_ns, found_ns, (uint64_t)limit->core_limit * VC_PPM_PER_CORE);
    vc_store_relaxed(&limit->doubt, found->doubt);
    vc_store_relaxed(&limit->all_for_ns, found->all_for_ns);
    vc_store_relaxed(&limit->all_until_ns, found->all_until_ns);
}

/* A process's begins anew in its slot. */
static bool listen_to_locks(struct vc_member *member, uint32_t card, uint64_t now_ns)
{
    bool more = false;
    int64_t found = 0;
    member->told_slots[card] = vc_charged_slots(member->usage_descriptor, member->told_slots[card], card);
    for (uint32_t slot = 0; slot < member->told_slots[card]; slot++) {
        struct vc_samples_told *last = &member->slot_told[card][slot], told = {.charged_ns = vc_charged_read(member->usage_descriptor, slot, card)};
        for (unsigned less = 0; less < 2; less++)
            *(less ? &told.less_ns : &told.more_ns) = vc_charged_found(member->usage_descriptor, slot, card, less);
        more = more || told.charged_ns > last->charged_ns;
        member->told_ns[card] += told.charged_ns >= last->charged_ns ? told.charged_ns - last->charged_ns : told.charged_ns;
        found += vc_samples_found(last, told);
    }
    if (found != 0)
        add_found(member, card, now_ns, found);
    return more;
}

/* Who works does something, whatever its file says. */
static void listen_to_charges(struct vc_member *member, uint64_t now_ns, bool rang)
{
    member->unheard = member->unheard || rang;
    if (now_ns < (member->unheard ? member->told_soon_ns : member->told_next_ns))
        return;
    bool more = false;
    uint64_t began = vc_now_ns(), next = UINT64_MAX;
    member->unheard = false;
    for (uint32_t card = 0; card < member->card_count; card++) {
        more = listen_to_locks(member, card, now_ns) || more;
        look_for_standing(member, card, now_ns);
        more = more || member->stood[card].open != 0;
        next = vc_earlier(next, vc_stood_next(&member->stood[card], now_ns));
    }
    member->news += more;
    member->active_ns = more ? now_ns : member->active_ns;
    uint64_t rest = (vc_now_ns() - began) * TOLD_COST; /* locks without end make each question slow */
    member->told_next_ns = vc_later(vc_earlier(now_ns + TOLD_AGE_NS, next), now_ns + TOLD_SOON_NS) + rest;
    member->told_soon_ns = now_ns + TOLD_SOON_NS + rest;
}

void vc_member_read(struct vc_member *member, uint64_t now_ns)
{
    size_t bytes = member->card_count * sizeof member->cards[0];
    struct vc_card_usage before[VC_MAX_CARDS];
    memcpy(before, member->cards, bytes);
    uint64_t last_ns = member->read_ns;
    bool rang = member->rang;
    ssize_t got = pread(member->usage_descriptor, member->cards, bytes, offsetof(struct vc_usage, cards));
    member->read_ns = now_ns;
    member->rang = false;
    member->short_file = got != (ssize_t)bytes;
    if (member->short_file)
        memset(member->cards, 0, bytes);
    member->news += memcmp(before, member->cards, bytes) != 0;
    listen_to_charges(member, now_ns, rang);
    if (now_ns - member->ring_window_ns > RING_WINDOW_NS) {
        member->ring_window_ns = now_ns;
        member->rings = 0;
    }
    for (uint32_t card = 0; card < member->card_count; card++) {
        if (member->cards[card].wake_futex != member->last_ring[card])
            member->rings++;
        member->last_ring[card] = member->cards[card].wake_futex;
        if (member->cards[card].open_slots[0] | member->cards[card].open_slots[1])
            look_for_the_living(member, card, last_ns, now_ns);
        else
            nobody_is_open(member, card);
        look_for_hidden(member, card, now_ns);
    }
}

bool vc_member_heard(const struct vc_member *member)
{
    return member->usage_mapping && !member->short_file && member->rings < RINGS_PER_WINDOW;
}

const uint32_t *vc_member_bell(const struct vc_member *member, uint32_t card)
{
    const char *base = member->usage_mapping;
    return (const uint32_t *)(base + offsetof(struct vc_usage, cards) + card * sizeof(struct vc_card_usage) +
                              offsetof(struct vc_card_usage, wake_futex));
}

void vc_member_observation(const struct vc_member *member, uint32_t card, struct vc_observation *seen)
{
    const struct vc_card_usage *usage = &member->cards[card];
    *seen = (struct vc_observation){
        .gpu_ns = usage->gpu_ns,
        .told_ns = member->told_ns[card],
        .credit_ns = usage->credit_ns,
        .credit_updated_ns = usage->credit_updated_ns,
        .refill_ns = usage->refill_ns,
        .waiting_until_ns = usage->waiting_until_ns,
        .predicted_finish_ns = usage->predicted_finish_ns,
        .began_ns = usage->began_ns,
        .open = member->stood[card].hidden ? member->stood[card].open : member->open[card],
        .hides = member->stood[card].hidden,
        .stood_ns = (int64_t)vc_stood_counts(&member->stood[card], member->read_ns),
    };
}

void vc_member_beat(struct vc_member *member, uint64_t now_ns)
{
    if (now_ns - member->heartbeat_ns < BEAT_NS)
        return;
    member->heartbeat_ns = now_ns;
    vc_store_release(&member->limits->arbiter_heartbeat_ns, now_ns);
}

void vc_member_write(struct vc_member *member, uint32_t card, const struct vc_tenant *tenant)
{
    struct vc_card_limit *limit = &member->limits->cards[card];
    vc_store_relaxed(&limit->granted_ppm, tenant->granted_ppm);
    vc_store_relaxed(&limit->closed_until_ns, tenant->closed_until_ns);
    vc_store_relaxed(&limit->told_ns, tenant->seen.told_ns);
    vc_store_relaxed(&limit->saved_ns, tenant->saved_ns);
    vc_store_relaxed(&limit->others_gpu_ns, tenant->others_gpu_ns);
    vc_store_relaxed(&limit->others_active_ns, tenant->others_active_ns);
    vc_store_relaxed(&limit->others_still_ns, tenant->others_still_ns);
    vc_store_relaxed(&limit->unsaid_ns, tenant->unsaid_ns);
    vc_store_relaxed(&limit->lease_start_ns, tenant->lease_start_ns);
    vc_store_relaxed(&limit->lease_clock_ns, tenant->lease_clock_ns);
    /* The end last but one: it says who holds the card. The sequence makes the tenant look at it at all. */
    vc_store_release(&limit->lease_end_ns, tenant->lease_end_ns);
    vc_store_release(&limit->lease_sequence, tenant->lease_sequence);
    if (!tenant->wake)
        return;
    vc_add(&limit->grant_futex, 1);
    syscall(SYS_futex, &limit->grant_futex, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}
