/* Contexts: each thread's stack of them, created ones and the devices' primary ones. */
#include "cu_context.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cu_memory.h"

enum { STACK = 64 };
static _Thread_local CUcontext stack[STACK];
static _Thread_local int depth;

CUresult cu_usable(CUcontext ctx)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    if (!ctx || ctx->magic != CU_MAGIC_CONTEXT)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!ctx->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return atomic_load_explicit(&ctx->error, memory_order_relaxed);
}

CUresult cu_current(CUcontext *ctx)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    *ctx = depth ? stack[depth - 1] : NULL;
    return *ctx ? cu_usable(*ctx) : CUDA_ERROR_INVALID_CONTEXT;
}

sim_card *cu_card(const struct CUctx_st *ctx)
{
    return sim_card_at(cu_process.state, ctx->card);
}

/* A card that fell off the bus answers nothing any more; its contexts stay broken. */
CUresult cu_lost(CUcontext ctx)
{
    atomic_store(&ctx->error, CUDA_ERROR_UNKNOWN);
    return CUDA_ERROR_UNKNOWN;
}

static void wait_for(uint64_t ns)
{
    nanosleep(&(struct timespec){(time_t)(ns / 1000000000u), (long)(ns % 1000000000u)}, NULL);
}

/* Its place on the card; negative: there is no room. */
static CUresult take_place(sim_state *state, int on, int32_t *index)
{
    sim_card *card = sim_card_at(state, on);
    const uint64_t bytes = card->config.context_bytes;
    sim_card_lock(state, on);
    const int lost = card->faults.lost;
    if (!lost && (*index = sim_context_create(state, card, bytes)) < 0) {
        sim_reap(state, on); /* the newest deaths may have freed what is missing */
        *index = sim_context_create(state, card, bytes);
    }
    sim_card_unlock(state, on);
    return lost ? CUDA_ERROR_DEVICE_UNAVAILABLE : *index < 0 ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

/* Where that takes time, contexts are made one after another, whichever process asks; the memory is taken half way. */
static CUresult take_turn(sim_state *state, int on, int32_t *index)
{
    const uint64_t half = sim_card_at(state, on)->config.context_ns / 2;
    if (!half)
        return take_place(state, on, index);
    if (sim_lock(&state->shared->making_mutex))
        pthread_mutex_consistent(&state->shared->making_mutex);
    wait_for(half);
    const CUresult result = take_place(state, on, index);
    wait_for(half);
    pthread_mutex_unlock(&state->shared->making_mutex);
    return result;
}

static CUresult revive(CUcontext ctx, unsigned flags)
{
    sim_state *state = cu_process.state;
    int32_t index;
    sim_slow_call(state, ctx->card);
    CUresult bad = take_turn(state, ctx->card, &index);
    if (bad)
        return bad;
    ctx->index = index;
    ctx->flags = flags;
    ctx->error = 0;
    ctx->peers = 0;
    ctx->id = atomic_fetch_add(&cu_process.next_id, 1) + 1;
    memcpy(ctx->limits, cu_default_limits, sizeof ctx->limits);
    memcpy(ctx->held_limits, cu_default_limits, sizeof ctx->held_limits);
    ctx->frame = 0;
    ctx->held = 0;
    ctx->streams_most = 0;
    ctx->cache_config = 0;
    ctx->shared_config = 1;
    ctx->alive = 1;
    bad = cu_stream_new(ctx, 0, 0, 1, &ctx->legacy);
    if (bad)
        cu_context_end(ctx);
    return bad;
}

static CUcontext new_context(CUdevice device, int primary)
{
    CUcontext ctx = calloc(1, sizeof *ctx);
    if (ctx) {
        ctx->magic = CU_MAGIC_CONTEXT;
        ctx->device = device;
        ctx->card = cu_process.devices[device].card;
        ctx->primary = primary;
        ctx->api_version = 3020;
    }
    return ctx;
}

void cu_context_end(CUcontext ctx)
{
    sim_state *state = cu_process.state;
    ctx->alive = 0;
    cu_streams_end(ctx);
    cu_events_end(ctx);
    cu_modules_end(ctx);
    cu_memory_end(ctx);
    sim_card_lock(state, ctx->card);
    sim_context_destroy(sim_card_at(state, ctx->card), ctx->index);
    sim_card_unlock(state, ctx->card);
    ctx->legacy = NULL;
}

static CUresult create(CUcontext *ctx, unsigned flags, CUdevice device)
{
    cu_device *found;
    CUresult bad = cu_device_of(device, &found);
    if (bad || !ctx || (flags & 7u) > 4 || (flags & 7u) == 3 || flags > 0xff || depth == STACK)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    CUcontext made = new_context(device, 0);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bad = revive(made, flags);
    if (bad) {
        free(made);
        return bad;
    }
    stack[depth++] = made;
    *ctx = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice device)
{
    return create(ctx, flags, device);
}

CU_EXPORT CUresult cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice device)
{
    return create(ctx, flags, device);
}

CU_EXPORT CUresult cuCtxCreate_v3(CUcontext *ctx, CUexecAffinityParam *params, int count, unsigned int flags,
                                  CUdevice device)
{
    if (params || count)
        return CUDA_ERROR_NOT_SUPPORTED; /* execution affinity needs MPS */
    return create(ctx, flags, device);
}

CU_EXPORT CUresult cuCtxDestroy_v2(CUcontext ctx)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    if (!ctx || ctx->magic != CU_MAGIC_CONTEXT || ctx->primary || !ctx->alive)
        return ctx && ctx->magic == CU_MAGIC_CONTEXT && !ctx->primary ? CUDA_ERROR_CONTEXT_IS_DESTROYED
                                                                     : CUDA_ERROR_INVALID_CONTEXT;
    if (!ctx->error)
        cu_context_wait(ctx);
    cu_context_end(ctx);
    if (depth && stack[depth - 1] == ctx)
        depth--;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxDestroy(CUcontext ctx)
{
    return cuCtxDestroy_v2(ctx);
}

CU_EXPORT CUresult cuCtxAttach(CUcontext *ctx, unsigned int flags)
{
    if (!ctx || flags)
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult bad = cu_current(ctx);
    if (!bad)
        (*ctx)->attached++;
    return bad;
}

CU_EXPORT CUresult cuCtxDetach(CUcontext ctx)
{
    if (!ctx || ctx->magic != CU_MAGIC_CONTEXT || !ctx->alive || !ctx->attached)
        return cuCtxDestroy_v2(ctx);
    ctx->attached--;
    return CUDA_SUCCESS;
}

/* ---- the thread's stack ---- */

CU_EXPORT CUresult cuCtxPushCurrent_v2(CUcontext ctx)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    if (!ctx || ctx->magic != CU_MAGIC_CONTEXT || depth == STACK)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!ctx->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    stack[depth++] = ctx;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxPushCurrent(CUcontext ctx)
{
    return cuCtxPushCurrent_v2(ctx);
}

CU_EXPORT CUresult cuCtxPopCurrent_v2(CUcontext *ctx)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    while (depth && !stack[depth - 1])
        depth--;
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (ctx)
        *ctx = stack[depth];
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxPopCurrent(CUcontext *ctx)
{
    return cuCtxPopCurrent_v2(ctx);
}

CU_EXPORT CUresult cuCtxSetCurrent(CUcontext ctx)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    if (ctx && ctx->magic != CU_MAGIC_CONTEXT)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx && !ctx->alive)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    if (!ctx) {
        depth -= depth > 0;
        return CUDA_SUCCESS;
    }
    if (!depth)
        depth = 1;
    stack[depth - 1] = ctx;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuCtxGetCurrent(CUcontext *ctx)
{
    const CUresult bad = cu_initialised();
    if (bad || !ctx)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *ctx = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

/* ---- primary contexts ---- */

CU_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device)
{
    cu_device *found;
    CUresult bad = cu_device_of(device, &found);
    if (bad || !ctx)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_primary_mutex);
    if (!found->primary)
        found->primary = new_context(device, 1);
    if (!found->primary)
        bad = CUDA_ERROR_OUT_OF_MEMORY;
    else if (!found->primary->alive)
        bad = revive(found->primary, found->primary_flags);
    if (!bad) {
        found->primary_count++;
        *ctx = found->primary;
    }
    pthread_mutex_unlock(&cu_primary_mutex);
    return bad;
}

CU_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    cu_device *found;
    CUresult bad = cu_device_of(device, &found);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_primary_mutex);
    if (!found->primary_count) {
        bad = CUDA_ERROR_INVALID_CONTEXT;
    } else if (--found->primary_count == 0 && found->primary->alive) {
        if (!found->primary->error)
            cu_context_wait(found->primary);
        cu_context_end(found->primary);
    }
    pthread_mutex_unlock(&cu_primary_mutex);
    return bad;
}

CU_EXPORT CUresult cuDevicePrimaryCtxRelease(CUdevice device)
{
    return cuDevicePrimaryCtxRelease_v2(device);
}

/* All that the context and the device's pools have goes; "resetting the primary context does not release it" (cuda.h): who
 * retained it finds it empty, under the same handle. */
static CUresult reset(cu_device *found, CUdevice device)
{
    CUcontext ctx = found->primary;
    if (ctx && ctx->alive) {
        if (!ctx->error)
            cu_context_wait(ctx);
        cu_context_end(ctx);
    }
    pthread_mutex_lock(&cu_lock);
    cu_order_settle();
    cu_pools_reset(device);
    pthread_mutex_unlock(&cu_lock);
    return found->primary_count ? revive(ctx, found->primary_flags) : CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    cu_device *found;
    CUresult bad = cu_device_of(device, &found);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_primary_mutex);
    bad = reset(found, device);
    pthread_mutex_unlock(&cu_primary_mutex);
    return bad;
}

CU_EXPORT CUresult cuDevicePrimaryCtxReset(CUdevice device)
{
    return cuDevicePrimaryCtxReset_v2(device);
}

CU_EXPORT CUresult cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad || flags > 0xff)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    found->primary_flags = flags;
    if (found->primary)
        found->primary->flags = flags;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (!bad && found->primary && found->primary->alive)
        return CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE;
    return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

CU_EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    cu_device *found;
    const CUresult bad = cu_device_of(device, &found);
    if (bad)
        return bad;
    if (flags)
        *flags = found->primary_flags;
    if (active)
        *active = found->primary && found->primary->alive;
    return CUDA_SUCCESS;
}
