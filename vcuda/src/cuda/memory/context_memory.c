/* Local memory, the heap, printf's buffer and streams: charged beyond what a context costs, until it ends.
 *
 * The heap and the buffer are taken at a later launch, which nobody could refuse without harm: so they are charged with their limit, in
 * full, by what the driver says the limit is now. What streams take only the driver knows, and the card's free memory moves with every
 * neighbour and thread: so each is charged what the dearest card known takes (H100, driver 580: 70 MiB for 128, nothing for a context's
 * first, which stands for the one that measures). A destroyed stream's memory is used again. */
#include "cuda/memory/context_memory.h"

#include <stdlib.h>

#include "base/table.h"
#include "cuda/driver/owner.h"
#include "cuda/memory/account.h"

#define VC__STREAM_BYTES ((uint64_t)576 << 10)
#define VC__LARGEST_FRAME ((size_t)512 << 10) /* that any card has */

/* What is charged apart; the first are limits by their numbers. */
enum part { LOCAL = CU_LIMIT_STACK_SIZE, FIFO = CU_LIMIT_PRINTF_FIFO_SIZE, HEAP = CU_LIMIT_MALLOC_HEAP_SIZE, LIMITS, STREAMS = LIMITS, PARTS };

struct context {
    uint64_t key;
    vc_cards cards;
    uint64_t stack, frame; /* bytes of a thread: the limit, and the largest frame that was launched */
    uint64_t streams; /* live */
    uint64_t life;    /* tells it from others of the same handle */
    uint64_t bytes[PARTS]; /* charged */
};
VC_TABLE(contexts, struct context);

static size_t defaults[LIMITS]; /* + 1; 0: not asked */

static bool ask_default(int limit)
{
    size_t least;
    if (vc_load_relaxed(&defaults[limit]) > 0)
        return true;
    if (!vc_real.cuCtxGetLimit || vc_real.cuCtxGetLimit(&least, limit) != CUDA_SUCCESS)
        return false;
    vc_store_relaxed(&defaults[limit], least + 1);
    return true;
}

/* Bytes of the card for a limit (or a frame) beyond its default: local memory for every thread that can be resident. 0: not to be had. */
static uint64_t cost(enum part part, uint64_t value, CUdevice device)
{
    int processors = 0, threads = 0;
    uint64_t least = vc_load_relaxed(&defaults[part]) - 1, beyond = value > least ? value - least : 0;
    if (beyond == 0 || part != LOCAL)
        return vc_round_up(beyond, VC_CHUNK);
    if (!vc_real.cuDeviceGetAttribute ||
        vc_real.cuDeviceGetAttribute(&processors, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device) != CUDA_SUCCESS ||
        vc_real.cuDeviceGetAttribute(&threads, CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, device) != CUDA_SUCCESS)
        return 0;
    return vc_round_up(vc_times(beyond, (uint64_t)processors * (uint64_t)threads), VC_CHUNK);
}

/* A part of a context is charged `bytes` from now on; `was` is what it was. */
struct change {
    enum part part;
    vc_cards cards;
    uint64_t bytes, was, stack, frame;
    bool grows, adds; /* `bytes` are the least, or what is added to those before */
};

static enum vc_table_edit change(void *record, void *argument)
{
    struct context *context = record;
    struct change *made = argument;
    made->was = context->bytes[made->part];
    if (made->adds)
        made->bytes += made->was;
    else if (made->grows && made->bytes < made->was)
        made->bytes = made->was;
    context->bytes[made->part] = made->bytes;
    context->cards = made->cards;
    if (made->stack)
        context->stack = made->stack;
    if (made->frame > context->frame)
        context->frame = made->frame;
    return VC_TABLE_KEEP;
}

/* Pay for the change out of what is reserved. */
static void settle(const struct vc_charge *charge, CUcontext context, struct change made)
{
    made.cards = charge->cards;
    bool any = made.bytes > 0 || made.stack > 0;
    if (!vc_table_edit(&contexts, (uint64_t)(uintptr_t)context, any, change, &made))
        made.was = made.bytes = 0; /* nothing was charged and nothing is, or no host memory: then it is overhead */
    uint64_t more = made.bytes > made.was ? made.bytes - made.was : 0, paid = more < charge->reserved ? more : charge->reserved;
    vc_cards_commit(charge->cards, paid, VC_QUOTA_PLAIN);
    vc_cards_rollback(charge->cards, charge->reserved - paid);
    if (more > paid) /* another thread has changed it meanwhile */
        vc_cards_charge(charge->cards, more - paid, VC_QUOTA_PLAIN);
    if (made.was > made.bytes)
        vc_cards_release(charge->cards, made.was - made.bytes, VC_QUOTA_PLAIN);
}

/* Limits. */

/* There is no room for it; but what the driver would not do anyway is answered by the driver. Local memory it takes at once: it is asked
 * only for what no card has. */
static CUresult refuse(int limit, size_t value, CUresult refusal)
{
    size_t before;
    if ((limit == LOCAL && value <= VC__LARGEST_FRAME) || vc_real.cuCtxGetLimit(&before, limit) != CUDA_SUCCESS)
        return refusal;
    CUresult result = vc_real.cuCtxSetLimit(limit, value);
    if (result != CUDA_SUCCESS)
        return result;
    vc_real.cuCtxSetLimit(limit, before);
    return refusal;
}

CUresult vc_hook_cuCtxSetLimit(int limit, size_t value)
{
    struct vc_charge charge;
    struct context known = {0};
    CUcontext context = NULL;
    CUdevice device;
    if (limit < 0 || limit >= LIMITS || vc_card_of_current(&context) == VC_CARD_LOST || !context ||
        vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS || !ask_default(limit))
        return vc_real.cuCtxSetLimit(limit, value); /* without readable limits nothing is launched */
    context = vc_context_owner(context);
    vc_table_get(&contexts, (uint64_t)(uintptr_t)context, &known);
    uint64_t frame = limit == LOCAL ? known.frame : 0, have = known.bytes[limit];
    uint64_t wanted = cost((enum part)limit, value > frame ? value : frame, device);
    CUresult result = vc_charge_current(&charge, wanted > have ? wanted - have : 0);
    if (result != CUDA_SUCCESS)
        return refuse(limit, value, result);
    result = vc_real.cuCtxSetLimit(limit, value);
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(&charge);
        return result;
    }
    size_t now = value;
    vc_real.cuCtxGetLimit(&now, limit); /* it may have been rounded */
    settle(&charge, context, (struct change){.part = (enum part)limit, .stack = limit == LOCAL ? now : 0,
                                             .bytes = cost((enum part)limit, now > frame ? now : frame, device)});
    return result;
}

/* Frames. */

uint64_t vc__streams_epoch = 1; /* changes with the contexts that there are */
__thread uint64_t vc__own_stream_paid __attribute__((tls_model("initial-exec")));

uintptr_t vc__known_functions[VC_KNOWN_FUNCTIONS];

void vc_frames_forget(void)
{
    for (unsigned place = 0; place < VC_KNOWN_FUNCTIONS; place++)
        vc_store_relaxed(&vc__known_functions[place], 0);
    vc_add(&vc__streams_epoch, 1);
}

VC_AT_FORK(vc_frames_forget);

/* Bytes of a thread; 0: the driver does not say, and will say what is wrong with the function. */
static uint64_t frame_of(CUfunction function, bool of_library, CUdevice device)
{
    int bytes = 0;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (!of_library && vc_real.cuFuncGetAttribute)
        result = vc_real.cuFuncGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, function);
    if (result != CUDA_SUCCESS && vc_real.cuKernelGetAttribute)
        result = vc_real.cuKernelGetAttribute(&bytes, CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, (CUkernel)function, device);
    return result == CUDA_SUCCESS && bytes > 0 ? (uint64_t)bytes : 0;
}

static void remember(CUfunction function)
{
    uint64_t hash = (uintptr_t)function * UINT64_C(0x9e3779b97f4a7c15);
    vc_store_relaxed(&vc__known_functions[hash >> 54], (uintptr_t)function);
}

CUresult vc_frame_pay(CUfunction function, CUstream stream, bool of_library)
{
    struct vc_charge charge;
    struct context known = {0};
    CUcontext context = NULL;
    CUdevice device;
    if (!function || !vc_stream_device(stream ? stream : CU_STREAM_LEGACY, &device, &context))
        return CUDA_SUCCESS;
    context = vc_context_owner(context);
    int card = vc_card_of_device(device);
    uint64_t frame = ask_default(LOCAL) ? frame_of(function, of_library, device) : 0;
    if (card < 0 || frame < vc_load_relaxed(&defaults[LOCAL]) || frame == 0) {
        if (!of_library || !vc_several_contexts())
            remember(function); /* its context holds as much from the beginning, or nobody can say more */
        return CUDA_SUCCESS;
    }
    vc_table_get(&contexts, (uint64_t)(uintptr_t)context, &known);
    uint64_t wanted = cost(LOCAL, frame, device), have = known.bytes[LOCAL];
    if (wanted > have || frame > known.frame) { /* one that the stack's limit covers counts when that is lowered */
        CUresult result = vc_charge_cards(&charge, 1u << card, wanted > have ? wanted - have : 0);
        if (result != CUDA_SUCCESS)
            return result;
        settle(&charge, context, (struct change){.part = LOCAL, .bytes = wanted, .frame = frame, .grows = true});
    }
    if (!vc_several_contexts())
        remember(function);
    return CUDA_SUCCESS;
}

/* Streams: counted before they are made, so that each of several threads' is one more. */

static enum vc_table_edit add_stream(void *record, void *argument)
{
    static uint64_t lives;
    struct context *context = record;
    (void)argument;
    context->streams++;
    if (context->life == 0)
        context->life = vc_add_relaxed(&lives, 1);
    return VC_TABLE_KEEP;
}

/* `life`: of the context that it was counted in; NULL: whichever it is now. */
static enum vc_table_edit remove_stream(void *record, void *life)
{
    struct context *context = record;
    if (!life || context->life == *(uint64_t *)life)
        context->streams--;
    return VC_TABLE_KEEP;
}

static void uncount_stream(CUcontext context, uint64_t *life)
{
    vc_table_edit(&contexts, (uint64_t)(uintptr_t)context, false, remove_stream, life);
}

struct making {
    struct vc_charge charge;
    CUcontext context; /* NULL: not charged */
    uint64_t bytes;    /* of all streams of the context, with this one */
};

static CUresult begin_stream(struct making *making)
{
    struct context known = {0};
    CUcontext context;
    *making = (struct making){0};
    if (vc_card_of_current(&context) < 0)
        return CUDA_SUCCESS;
    making->context = vc_context_owner(context);
    vc_table_edit(&contexts, (uint64_t)(uintptr_t)making->context, true, add_stream, NULL);
    vc_table_get(&contexts, (uint64_t)(uintptr_t)making->context, &known);
    making->bytes = vc_round_up(known.streams * VC__STREAM_BYTES, VC_CHUNK);
    uint64_t have = known.bytes[STREAMS];
    CUresult result = vc_charge_current(&making->charge, making->bytes > have ? making->bytes - have : 0);
    if (result != CUDA_SUCCESS)
        uncount_stream(making->context, NULL);
    return result;
}

static CUresult end_stream(struct making *making, CUresult result)
{
    if (result == CUDA_SUCCESS && making->charge.reserved > 0) {
        settle(&making->charge, making->context, (struct change){.part = STREAMS, .bytes = making->bytes, .grows = true});
    } else if (result != CUDA_SUCCESS && making->context) {
        vc_charge_drop(&making->charge);
        uncount_stream(making->context, NULL);
    }
    return result;
}

#define VC__NEW_STREAM(name, parameters, arguments)                                                  \
    CUresult vc_hook_##name parameters                                                               \
    {                                                                                                \
        struct making making;                                                                        \
        CUresult result = begin_stream(&making);                                                     \
        return result != CUDA_SUCCESS ? result : end_stream(&making, vc_real.name arguments);        \
    }

VC__NEW_STREAM(cuStreamCreate, (CUstream *stream, unsigned int flags), (stream, flags))
VC__NEW_STREAM(cuStreamCreateWithPriority, (CUstream *stream, unsigned int flags, int priority), (stream, flags, priority))
VC__NEW_STREAM(cuGreenCtxStreamCreate, (CUstream *stream, CUgreenCtx green, unsigned int flags, int priority),
               (stream, green, flags, priority))

CUcontext vc_stream_ending(CUstream stream)
{
    CUcontext context = NULL;
    if (vc_real.cuStreamGetCtx && stream && vc_real.cuStreamGetCtx(stream, &context) != CUDA_SUCCESS)
        context = NULL;
    return vc_context_owner(context);
}

void vc_stream_ended(CUcontext context)
{
    if (context)
        uncount_stream(context, NULL);
}

/* Threads' own default streams: the driver makes one when a thread first uses it in a context. It ends with the thread. */

struct own_stream {
    struct own_stream *next;
    CUcontext context;
    uint64_t life, seen; /* of the context; the epoch in which it was there still */
};

static pthread_key_t own_streams;

static void thread_ended(void *streams)
{
    for (struct own_stream *one = streams, *next; one; one = next) {
        next = one->next;
        uncount_stream(one->context, &one->life);
        free(one);
    }
}

static void make_key(void)
{
    pthread_key_create(&own_streams, thread_ended);
}

/* Whether the thread has used it since the context was made. */
static bool is_counted(struct own_stream *one, CUcontext context)
{
    struct context now;
    uint64_t seen = vc_load(&vc__streams_epoch);
    if (one->context != context)
        return false;
    if (one->seen != seen && vc_table_get(&contexts, (uint64_t)(uintptr_t)context, &now) && now.life == one->life)
        one->seen = seen;
    return one->seen == seen;
}

/* In the process's only context there is no other to be paid for until one is made. */
static CUresult paid(uint64_t epoch)
{
    if (!vc_several_contexts())
        vc__own_stream_paid = epoch;
    return CUDA_SUCCESS;
}

CUresult vc_thread_stream_pay(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct making making;
    struct context known;
    CUcontext context = NULL;
    if (vc_real.cuCtxGetCurrent(&context) != CUDA_SUCCESS || !context)
        return CUDA_SUCCESS;
    pthread_once(&once, make_key);
    context = vc_context_owner(context);
    uint64_t epoch = vc_load(&vc__streams_epoch);
    struct own_stream *first = pthread_getspecific(own_streams), *one = first;
    while (one && one->context != context)
        one = one->next;
    if (one && is_counted(one, context))
        return paid(epoch);
    CUresult result = begin_stream(&making);
    if (result != CUDA_SUCCESS || !making.context)
        return result;
    end_stream(&making, CUDA_SUCCESS);
    if (!one && (one = malloc(sizeof *one))) {
        *one = (struct own_stream){.next = first, .context = context};
        pthread_setspecific(own_streams, one);
    }
    if (one && vc_table_get(&contexts, (uint64_t)(uintptr_t)context, &known)) {
        one->life = known.life;
        one->seen = epoch;
    }
    return paid(epoch);
}

/* A reset sets limits back, too. */
static void context_ended(CUcontext context)
{
    struct context old;
    vc_add(&vc__streams_epoch, 1);
    if (!vc_table_take(&contexts, (uint64_t)(uintptr_t)context, &old))
        return;
    for (int part = 0; part < PARTS; part++)
        vc_cards_release(old.cards, old.bytes[part], VC_QUOTA_PLAIN);
}

static const struct vc_source context_memory = {.context_ended = context_ended};
VC_SOURCE(context_memory);
