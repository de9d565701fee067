/* What a context takes of the card as it is used, beyond what it cost: local memory, the heap, printf's buffer, streams.
 *
 * The driver keeps local memory for every thread that can be resident on the card, for each as much as the stack's limit says or the
 * largest frame of a kernel that was launched, and takes it with the limit or in the launch: a frame of 16 KiB is 4 GiB of an
 * H100. So a function's frame is looked up before its first launch. */
#ifndef VC_CONTEXT_MEMORY_H
#define VC_CONTEXT_MEMORY_H

#include "cuda/driver/cards.h"

enum { VC_KNOWN_FUNCTIONS = 1024 };
extern uintptr_t vc__known_functions[VC_KNOWN_FUNCTIONS] __attribute__((visibility("hidden")));

/* Whether the function's frame is paid for wherever it may be launched. For the launch path: a load, no call. */
static inline bool vc_frame_is_paid(CUfunction function)
{
    uint64_t hash = (uintptr_t)function * UINT64_C(0x9e3779b97f4a7c15);
    return vc_load_relaxed(&vc__known_functions[hash >> 54]) == (uintptr_t)function;
}

/* Pay for the frame of a function that is to be launched on a stream (NULL: in the current context), or of a library's kernel, whose
 * attributes the driver tells by another call. CUDA_ERROR_OUT_OF_MEMORY: it must not be launched. See code.h. */
CUresult vc_frame_pay(CUfunction function, CUstream stream, bool of_library);

/* Code was unloaded: handles of functions may come back as others'. Or one more context was made: a library's kernel can be launched, and
 * a thread's own stream used, in each. */
void vc_frames_forget(void);

extern uint64_t vc__streams_epoch __attribute__((visibility("hidden")));
extern __thread uint64_t vc__own_stream_paid __attribute__((tls_model("initial-exec"), visibility("hidden"))); /* in that epoch */

/* Whether a stream (an explicit handle) is no thread's own, or the calling thread's is paid for wherever it may use it. For the launch path:
 * loads, no call. */
static inline bool vc_stream_is_paid(CUstream stream)
{
    return VC_LIKELY(stream != CU_STREAM_PER_THREAD) || vc__own_stream_paid == vc_load_relaxed(&vc__streams_epoch);
}

/* Before work is put into a stream: pay for it if it is the calling thread's own default stream and this is its first use here.
 * CUDA_ERROR_OUT_OF_MEMORY: do not use it. */
CUresult vc_thread_stream_pay(void);
static inline CUresult vc_stream_pay(CUstream stream)
{
    return VC_LIKELY(vc_stream_is_paid(stream)) ? CUDA_SUCCESS : vc_thread_stream_pay();
}

/* Around the end of a stream: its context, which it counts in. */
CUcontext vc_stream_ending(CUstream stream);
void vc_stream_ended(CUcontext context);

#endif
