/* A meter: memory of which the driver says how much it holds, charged by that figure and no other.
 *
 * Pools and graph memory take from the card and give back in steps that are the driver's secret. So a call that may make them
 * grow reserves what it may grow by at most, and afterwards what the driver says is charged. No lock is held across the call:
 * calls of several threads are under way at once, their reservations lie in one purse, and while any call is under way the charge
 * does not fall, because what the others count on must not be given away. */
#ifndef VC_METER_H
#define VC_METER_H

#include <pthread.h>

#include "cuda/memory/account.h"

/* What the driver says. */
struct vc_reading {
    uint64_t reserved, used;
};

struct vc_meter {
    pthread_mutex_t mutex; /* guards all below; never held across a call of the driver */
    vc_cards cards;
    uint64_t charged;  /* committed in the quota */
    uint64_t purse;    /* reserved in the quota for calls under way */
    uint64_t expected; /* what they may grow by, at most */
    uint64_t asked;    /* what they ask for */
    uint64_t ended;    /* what those asked for that have left */
    uint32_t calls;
    uint64_t changes;  /* a reading is as old as this was */
    bool put_off;      /* somebody settled while calls were under way: the last of them does it */
    bool (*read)(struct vc_meter *meter, struct vc_reading *reading); /* false: the driver does not say */
    void (*trim)(struct vc_meter *meter); /* have the driver give back what is idle */
};

/* One call under way. */
struct vc_metered {
    struct vc_meter *meter;
    uint64_t bytes, expected;
    uint64_t reserved; /* by the driver's word when it began … */
    uint64_t changes;  /* … and the meter's count then */
};

/* A call that asks for `bytes` begins. Of what the driver says is in use, no more than `others` is in the way of it. False: there is
 * no room for what it may take, even when everything idle was given back; nothing is reserved, the refusal is counted. */
bool vc_meter_begin(struct vc_metered *call, struct vc_meter *meter, uint64_t bytes, uint64_t others);

/* The driver has answered: charge what it really took. False: that is over the limit; the caller takes back what it did, and
 * then calls vc_meter_settle. */
bool vc_meter_end(struct vc_metered *call);

/* Bring the charge to the driver's figure, whatever the limit says. While calls are under way, who count on what is charged, it is put
 * off to the end of the last. False: the charge may not be that figure yet; settle again later. */
bool vc_meter_settle(struct vc_meter *meter, struct vc_reading *reading);

/* Give back what is idle. */
void vc_meter_trim(struct vc_meter *meter);

#endif
