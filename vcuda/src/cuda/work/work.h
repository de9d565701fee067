/* The way of every operation through the gate: begin, the driver's own call, end.
 *
 *   struct vc_work work;
 *   if (!vc_work_begin_kernel(&work, …)) return vc_real.cuX(…);        nothing to be done afterwards
 *   return vc_work_end(&work, vc_real.cuX(…));
 *
 * Begin may wait, without holding any lock; it never changes what the driver answers.
 */
#ifndef VC_WORK_H
#define VC_WORK_H

#include "cuda/driver/cards.h"
#include "cuda/work/event.h"
#include "gate/lane.h"

struct vc_stream_lane;

struct vc_work {
    struct vc_stream_lane *lane;
    struct vc_estimate *estimate;
    CUstream stream; /* explicit: never NULL */
    struct vc_gate_answer answer;
    struct vc_lane_step step;
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

enum { VC_KNOWN_LAUNCHES = 64 };

/* Of the calling thread; NULL until it passed the gate once. Only a pointer lives in static TLS, which is scarce in libraries
 * loaded late. */
extern __thread struct vc_known_launch *vc__known_launches __attribute__((tls_model("initial-exec"), visibility("hidden")));
/* Captures under way in its low half; the high one changes when handles may have changed their meaning, and in a forked child. */
extern uint64_t vc__work_state __attribute__((visibility("hidden")));

/* Exact for every launch that a card accepts. */
static inline uint64_t vc_launch_shape(uint64_t blocks, uint64_t threads)
{
    return blocks << 11 ^ threads;
}

static inline struct vc_known_launch *vc__known_launch(struct vc_known_launch *known, CUfunction function, uint64_t shape,
                                                       CUstream stream)
{
    uint64_t hash = ((uintptr_t)function ^ (uintptr_t)stream << 7 ^ shape << 20) * UINT64_C(0x9e3779b97f4a7c15);
    return &known[hash >> 58];
}

/* Whether the kernel may go at once: known, on a stream that is nobody else's, and within the permit. False says nothing; without
 * a share nothing is known. A stream's context needs no look: the driver refuses a launch from another one. */
static inline __attribute__((always_inline)) bool vc_work_passes(CUstream stream, CUfunction function, uint64_t blocks, uint64_t threads)
{
    struct vc_known_launch *known = vc__known_launches;
    if (VC_UNLIKELY(!known))
        return false;
    uint64_t shape = vc_launch_shape(blocks, threads);
    known = vc__known_launch(known, function, shape, stream);
    if (VC_UNLIKELY((known->state ^ vc_load_acquire(&vc__work_state)) | ((uintptr_t)known->function ^ (uintptr_t)function) |
                    (known->shape ^ shape) | ((uintptr_t)known->stream ^ (uintptr_t)stream)))
        return false;
    return vc_lane_pass(known->lane, known->estimate);
}

/* Kinds of keys beside functions (vc_estimate_key). */
enum {
    VC_WORK_GRAPH = 1 << 20,
    VC_WORK_COPY,
    VC_WORK_SET,
    VC_WORK_BATCH,
    VC_WORK_DECOMPRESS,
};

/* Copies and sets of fewer bytes take microseconds and are not worth a question. */
#define VC_WORK_LARGE_BYTES UINT64_C(1048576)

/* NULL means the legacy stream, or the thread's own for the _ptsz variants. */
static inline CUstream vc_work_stream(CUstream stream, bool per_thread)
{
    return stream ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* A function launched on so many blocks and threads per block. False: just call the driver. */
bool vc_work_begin_kernel(struct vc_work *work, CUstream stream, CUfunction function, uint64_t blocks, uint64_t threads);

/* Anything else, by its key. */
bool vc_work_begin(struct vc_work *work, CUstream stream, uint64_t key);

/* A copy or a set of so many bytes, if it is a large one; `kind` is VC_WORK_…. */
bool vc_work_begin_sized(struct vc_work *work, CUstream stream, bool per_thread, uint64_t kind, uint64_t bytes);

/* Whether the card has this memory. */
bool vc_work_on_device(CUdeviceptr pointer);

/* Whether anything here is gated at all: cheap, before an operation is looked at. */
bool vc_work_gated(void);

/* Account for the driver's answer; returns it unchanged. */
CUresult vc_work_end(struct vc_work *work, CUresult result);

/* A capture began somewhere, or ended. */
void vc_work_capture_began(void);
void vc_work_capture_ended(void);

/* The application waited for a stream or an event (`whole_context`: for all work of the current context). */
void vc_work_synchronized(bool whole_context);

/* A stream's handle may come back as another's. */
void vc_work_stream_gone(void);

/* Around a call that destroys a context, or may (the release of a primary one). */
struct vc_tracker *vc_work_context_ending(CUcontext context);
void vc_work_context_ended(struct vc_tracker *tracker, bool gone);

/* A hook that is the driver's call between begin and end. */
#define VC_WORK_HOOK(name, parameters, arguments, begin)   \
    CUresult vc_hook_##name parameters                     \
    {                                                      \
        struct vc_work work;                               \
        if (!(begin))                                      \
            return vc_real.name arguments;                 \
        return vc_work_end(&work, vc_real.name arguments); \
    }

#endif
