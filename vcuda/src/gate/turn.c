/* Whose turn it is within a container's lease: one shared word, the siblings' stamps and what they were served. */
#include "gate/turn.h"

#include "base/atomic.h"
#include "base/clock.h"

enum { OWNER_SHIFT = 48, TIME_UNIT_SHIFT = 10 };
static const uint64_t TIME_MASK = (UINT64_C(1) << OWNER_SHIFT) - 1;
/* It ends then, whatever its owner is predicted to have: that waits for something else than the card. */
static const uint64_t ANYBODYS = UINT64_C(1) << 63;

static uint32_t owner_of(uint64_t word)
{
    return (uint32_t)((word & ~ANYBODYS) >> OWNER_SHIFT) - 1;
}

/* Slot + 1 above, the end in units of 1024 ns below: nine years of uptime. */
static uint64_t pack(uint32_t slot, uint64_t end_ns)
{
    return (uint64_t)(slot + 1) << OWNER_SHIFT | (end_ns >> TIME_UNIT_SHIFT & TIME_MASK);
}

static uint32_t count(const struct vc_turns *turns)
{
    uint32_t used = vc_load_relaxed(turns->slots_used);
    return used <= VC_MAX_SLOTS ? used : VC_MAX_SLOTS;
}

static bool waits(const struct vc_turns *turns, uint32_t slot, uint64_t now_ns)
{
    return vc_load_relaxed(&turns->slots[slot].cards[turns->card].waiting_until_ns) > now_ns;
}

static uint64_t finish_of(const struct vc_turns *turns, uint32_t slot)
{
    return vc_load_relaxed(&turns->slots[slot].cards[turns->card].predicted_finish_ns);
}

static uint64_t *served(const struct vc_turns *turns, uint32_t slot)
{
    return &turns->slots[slot].cards[turns->card].served_ns;
}

/* The one that was served least of the siblings that wait, or have the turn; VC_MAX_SLOTS: there is none. */
static uint32_t least_served(const struct vc_turns *turns, uint32_t owner, uint64_t now_ns)
{
    uint32_t least = VC_MAX_SLOTS;
    for (uint32_t slot = 0; slot < count(turns); slot++)
        if (slot != turns->own && (slot == owner || waits(turns, slot, now_ns)) &&
            (least == VC_MAX_SLOTS || vc_load_relaxed(served(turns, slot)) < vc_load_relaxed(served(turns, least))))
            least = slot;
    return least;
}

static void come_back(struct vc_turns *turns, uint32_t owner, uint64_t now_ns)
{
    bool away = now_ns > turns->asked_ns + VC_TURN_AWAY_NS;
    turns->asked_ns = now_ns;
    uint32_t least = away ? least_served(turns, owner, now_ns) : VC_MAX_SLOTS;
    if (least != VC_MAX_SLOTS)
        vc_raise_to(served(turns, turns->own), vc_load_relaxed(served(turns, least)));
}

/* Siblings' work is kept apart, so that each one's can be measured; but a kernel that waits for a sibling's must not wait for
 * good, so its turn is over after another turn's time whatever it has on the card. */
static uint64_t free_at(const struct vc_turns *turns, uint32_t owner, uint64_t end_ns, uint64_t now_ns)
{
    uint64_t finish = finish_of(turns, owner);
    if (finish > end_ns + VC_TURN_LEAD_NS)
        return finish - VC_TURN_LEAD_NS < end_ns + VC_TURN_NS ? finish - VC_TURN_LEAD_NS : end_ns + VC_TURN_NS;
    bool idle = finish + VC_TURN_IDLE_NS < end_ns && !waits(turns, owner, now_ns);
    return idle ? finish + VC_TURN_IDLE_NS : end_ns;
}

struct vc_turn vc_turn_take(struct vc_turns *turns, uint64_t now_ns, uint64_t lease_start_ns, uint64_t lease_end_ns)
{
    struct vc_turn turn = {.mine = true, .end_ns = lease_end_ns};
    if (!turns->slots)
        return turn;
    uint64_t word = vc_load_acquire(&turns->usage->turn);
    uint32_t owner = owner_of(word);
    uint64_t end = (word & TIME_MASK) << TIME_UNIT_SHIFT;
    bool known = word != 0 && owner < VC_MAX_SLOTS && end < now_ns + 2 * VC_TURN_NS; /* the word may hold anything */
    bool ours = known && owner == turns->own;
    come_back(turns, known ? owner : VC_MAX_SLOTS, now_ns);
    uint32_t next = least_served(turns, VC_MAX_SLOTS, now_ns);
    turn.siblings_wait = next != VC_MAX_SLOTS;
    bool before_us = turn.siblings_wait && vc_load_relaxed(served(turns, next)) < vc_load_relaxed(served(turns, turns->own));
    if (ours && end > now_ns) {
        turn.end_ns = end < lease_end_ns ? end : lease_end_ns;
        return turn;
    }
    uint64_t free_since = known ? end : 0;
    if (known && !ours && !(word & ANYBODYS))
        free_since = free_at(turns, owner, end, now_ns);
    turn.mine = false;
    if (free_since > now_ns) {
        turn.end_ns = free_since;
        return turn;
    }
    /* Nobody could take it before the lease. */
    if (lease_start_ns > free_since && lease_start_ns <= now_ns)
        free_since = lease_start_ns;
    if (before_us && now_ns < free_since + VC_TURN_GRACE_NS) {
        turn.call_next = true;
        turn.end_ns = free_since + VC_TURN_GRACE_NS;
        return turn;
    }
    /* Or it would look idle until its first launch is known. */
    vc_raise_to(&turns->slots[turns->own].cards[turns->card].predicted_finish_ns, now_ns);
    uint64_t longest = now_ns + VC_TURN_NS;
    turn.end_ns = lease_end_ns < longest ? lease_end_ns : longest;
    if (!__atomic_compare_exchange_n(&turns->usage->turn, &word, pack(turns->own, turn.end_ns), false, __ATOMIC_ACQ_REL,
                                     __ATOMIC_ACQUIRE)) {
        turn.end_ns = now_ns + VC_TURN_IDLE_NS; /* a sibling was faster */
        return turn;
    }
    turn.mine = true;
    turn.clock_ns = !known || ours ? 0 : word & ANYBODYS ? end : finish_of(turns, owner);
    return turn;
}

bool vc_turn_shorten(const struct vc_turns *turns, uint64_t now_ns, uint64_t finish_ns)
{
    if (!turns->slots)
        return false;
    uint64_t word = vc_load_acquire(&turns->usage->turn);
    uint64_t end = finish_ns > now_ns + VC_TURN_LEAD_NS ? finish_ns - VC_TURN_LEAD_NS : now_ns;
    uint64_t shorter = pack(turns->own, end);
    bool ours = owner_of(word) == turns->own;
    uint64_t worthwhile = VC_TURN_LEAD_NS >> TIME_UNIT_SHIFT;
    return ours && shorter + worthwhile < (word & ~ANYBODYS) &&
           __atomic_compare_exchange_n(&turns->usage->turn, &word, shorter, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

bool vc_turn_is_anybodys(const struct vc_turns *turns, uint64_t now_ns, uint64_t from_ns)
{
    if (!turns->slots || least_served(turns, VC_MAX_SLOTS, now_ns) == VC_MAX_SLOTS)
        return false;
    uint64_t word = vc_load_acquire(&turns->usage->turn), anybodys = pack(turns->own, vc_later(from_ns, now_ns)) | ANYBODYS;
    return word != 0 && owner_of(word) == turns->own && (anybodys & ~ANYBODYS) < (word & ~ANYBODYS) &&
           __atomic_compare_exchange_n(&turns->usage->turn, &word, anybodys, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE);
}

enum vc_turn_left vc_turn_leave(const struct vc_turns *turns, uint64_t now_ns)
{
    if (!turns->slots)
        return VC_TURN_UNWANTED;
    if (owner_of(vc_load_acquire(&turns->usage->turn)) != turns->own)
        return VC_TURN_KEPT;
    if (least_served(turns, VC_MAX_SLOTS, now_ns) != VC_MAX_SLOTS)
        return vc_turn_shorten(turns, now_ns, now_ns) ? VC_TURN_PASSED : VC_TURN_KEPT;
    return vc_turn_siblings_busy(turns, now_ns) == 0 ? VC_TURN_UNWANTED : VC_TURN_KEPT;
}

uint32_t vc_turn_siblings_wait(const struct vc_turns *turns, uint64_t now_ns)
{
    uint32_t waiting = 0;
    for (uint32_t slot = 0; turns->slots && slot < count(turns); slot++)
        waiting += slot != turns->own && waits(turns, slot, now_ns);
    return waiting;
}

uint32_t vc_turn_siblings_busy(const struct vc_turns *turns, uint64_t now_ns)
{
    uint32_t busy = 0;
    for (uint32_t slot = 0; turns->slots && slot < count(turns); slot++)
        busy += slot != turns->own && finish_of(turns, slot) > now_ns;
    return busy;
}
