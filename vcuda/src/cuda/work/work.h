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

#include "cuda/work/lanes.h"

struct vc_work {
    struct vc_stream_lane *lane;
    struct vc_estimate *estimate;
    CUstream stream; /* explicit: never NULL */
    uint64_t capture; /* begin found this capture under way on the stream; 0: none */
    uint64_t from_ns; /* … then */
    struct vc_gate_answer answer;
    struct vc_lane_step step;
    bool first; /* behind the mark that opened the lane's interval */
};

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
 * a share nothing is known. A stream's context needs no look: it has one for good. */
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

/* NULL means the legacy stream, or the thread's own for the _ptsz variants. */
static inline CUstream vc_work_stream(CUstream stream, bool per_thread)
{
    return stream ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* A function launched on so many blocks and threads per block. False: just call the driver. */
bool vc_work_begin_kernel(struct vc_work *work, CUstream stream, CUfunction function, uint64_t blocks, uint64_t threads);

/* Anything else, by its key. */
bool vc_work_begin(struct vc_work *work, CUstream stream, uint64_t key);

/* A copy or a set of so many bytes; `kind` is VC_WORK_…. Until it was measured it costs what such things cost on most cards. */
bool vc_work_begin_sized(struct vc_work *work, CUstream stream, bool per_thread, uint64_t kind, uint64_t bytes);

/* Whether the card has this memory. */
bool vc_work_on_device(CUdeviceptr pointer);

/* What is about to be put on that stream (explicit) is not the card's work, or is a wait for other work: its time is no part of what the thread launched there. */
void vc_work_elsewhere(CUstream stream);

/* Whether anything here is gated at all: cheap, before an operation is looked at. */
bool vc_work_gated(void);

/* Whether an operation may be begun at all: not on a card whose limits can't be read, nor without the memory to account for it. */
CUresult vc_work_refusal(void);

/* Account for the driver's answer; returns it unchanged. */
CUresult vc_work_end(struct vc_work *work, CUresult result);

/* Around a call in which the application waits for the card: when it began (0: nothing is gated), and that it came back. */
uint64_t vc_work_waits(void);
/* … for a stream (explicit), or NULL: for all work of the current context. */
void vc_work_waited(uint64_t from_ns, CUstream stream);
/* … for something else: what it was says nothing of this thread's streams. */
void vc_work_waited_otherwise(void);

/* Code was unloaded: what was learnt of functions may be another's. */
void vc_work_functions_gone(void);

/* A capture is about to begin on this stream. */
void vc_work_capture_begins(CUstream stream);

/* Around the destruction of a stream, whose handle may come back as another's. */
void vc_work_stream_ending(CUstream stream);
void vc_work_stream_gone(CUstream stream, bool gone);

/* Around a call that destroys a context, or may (the release of a primary one). */
struct vc_tracker *vc_work_context_ending(CUcontext context);
void vc_work_context_ended(struct vc_tracker *tracker, CUcontext context, bool gone);

/* … which is a copy over the bus, and not begun. */
static inline bool vc_work_leaves(CUstream stream, bool per_thread)
{
    vc_work_elsewhere(vc_work_stream(stream, per_thread));
    return false;
}

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
