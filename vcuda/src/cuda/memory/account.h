/* The account: what this process was given of each card, and how it is given more.
 *
 * Every way to take memory goes through it: reserve, call the driver, then keep or drop. A reservation that finds no room asks
 * every source for what it can spare before it is refused, and what dies with a context is taken out here. Each kind of
 * memory that can give something back, or that is more than bytes at an address, is a source; the account knows none of them
 * by name. */
#ifndef VC_ACCOUNT_H
#define VC_ACCOUNT_H

#include "base/fork.h"
#include "cuda/driver/cards.h"
#include "cuda/memory/chunk.h"
#include "region/quota.h"

/* What is recorded under an address or handle. */
struct vc_allocation {
    uint64_t key;
    uint64_t bytes;
    CUcontext context; /* it dies with this one; NULL: with none */
    void *owner;       /* the source's own: which of its things this belongs to */
    const struct vc_source *source; /* NULL: plain bytes of the quota */
    vc_cards cards;
    uint32_t kind; /* enum vc_memory_kind */
};

enum vc_memory_kind {
    VC_MEMORY_PLAIN,
    VC_MEMORY_MANAGED,
    VC_MEMORY_OVERSOLD, /* asked for as plain memory, given as managed memory */
    VC_MEMORY_OPAQUE,   /* no address: the driver says the size, or a source does */
};

/* Called with no lock held, in any thread; NULL where a source has nothing to say. */
struct vc_source {
    /* Before a refusal: give back what is idle on the card, bring charges up to date. */
    void (*make_room)(uint32_t card);
    /* The application has waited for the card, or asks what is free: look at what was given back meanwhile. Cheap when nothing was. */
    void (*settle)(void);
    /* An allocation that the source recorded is gone, by the driver's word. */
    void (*freed)(const struct vc_allocation *allocation);
    /* A context is gone, or was emptied by a reset, and with it all work in it. */
    void (*context_ended)(CUcontext context);
    /* Small allocations have left a chunk of the card. True: something of the source may lie in it, and is charged for it now. */
    bool (*takes_chunk)(uint32_t card);
};

/* Make `source` one of all: the linker keeps the list. */
#define VC_SOURCE(source) \
    static const struct vc_source *const vc__listed_##source __attribute__((used, section("vc_sources"))) = &source

struct vc_charge {
    CUcontext context; /* current when the charge began; NULL if it was begun for a device */
    vc_cards cards;    /* on which `reserved` is booked; none: nothing is, the driver will refuse by itself */
    uint64_t reserved;
    bool managed; /* what is reserved need not be on the card */
};

/* No card of the machine has so much: what asks one for it is wrong in some way that only the driver knows, and is told so by it. Asks the
 * driver: for refusals. */
bool vc_beyond_every_card(uint64_t bytes);

uint64_t vc_round_up(uint64_t bytes, uint64_t multiple); /* saturates */
uint64_t vc_times(uint64_t a, uint64_t b);               /* saturates */

/* Bytes on each of the cards. The quota's words for a set of cards; see region/quota.h. */
bool vc_cards_reserve(vc_cards cards, uint64_t bytes);
bool vc_cards_could_fit(vc_cards cards, uint64_t bytes, bool managed);
void vc_cards_rollback(vc_cards cards, uint64_t bytes);
void vc_cards_commit(vc_cards cards, uint64_t bytes, enum vc_quota_kind kind);
void vc_cards_release(vc_cards cards, uint64_t bytes, enum vc_quota_kind kind);
void vc_cards_charge(vc_cards cards, uint64_t bytes, enum vc_quota_kind kind);
/* So much more (or less) of what is charged has an extent, and may be held by others: region/shared.h. */
void vc_cards_share(vc_cards cards, int64_t bytes);

/* Ask all sources for what they can spare on these cards. */
void vc_account_make_room(vc_cards cards);

/* Have all sources settle. */
void vc_account_settle(void);

/* Reserve for the current context, for a device, or on several cards. CUDA_ERROR_OUT_OF_MEMORY: refused, nothing is reserved, do
 * not call the driver. */
CUresult vc_charge_current(struct vc_charge *charge, uint64_t bytes);
CUresult vc_charge_device(struct vc_charge *charge, CUdevice device, uint64_t bytes);
CUresult vc_charge_cards(struct vc_charge *charge, vc_cards cards, uint64_t bytes);

/* For managed memory, on every card of the share: it may come to each. An oversold share may have it beyond its physical part. */
CUresult vc_charge_managed(struct vc_charge *charge, uint64_t bytes);

/* For plain memory that may be replaced by managed memory where the share is oversold: charge->managed then says so, a
 * line on stderr once in a process, and a counter in usage. */
CUresult vc_charge_either(struct vc_charge *charge, uint64_t bytes);

/* Change what is reserved to exactly `bytes`. False: that is over the limit; the reservation is as before. */
bool vc_charge_resize(struct vc_charge *charge, uint64_t bytes);

/* The driver put `bytes` at `pointer`: commit the chunks that this took from the card, and record it. False (over the
 * limit, or no host memory): the reservation is gone, the caller frees it and refuses. */
bool vc_charge_keep(struct vc_charge *charge, CUdeviceptr pointer, uint64_t bytes, enum vc_memory_kind kind);

/* The same for memory without an address: commits what is reserved, in full. */
bool vc_charge_keep_opaque(struct vc_charge *charge, const void *handle);

/* Free memory of the card as if this process had no ledger: its threads may allocate and free while something else is weighed by this.
 * Pre: charge->cards, of the current context. */
int64_t vc_left_on_card(const struct vc_charge *charge);

/* The driver refused. */
void vc_charge_drop(const struct vc_charge *charge);

/* Record what a source has charged by itself; its `freed` is told of the end. False: no host memory. */
bool vc_account_record(const struct vc_allocation *allocation);

/* What is recorded under a key; false: nothing. */
bool vc_account_get(uint64_t key, struct vc_allocation *allocation);

/* Plain memory is the source's from now on: its `freed` is told of the end, and has it released when that is due. False: there is none. */
bool vc_account_adopt(uint64_t key, const struct vc_source *source, void *owner);
void vc_account_release(const struct vc_allocation *adopted);

/* Names the chunk that a small allocation shares with others; 0: it is not small, or lies in several. */
uint64_t vc_account_chunk(const struct vc_allocation *allocation);

/* Take out what is recorded under a pointer or handle, before the driver frees it; false: not ours, just forward. */
bool vc_charge_take(uint64_t key, struct vc_allocation *freeing);
/* After the driver's answer: release it, or (result is an error) record it again. What is freed in a stream is released when
 * the stream got there, and is in its chunks until then. */
void vc_charge_freed(const struct vc_allocation *freeing, CUresult result);

/* A context is about to end: everything that dies with it, taken out like the above. */
struct vc_dying {
    struct vc_allocation *allocations;
    size_t count;
};
struct vc_dying vc_account_context_ending(CUcontext context);
/* After the driver's answer; an error puts all back. */
void vc_account_context_ended(struct vc_dying dying, CUcontext context, CUresult result);

#endif
