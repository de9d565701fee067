/* What each thread remembers: its lanes (one for each stream of each context that it puts work on) and the launches it made.
 *
 * A lane belongs to its thread, no lock. All of it is forgotten when handles may have changed their meaning: a stream or a context was
 * destroyed, or the process is a forked child.
 */
#ifndef VC_LANES_H
#define VC_LANES_H

#include "cuda/driver/cards.h"
#include "cuda/work/tracker.h"
#include "cuda/work/visit.h"
#include "gate/lane.h"

/* Kinds of keys beside functions (vc_estimate_key). */
enum {
    VC_WORK_GRAPH = 1 << 20,
    VC_WORK_COPY,
    VC_WORK_SET,
    VC_WORK_BATCH,
    VC_WORK_DECOMPRESS,
    VC_WORK_ELSEWHERE, /* what is not the card's */
};

struct vc_stream_lane {
    struct vc_lane lane; /* first: the fast path touches nothing else */
    CUcontext context;
    CUstream stream;
    struct vc_tracker *tracker;
    struct vc_mark *open; /* where the interval under way began */
    struct vc_mark *before; /* … and where what is not the card's work began, before it, if that is known */
    struct vc_mark *past;   /* the first one behind it: what is launched there behind this waits for the card alone once it is reached */
    struct vc_estimate *elsewhere; /* what such things take on this stream */
    uint64_t hosted;      /* how many things that are not the card's work others had put on streams when it last asked */
    uint64_t legacy_hosts; /* … and on the legacy stream, by anybody … */
    bool behind_legacy;    /* … and they may be under way, while this is a blocking stream */
    uint64_t left_stamp;  /* of its latest launch that vc_tracker_left noted */
};

/* A launch that a thread made before, with what was found out about it: one cache line. */
struct vc_known_launch {
    _Alignas(64) uint64_t state; /* of the process then, so that what changes there makes it unknown */
    CUfunction function;
    uint64_t shape;
    CUstream stream;
    CUcontext context;
    struct vc_lane *lane;
    struct vc_estimate *estimate;
};

enum { VC_KNOWN_LAUNCHES = 64, VC_THREAD_LANES = 32 };

/* `known` is in front, so that one pointer leads to all of it. */
struct vc_thread_work {
    struct vc_known_launch known[VC_KNOWN_LAUNCHES];
    struct vc_stream_lane *lanes[VC_THREAD_LANES];
    uint32_t epoch, generation;
    struct vc_stream_lane *spare; /* reserved: what the next operation may need */
    struct vc_tracker *spare_tracker;
};

/* Of the calling thread; NULL until it passed the gate once. Only a pointer lives in static TLS, which is scarce in libraries
 * loaded late. */
extern __thread struct vc_known_launch *vc__known_launches __attribute__((tls_model("initial-exec"), visibility("hidden")));

/* The calling thread's, made at its first call; NULL without memory. */
struct vc_thread_work *vc_lanes_of_thread(void);

/* Have the memory that an operation needs which the calling thread has not made before. False: there is none. */
bool vc_lanes_reserve(void);

/* Its lane for the stream, in whichever context that is (the legacy and the thread's own: the current one), or NULL if the operation is not gated. Where that has
 * to take the place of another stream's, `ends` is called for that one before, but not while a stream is being destroyed. */
struct vc_stream_lane *vc_lane_of_stream(struct vc_thread_work *work, CUstream stream, void (*ends)(struct vc_stream_lane *));

/* … if the thread has one already. */
struct vc_stream_lane *vc_lane_of_stream_known(CUstream stream);

/* The thread waited for all of a context's work on a stream (NULL: on all of its streams) from `from_ns` until now. */
void vc_lanes_waited(CUcontext context, CUstream stream, uint64_t from_ns);

/* Call `pause` for each of the calling thread's lanes in that context (NULL: in all), but for the legacy and the per-thread stream; where a stream is
 * being destroyed, for none. */
void vc_lanes_each(CUcontext context, void (*pause)(struct vc_stream_lane *));

/* Handles may have changed their meaning. */
void vc_lanes_new_epoch(void);

#endif
