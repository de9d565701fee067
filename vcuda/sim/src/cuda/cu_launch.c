/* Launches, and where submitted work goes: into the stream, or into the graph that is being captured. */
#include <stdlib.h>
#include <string.h>

#include "cu_capture.h"
#include "cu_module.h"

enum { MAX_THREADS = 1024, MAX_SHARED = 232448, COOPERATIVE_BLOCKS_PER_SM = 16, MAX_CLUSTER = 16, LOCAL_SIZE = 3 };

uint64_t cu_kernel_op_ns(const cu_kernel_work *kernel)
{
    const uint64_t blocks = (uint64_t)kernel->grid[0] * kernel->grid[1] * kernel->grid[2];
    return sim_kernel_ns(cu_process.state, kernel->function->name, blocks, sim_now(), &kernel->function->time) +
           cu_kernel_launches_ns(kernel);
}

CUresult cu_kernel_memory(CUcontext ctx, const cu_kernel_work *kernel)
{
    const CUresult bad = cu_module_need(kernel->function->module, ctx);
    return bad ? bad : cu_context_launches(ctx, (size_t)kernel->function->attributes[LOCAL_SIZE]);
}

/* A fault injected into a launch shows, as a real one, in the context and whatever is called on it next. */
static int take_launch_fault(CUcontext ctx)
{
    sim_faults *faults = &cu_card(ctx)->faults;
    int32_t armed = atomic_load_explicit(&faults->fault_launch, memory_order_relaxed);
    if (!armed || !atomic_compare_exchange_strong(&faults->fault_launch, &armed, 0))
        return 0;
    atomic_store(&ctx->error, CUDA_ERROR_ILLEGAL_ADDRESS);
    return 1;
}

CUresult cu_run(CUstream stream, const cu_work *work, sim_ticket *ticket)
{
    sim_op op;
    CUresult bad;
    switch ((int)work->kind) {
    case CU_GRAPH_NODE_TYPE_HOST:
        bad = cu_host_push(stream, work->host.fn, NULL, work->host.userData);
        return bad || !ticket ? bad : cu_push(stream, NULL, 0, ticket);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return cu_event_record(work->event, stream, ticket);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return cu_event_wait(work->event, stream, ticket);
    default:
        bad = cu_effect(stream->ctx, work, &op);
        return bad ? bad : cu_push(stream, &op, 1, ticket);
    }
}

CUresult cu_submit(CUstream stream, const cu_work *work)
{
    if (atomic_load_explicit(&stream->capture, memory_order_acquire))
        return cu_capture_add(stream, work, NULL);
    const CUresult bad = cu_capture_implicit(stream);
    return bad ? bad : cu_run(stream, work, NULL);
}

static CUresult launch(CUstream handle, cu_kernel_work kernel, int cooperative)
{
    CUstream stream;
    CUresult bad = cu_stream_of(handle, &stream);
    if (bad)
        return bad;
    bad = cu_function_of(kernel.function);
    if (bad)
        return bad;
    const uint64_t threads = (uint64_t)kernel.block[0] * kernel.block[1] * kernel.block[2];
    const uint64_t blocks = (uint64_t)kernel.grid[0] * kernel.grid[1] * kernel.grid[2];
    if (!blocks || !threads || threads > MAX_THREADS || kernel.grid[0] > 0x7fffffffu || kernel.grid[1] > 65535 ||
        kernel.grid[2] > 65535 || kernel.block[2] > 64 || kernel.shared_bytes > MAX_SHARED)
        return CUDA_ERROR_INVALID_VALUE;
    const sim_card_config *config = &cu_card(stream->ctx)->config;
    if (cooperative && blocks > (uint64_t)config->sms * COOPERATIVE_BLOCKS_PER_SM)
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    sim_slow_call(cu_process.state, stream->ctx->card);
    cu_work work = {.kind = CU_GRAPH_NODE_TYPE_KERNEL};
    work.kernel = kernel;
    if (atomic_load_explicit(&stream->capture, memory_order_acquire))
        return cu_capture_add(stream, &work, NULL);
    bad = cu_capture_implicit(stream);
    if (!bad)
        bad = cu_kernel_memory(stream->ctx, &kernel);
    if (bad)
        return bad;
    const sim_op op = {.kind = SIM_OP_WORK, .event = 1, .ns = cu_kernel_op_ns(&work.kernel)};
    cu_kernel_touch(stream->ctx, &work.kernel);
    bad = cu_push(stream, &op, 1, NULL);
    if (!bad)
        take_launch_fault(stream->ctx);
    return bad;
}

#define KERNEL                                                                                                   \
    (cu_kernel_work)                                                                                             \
    {                                                                                                            \
        function, {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, params, extra             \
    }

CU_EXPORT CUresult cuLaunchKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                  unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                  unsigned int shared_bytes, CUstream stream, void **params, void **extra)
{
    return launch(stream, KERNEL, 0);
}

CU_EXPORT CUresult cuLaunchKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y, unsigned int grid_z,
                                       unsigned int block_x, unsigned int block_y, unsigned int block_z,
                                       unsigned int shared_bytes, CUstream stream, void **params, void **extra)
{
    return launch(stream ? stream : CU_STREAM_PER_THREAD, KERNEL, 0);
}

CU_EXPORT CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                             unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                             unsigned int block_z, unsigned int shared_bytes, CUstream stream, void **params)
{
    void **extra = NULL;
    return launch(stream, KERNEL, 1);
}

CU_EXPORT CUresult cuLaunchCooperativeKernel_ptsz(CUfunction function, unsigned int grid_x, unsigned int grid_y,
                                                  unsigned int grid_z, unsigned int block_x, unsigned int block_y,
                                                  unsigned int block_z, unsigned int shared_bytes, CUstream stream,
                                                  void **params)
{
    void **extra = NULL;
    return launch(stream ? stream : CU_STREAM_PER_THREAD, KERNEL, 1);
}

/* Attributes with something behind them here: cooperation, clusters that must divide the grid, events of the launch. That a
 * kernel may begin before the one ahead of it ends is a permission, of which no use is made. */
typedef struct {
    int cooperative;
    CUevent begun, done; /* when all of its blocks have begun, or have said that they are through */
} launch_attributes;

static CUresult read_attributes(const CUlaunchConfig *config, launch_attributes *found)
{
    *found = (launch_attributes){0};
    for (unsigned i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttributeValue *value = &config->attrs[i].value;
        switch ((int)config->attrs[i].id) {
        case CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            found->cooperative = value->cooperative;
            break;
        case CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            if (!value->clusterDim.x || !value->clusterDim.y || !value->clusterDim.z ||
                config->gridDimX % value->clusterDim.x || config->gridDimY % value->clusterDim.y ||
                config->gridDimZ % value->clusterDim.z ||
                (uint64_t)value->clusterDim.x * value->clusterDim.y * value->clusterDim.z > MAX_CLUSTER)
                return CUDA_ERROR_INVALID_CLUSTER_SIZE;
            break;
        case CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT:
            *(value->programmaticEvent.triggerAtBlockStart ? &found->begun : &found->done) = value->programmaticEvent.event;
            break;
        case CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT:
            found->begun = value->launchCompletionEvent.event;
            break;
        default:
            break;
        }
    }
    return CUDA_SUCCESS;
}

static CUresult launch_ex(const CUlaunchConfig *config, CUfunction function, void **params, void **extra, int per_thread)
{
    CUstream stream;
    launch_attributes attributes;
    if (!config || (config->numAttrs && !config->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult bad = read_attributes(config, &attributes);
    const cu_kernel_work kernel = {function,
                                   {config->gridDimX, config->gridDimY, config->gridDimZ},
                                   {config->blockDimX, config->blockDimY, config->blockDimZ},
                                   config->sharedMemBytes,
                                   params,
                                   extra};
    const CUstream handle = !config->hStream && per_thread ? CU_STREAM_PER_THREAD : config->hStream;
    if (!bad && (attributes.begun || attributes.done))
        bad = cu_stream_of(handle, &stream);
    if (!bad && attributes.begun && !stream->capture)
        bad = cu_event_record(attributes.begun, stream, NULL);
    if (!bad)
        bad = launch(handle, kernel, attributes.cooperative);
    if (!bad && attributes.done && !stream->capture)
        bad = cu_event_record(attributes.done, stream, NULL);
    return bad;
}

CU_EXPORT CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    return launch_ex(config, function, params, extra, 0);
}

CU_EXPORT CUresult cuLaunchKernelEx_ptsz(const CUlaunchConfig *config, CUfunction function, void **params, void **extra)
{
    return launch_ex(config, function, params, extra, 1);
}

/* ---- the launches of CUDA 2 ---- */

CU_EXPORT CUresult cuFuncSetBlockShape(CUfunction function, int x, int y, int z)
{
    const CUresult bad = cu_function_of(function);
    if (bad || x < 1 || y < 1 || z < 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    memcpy(function->legacy_block, (unsigned[3]){(unsigned)x, (unsigned)y, (unsigned)z}, sizeof function->legacy_block);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    const CUresult bad = cu_function_of(function);
    if (bad || width < 1 || height < 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    cu_kernel_work kernel = {.function = function, .grid = {(unsigned)width, (unsigned)height, 1}};
    memcpy(kernel.block, function->legacy_block, sizeof kernel.block);
    return launch(stream, kernel, 0);
}

CU_EXPORT CUresult cuLaunchGrid(CUfunction function, int width, int height)
{
    return cuLaunchGridAsync(function, width, height, NULL);
}

CU_EXPORT CUresult cuLaunch(CUfunction function)
{
    return cuLaunchGridAsync(function, 1, 1, NULL);
}
