/* The captures that we saw begin and not end: a short list, and beyond it a process that asks for good. */
#include "cuda/work/capture.h"

#include <pthread.h>

#include "base/atomic.h"
#include "base/clock.h"
#include "base/fork.h"
#include "cuda/driver/cards.h"
#include "cuda/work/visit.h"

enum { MOST_CAPTURES = 64 };

static struct {
    CUstream stream;
    CUcontext context;
} captures[MOST_CAPTURES];
static unsigned count;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static uint64_t latest_ns; /* when one began */
static const uint64_t LATELY_NS = 100000000;

static void forked(void)
{
    count = 0;
    pthread_mutex_init(&mutex, NULL);
}

VC_AT_FORK(forked);

bool vc_capture_is(CUstream stream)
{
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (!vc_real.cuStreamIsCapturing) /* older than capture itself */
        return false;
    return vc_real.cuStreamIsCapturing(stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

static bool is_listed(CUstream stream)
{
    pthread_mutex_lock(&mutex);
    bool listed = count == MOST_CAPTURES;
    for (unsigned i = 0; i < count && !listed; i++)
        listed = captures[i].stream == stream;
    pthread_mutex_unlock(&mutex);
    return listed;
}

bool vc_capture_lets_ask(CUstream stream)
{
    if (vc_visit_captures() && (vc_stream_of_context(stream) || is_listed(stream)))
        return false;
    return !vc_capture_is(stream);
}

uint64_t vc_capture_under_way(CUstream stream)
{
    static uint64_t unknown = UINT64_C(1) << 63;
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    uint64_t id = 0;
    if (!vc_capture_is(stream))
        return 0;
    if (!vc_real.cuStreamGetCaptureInfo) /* as old as capture itself */
        return 1;
    if (vc_real.cuStreamGetCaptureInfo(stream, &status, &id) != CUDA_SUCCESS || status == CU_STREAM_CAPTURE_STATUS_NONE)
        return vc_add(&unknown, 1);
    return id + 1;
}

bool vc_capture_lately(void)
{
    uint64_t latest = vc_load_relaxed(&latest_ns);
    if (latest == 0)
        return false;
    if (vc_now_ns() < latest + LATELY_NS)
        return true;
    __atomic_compare_exchange_n(&latest_ns, &latest, 0, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED); /* no launch reads the clock for it any more */
    return false;
}

void vc_capture_begins(CUstream stream)
{
    vc_store_relaxed(&latest_ns, vc_now_ns());
    CUcontext context = NULL;
    vc_real.cuCtxGetCurrent(&context);
    pthread_mutex_lock(&mutex);
    if (count < MOST_CAPTURES) {
        captures[count].stream = stream;
        captures[count++].context = context;
    }
    pthread_mutex_unlock(&mutex);
    vc_visit_forbid_all(); /* a visitor must not be at this stream any more … */
    vc_visit_change_captures(1); /* … nor come; of one that the list can't hold for ever: it costs a question at each launch, nothing else */
    vc_visit_allow_all();
}

/* Take out the first that matches (`stream` or `context`), or all. */
static void forget(CUstream stream, CUcontext context, bool all)
{
    int gone = 0;
    pthread_mutex_lock(&mutex);
    for (unsigned i = 0; i < count && (all || gone == 0);) {
        bool match = context ? captures[i].context == context : captures[i].stream == stream;
        if (match) {
            captures[i] = captures[--count];
            gone++;
        } else {
            i++;
        }
    }
    pthread_mutex_unlock(&mutex);
    if (gone)
        vc_visit_change_captures(-gone);
}

void vc_capture_over(CUstream stream)
{
    forget(stream, NULL, false);
}

void vc_capture_stream_gone(CUstream stream)
{
    forget(stream, NULL, true);
}

void vc_capture_context_gone(CUcontext context)
{
    forget(NULL, context, true);
}
