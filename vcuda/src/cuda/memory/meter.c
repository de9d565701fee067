/* Begin, end, settle. */
#include "cuda/memory/meter.h"

#include "cuda/memory/refusal.h"

#define VC__LARGEST_STEP ((uint64_t)32 << 20) /* the largest by which a driver is known to let something grow */
#define VC__SURPRISE ((uint64_t)128 << 20)
#define VC__MOST_SURPRISE (UINT64_MAX / 4) /* whatever a tenant writes */
#define VC__STEPS_TO_LEARN 8u
#define VC__READINGS 4 /* tries for one that no call overlaps */

/* The steps in which this driver's pools grow: the largest known, until it shows smaller ones. */
static uint64_t step = VC__LARGEST_STEP;
/* Something has grown by more than it may in such steps, so by anything: from then on a call needs this much room beside what it
 * asks for. 0: not so far. The other processes of the container are told of it for each card. */
static uint64_t surprise;
static uint32_t unlearnt;

static uint64_t surprise_on(vc_cards cards)
{
    uint64_t most = vc_load_relaxed(&surprise);
    VC_EACH_CARD(card, cards) {
        uint64_t told = vc_load_relaxed(&vc_card(card)->usage->surprise_bytes);
        most = told > most ? told : most;
    }
    return most < VC__MOST_SURPRISE ? most : VC__MOST_SURPRISE;
}

static void be_surprised(vc_cards cards, uint64_t by)
{
    if (vc_load_relaxed(&step) < VC__LARGEST_STEP) { /* what was learned was wrong; never again */
        vc_store_relaxed(&unlearnt, 1);
        vc_store_relaxed(&step, VC__LARGEST_STEP);
        return;
    }
    by = by > VC__SURPRISE / 2 ? 2 * by : VC__SURPRISE;
    vc_raise_to(&surprise, by);
    VC_EACH_CARD(card, cards)
        vc_raise_to(&vc_card(card)->usage->surprise_bytes, by);
}

/* Learn from a growth that the driver's own figures before and after one call show, while no other call was under way: pools grow
 * in powers of two. One smaller growth may be two changes at once (another thread's synchronisation gave something back); many in a
 * row are the driver's way. What was charged shows nothing: it may not have followed the driver down yet. */
static void learn_step(uint64_t growth)
{
    static uint32_t in_a_row;
    uint64_t unit = growth & -growth;
    if (vc_load_relaxed(&unlearnt))
        return;
    if (unit < VC_CHUNK || unit >= vc_load_relaxed(&step))
        vc_store_relaxed(&in_a_row, 0);
    else if (vc_add_relaxed(&in_a_row, 1) >= VC__STEPS_TO_LEARN)
        vc_store_relaxed(&step, unit);
}

/* A driver that has no more takes no more: what is free on the card bounds any growth. UINT64_MAX: not known. */
static uint64_t free_on(vc_cards cards)
{
    size_t free_bytes, total_bytes;
    int card = vc_card_of_current(NULL);
    if (card < 0 || cards != 1u << card || !vc_real.cuMemGetInfo_v2 ||
        vc_real.cuMemGetInfo_v2(&free_bytes, &total_bytes) != CUDA_SUCCESS)
        return UINT64_MAX;
    return free_bytes / VC_CHUNK * VC_CHUNK;
}

/* Pre: locked. Count a call as under way, of which `expected` bytes are still to be reserved. */
static void enter(struct vc_metered *call, uint64_t expected, uint64_t reserved)
{
    struct vc_meter *meter = call->meter;
    call->expected = expected;
    call->reserved = reserved;
    meter->expected += expected;
    meter->asked += call->bytes;
    meter->calls++;
    call->changes = ++meter->changes;
}

/* Pre: locked. */
static void leave(const struct vc_metered *call)
{
    struct vc_meter *meter = call->meter;
    meter->expected -= call->expected;
    meter->asked -= call->bytes;
    vc_add(&meter->ended, call->bytes);
    meter->calls--;
    meter->changes++;
}

/* What a call may make the driver take beyond what is charged. `slack`: for what may be given back, and be taken again in a larger
 * step, before the driver comes to it. */
static uint64_t growth_beyond(vc_cards cards, uint64_t have, uint64_t used, uint64_t asked, uint64_t slack)
{
    uint64_t unknown = surprise_on(cards);
    if (VC_UNLIKELY(unknown > 0)) /* nor can be known what of the idle memory it can use */
        return asked > UINT64_MAX / 2 ? UINT64_MAX / 2 : vc_round_up(asked, VC_CHUNK) + unknown;
    uint64_t wanted = asked > UINT64_MAX / 2 || used > UINT64_MAX / 2 ? UINT64_MAX / 2 : used + asked;
    return wanted > have ? vc_round_up(wanted - have, vc_load_relaxed(&step)) + slack
                         : (have - wanted < slack ? slack - (have - wanted) : 0);
}

static uint64_t in_the_way(const struct vc_reading *reading, uint64_t others)
{
    return reading->used < others ? reading->used : others;
}

/* Read for a call that begins, and lock. What is in use is never told too small: what a call has taken that was under way when it was read,
 * and has left since, is neither among what is asked for nor surely in the reading. */
static void read_to_begin(struct vc_meter *meter, uint64_t others, struct vc_reading *reading)
{
    for (int attempt = 0;; attempt++) {
        uint64_t before = vc_load(&meter->ended);
        *reading = (struct vc_reading){0};
        meter->read(meter, reading);
        pthread_mutex_lock(&meter->mutex);
        uint64_t since = meter->ended - before;
        if (since == 0 || attempt == VC__READINGS) {
            reading->used = in_the_way(reading, others) + since;
            return;
        }
        pthread_mutex_unlock(&meter->mutex);
    }
}

/* Away from the edge there is room for all that might happen, and nothing is given back. */
static bool begin_amply(struct vc_metered *call, uint64_t others)
{
    struct vc_meter *meter = call->meter;
    struct vc_reading reading;
    read_to_begin(meter, others, &reading);
    uint64_t asked = meter->asked + call->bytes;
    enter(call, growth_beyond(meter->cards, meter->charged, reading.used, asked, vc_load_relaxed(&step)), reading.reserved);
    pthread_mutex_unlock(&meter->mutex);
    return vc_cards_reserve(meter->cards, call->expected);
}

/* At the edge all that is idle goes first, this meter's own too: then the driver has nothing to reuse, and what it takes is
 * what is missing. */
static bool begin_exactly(struct vc_metered *call, uint64_t others)
{
    struct vc_meter *meter = call->meter;
    vc_account_make_room(meter->cards);
    vc_meter_trim(meter);
    struct vc_reading reading;
    uint64_t most = free_on(meter->cards);
    read_to_begin(meter, others, &reading);
    uint64_t asked = meter->asked + call->bytes, used = reading.used;
    uint64_t grows = growth_beyond(meter->cards, reading.reserved, used, asked, 0);
    uint64_t needs = used + asked > reading.reserved ? vc_round_up(used + asked - reading.reserved, VC_CHUNK) : 0;
    if (grows > most)
        grows = needs > most ? needs : most;
    /* Relative to what is charged: calls under way may have kept that from falling. */
    uint64_t spare = meter->charged > reading.reserved ? meter->charged - reading.reserved : 0;
    if (surprise_on(meter->cards) > 0)
        spare = 0;
    enter(call, grows > spare ? grows - spare : 0, reading.reserved);
    pthread_mutex_unlock(&meter->mutex);
    return vc_cards_reserve(meter->cards, call->expected);
}

/* After a call left. */
static void unlock(struct vc_meter *meter)
{
    bool put_off = meter->put_off && meter->calls == 0;
    pthread_mutex_unlock(&meter->mutex);
    if (VC_UNLIKELY(put_off))
        vc_meter_settle(meter, NULL);
}

/* The reservation of a call that was entered came through, or it did not. */
static bool entered(struct vc_metered *call, bool reserved)
{
    struct vc_meter *meter = call->meter;
    pthread_mutex_lock(&meter->mutex);
    if (reserved)
        meter->purse += call->expected;
    else
        leave(call);
    unlock(meter);
    return reserved;
}

bool vc_meter_begin(struct vc_metered *call, struct vc_meter *meter, uint64_t bytes, uint64_t others)
{
    *call = (struct vc_metered){.meter = meter, .bytes = bytes};
    if (entered(call, begin_amply(call, others)))
        return true;
    if (vc_cards_could_fit(meter->cards, bytes, false) && entered(call, begin_exactly(call, others)))
        return true;
    vc_refused(meter->cards, bytes);
    return false;
}

/* Read, and lock; false: other calls changed it meanwhile, and the reading may be older than what they charged. */
static bool read_and_lock(struct vc_meter *meter, struct vc_reading *reading)
{
    for (int attempt = 0;; attempt++) {
        uint64_t before = vc_load(&meter->changes);
        *reading = (struct vc_reading){0};
        bool told = meter->read(meter, reading);
        pthread_mutex_lock(&meter->mutex);
        if (!told || meter->changes == before || attempt == VC__READINGS)
            return told && meter->changes == before;
        pthread_mutex_unlock(&meter->mutex);
    }
}

/* Pre: locked. */
static void lower(struct vc_meter *meter, uint64_t reserved)
{
    if (meter->calls > 0 || reserved >= meter->charged)
        return;
    vc_cards_release(meter->cards, meter->charged - reserved, VC_QUOTA_PLAIN);
    meter->charged = reserved;
    meter->changes++;
}

/* Pre: locked. Charge growth out of the purse; returns what it did not hold. */
static uint64_t pay(struct vc_meter *meter, uint64_t reserved)
{
    uint64_t growth = reserved > meter->charged ? reserved - meter->charged : 0;
    uint64_t paid = growth < meter->purse ? growth : meter->purse;
    if (paid > 0) {
        vc_cards_commit(meter->cards, paid, VC_QUOTA_PLAIN);
        meter->purse -= paid;
        meter->charged += paid;
        meter->changes++;
    }
    return growth - paid;
}

/* Pre: locked. What the calls under way do not need goes back. */
static void empty_purse(struct vc_meter *meter)
{
    if (meter->purse <= meter->expected)
        return;
    vc_cards_rollback(meter->cards, meter->purse - meter->expected);
    meter->purse = meter->expected;
}

bool vc_meter_end(struct vc_metered *call)
{
    struct vc_meter *meter = call->meter;
    struct vc_reading reading;
    bool current = read_and_lock(meter, &reading), fits = true;
    bool alone = current && meter->calls == 1 && meter->changes == call->changes;
    leave(call);
    uint64_t more = pay(meter, reading.reserved);
    if (alone && reading.reserved > call->reserved)
        learn_step(reading.reserved - call->reserved);
    if (more > 0) {
        be_surprised(meter->cards, more);
        fits = vc_cards_reserve(meter->cards, more);
        if (fits) {
            vc_cards_commit(meter->cards, more, VC_QUOTA_PLAIN);
            meter->charged += more;
        }
    }
    empty_purse(meter);
    if (current && fits)
        lower(meter, reading.reserved);
    unlock(meter);
    return fits;
}

bool vc_meter_settle(struct vc_meter *meter, struct vc_reading *reading)
{
    struct vc_reading unwanted;
    reading = reading ? reading : &unwanted;
    bool current = read_and_lock(meter, reading);
    meter->changes++; /* somebody looked because the driver may have given back: what a call under way sees is not all its own */
    bool settled = meter->calls == 0 && current;
    meter->put_off = !settled;
    if (settled) {
        if (reading->reserved > meter->charged) {
            vc_cards_charge(meter->cards, reading->reserved - meter->charged, VC_QUOTA_PLAIN);
            meter->charged = reading->reserved;
        }
        lower(meter, reading->reserved);
    }
    pthread_mutex_unlock(&meter->mutex);
    return settled;
}

void vc_meter_trim(struct vc_meter *meter)
{
    struct vc_reading reading;
    if (meter->read(meter, &reading) && reading.reserved > vc_round_up(reading.used, VC_CHUNK))
        meter->trim(meter);
    vc_meter_settle(meter, NULL);
}
