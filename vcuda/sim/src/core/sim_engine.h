/* The card's timeline: operations go into streams, sim_advance evaluates them up to a moment, waiters sleep till
 * then.
 *
 * One context is on the card at a time; contexts take turns by slices while others have work, and a switch costs
 * time. The streams of the context on the card share its compute equally; the copy engines run beside it for all
 * contexts. All functions that take a sim_card want its lock held; sim_wait_* take it themselves.
 */
#ifndef SIM_ENGINE_H
#define SIM_ENGINE_H

#include "sim_state.h"

/* A moment in a stream: after `count` operations, whose durations sum up to `sum_ns`. */
typedef struct {
    int32_t stream;
    uint32_t serial;
    uint64_t count;
    uint64_t sum_ns;
} sim_ticket;

/* Evaluate the timeline up to `now`. */
void sim_advance(sim_state *state, sim_card *card, uint64_t now);

/* Contexts, streams, events of the own process: an index, or SIM_NONE when the table is full. A new context costs
 * `bytes` of the card's memory: -2 when they are not there. */
int32_t sim_context_create(sim_state *state, sim_card *card, uint64_t bytes);
/* Add `bytes` (may be negative) to what the context costs; -1 when the card has not that much left. */
int sim_context_resize(sim_state *state, sim_card *card, int32_t context, int64_t bytes);
void sim_context_destroy(sim_card *card, int32_t context);
int32_t sim_stream_create(sim_card *card, int32_t context, int blocking, int legacy, int priority);
/* The stream ends when what it still holds is done. */
void sim_stream_destroy(sim_card *card, int32_t stream);
int32_t sim_event_create(sim_state *state, sim_card *card);
void sim_event_destroy(sim_card *card, int32_t event);
/* Remove at once whatever the process slot owns on the card. */
void sim_purge(sim_card *card, int32_t slot);
/* Make the card's tables consistent after their writer died. */
void sim_repair(sim_card *card);

/* Take or give back memory for the own process; take returns -1 when the card, or a limit of the process's control group, has not
 * that much left. `managed`: no such limit counts it. */
int sim_memory_take(sim_state *state, sim_card *card, uint64_t bytes, int managed);
void sim_memory_give(sim_state *state, sim_card *card, uint64_t bytes, int managed);

/* Limits of control groups (core/sim_limits.c). `refused`: whether one forbids the process in `slot` so much more. `seen`: the limit
 * by which the driver tells a process of this group what it may have, or NULL. `used`: what counts against a limit. */
int sim_limit_refused(sim_state *state, sim_card *card, int32_t slot, uint64_t bytes);
const sim_limit *sim_limit_seen(const sim_state *state, const sim_card *card, const char *group);
uint64_t sim_limit_used(const sim_state *state, const sim_card *card, const sim_limit *limit);
sim_limit *sim_limit_find(sim_card *card, uint64_t group);
/* 0; -1: the table is full; -2: the driver's own accounting takes no limit below what is in use. */
int sim_limit_set(const sim_state *state, sim_card *card, uint64_t group, const char *path, uint64_t soft_bytes, uint64_t hard_bytes);
void sim_limit_clear(sim_limit *limit);
/* What a process held before a limit came is no more than what it holds. */
void sim_limit_given_back(sim_card *card, int32_t slot);
/* The control group (v2) of the calling process, "/" if it can't be told. */
void sim_own_group(char group[SIM_GROUP_TEXT]);

/* Memory of other processes' (core/sim_sharing.c). `share`: the own process, which has paid for it, begins to share it; -1: the
 * table is full. `join`: the own process holds it too; nobody's any more, it pays, and -1 says that it is not there. `leave`:
 * it holds it no longer, and who is left pays. `known`: its size, or 0. */
int sim_object_share(sim_state *state, sim_card *card, uint64_t id, uint64_t bytes);
int sim_object_join(sim_state *state, sim_card *card, uint64_t id, uint64_t bytes);
void sim_object_leave(sim_state *state, sim_card *card, uint64_t id);
uint64_t sim_object_known(const sim_card *card, uint64_t id);
/* The entry goes, whoever holds it, and its payer goes on paying. */
void sim_object_forget(sim_card *card, uint64_t id);
/* A process that is gone leaves all that it held. */
void sim_objects_purge(sim_card *card, int32_t slot);

/* A number from 0 to `most`, from the card's seed. */
uint64_t sim_draw(sim_card *card, uint64_t most);

/* Push one operation. 0, or -1 when the ring is full: unlock, sim_wait_room, lock, try again. */
int sim_push(sim_card *card, int32_t stream, const sim_op *op);
int sim_wait_room(sim_state *state, int card, int32_t stream);

/* What has been submitted to the stream so far; whether it is done (as far as the timeline is evaluated). */
sim_ticket sim_ticket_now(const sim_card *card, int32_t stream);
int sim_ticket_done(const sim_card *card, const sim_ticket *ticket);
/* Sleep until the ticket is done. 0, or -1 when the card is lost. Takes the lock itself. */
int sim_wait(sim_state *state, int card, const sim_ticket *ticket);

/* The head of `stream` is a SIM_OP_HOST that may run now: its value, else 0. sim_host_done completes it. */
uint64_t sim_host_ready(const sim_card *card, int32_t stream);
void sim_host_done(sim_card *card, int32_t stream);

/* Add `busy_ns` that ends at `end_ns` to a ring of samples. */
void sim_sample_add(sim_sample *samples, uint64_t start_ns, uint64_t end_ns);

#endif
