/* One container's region as the arbiter holds it: limits mapped for writing grants, usage read by pread only.
 *
 * The mapping of usage serves futex waits alone and is never loaded from: a tenant may truncate the file at any time.
 */
#ifndef VC_ARBITER_MEMBER_H
#define VC_ARBITER_MEMBER_H

#include <stdbool.h>
#include <stdint.h>

#include "arbiter/plan.h"
#include "arbiter/stood.h"
#include "gate/sample.h"
#include "region/file.h"

enum { VC_MEMBER_NAME_BYTES = 1024 };

struct vc_watch;

struct vc_member {
    char name[VC_MEMBER_NAME_BYTES];
    struct vc_limits *limits;
    void *usage_mapping; /* for futex only; NULL if it can't be mapped: then polled */
    int usage_descriptor;
    uint32_t card_count;
    struct vc_card_usage cards[VC_MAX_CARDS]; /* the latest reading; zero where it failed */
    uint64_t heartbeat_ns;
    uint64_t read_ns;   /* the latest reading */
    uint64_t active_ns; /* the arbiter's note: when it last waited for a card or had work on one */
    bool short_file;    /* the tenant has cut it: no bell to listen to */
    uint32_t news;      /* changes with every reading that differs from the one before it */
    bool listened;      /* the arbiter's note: its thread listens to all its bells */
    bool watched;       /* … or its watch does */
    bool rang;          /* … and one of them was heard */
    struct vc_watch *watch; /* who listens to it while it rests; NULL: nobody */
    /* Against a tenant that rings without end: rings are counted per window, then not listened to for its rest. */
    uint64_t ring_window_ns;
    uint32_t rings;
    uint32_t last_ring[VC_MAX_CARDS];
    /* What its processes tell by what they lock (charged.h): by slot at the latest look, in all, and when to look again. */
    struct vc_samples_told slot_told[VC_MAX_CARDS][VC_MAX_SLOTS];
    uint64_t told_ns[VC_MAX_CARDS];
    uint32_t told_slots[VC_MAX_CARDS];
    uint64_t told_next_ns, told_soon_ns; /* … at the latest, and where it rang since */
    bool unheard;                        /* … as it did */
    struct vc_samples found[VC_MAX_CARDS]; /* what samples of all of them found together */
    struct vc_stood stood[VC_MAX_CARDS];
    uint64_t hidden_since_ns[VC_MAX_CARDS]; /* it hides work; 0: it does not */
    uint64_t asked_ns[VC_MAX_CARDS][2]; /* the latest that they told of the card: it was free, it was busy */
    uint64_t gone_slots[VC_MAX_CARDS][2]; /* of those that are open: whose process was found gone … */
    uint64_t living_slots[VC_MAX_CARDS][2]; /* … or alive, at the latest look */
    uint32_t open[VC_MAX_CARDS];          /* how many of the others are */
};

/* Open both files. Returns NULL with *error. The grants are withdrawn at once: no lease, guaranteed rate. */
struct vc_member *vc_member_open(const char *name, const char *limits_path, const char *usage_path,
                                 struct vc_error *error);
/* Withdraw the grants and the heartbeat, so that the container falls back to its guaranteed share. */
void vc_member_close(struct vc_member *member);

/* Whether to read it now: it does something, it rang, or the latest reading is old. */
bool vc_member_due(const struct vc_member *member, uint64_t now_ns);
/* How old a reading may become. */
uint64_t vc_member_age_limit(const struct vc_member *member, uint64_t now_ns);
/* Read all its cards' usage; whatever can't be read is zero: not waiting, nothing on the card. */
void vc_member_read(struct vc_member *member, uint64_t now_ns);
/* Whether its rings are worth a wake-up now. */
bool vc_member_heard(const struct vc_member *member);
const uint32_t *vc_member_bell(const struct vc_member *member, uint32_t card);

void vc_member_observation(const struct vc_member *member, uint32_t card, struct vc_observation *seen);
void vc_member_beat(struct vc_member *member, uint64_t now_ns);
/* Write what was decided for one card; wakes its waiting threads if they should look again. */
void vc_member_write(struct vc_member *member, uint32_t card, const struct vc_tenant *tenant);

#endif
