/* The kernels that do something: they write a pattern into memory and look for it there, count a condition down, launch a graph.
 *
 *   sim_fill(u64 pointer, u64 bytes, u64 step, u64 seed)
 *   sim_check(u64 pointer, u64 bytes, u64 step, u64 seed, u64 wrong)
 *   sim_count_down(u64 condition, u64 by)      of a conditional node's handle, not below 0
 *   sim_launch(u64 exec)                       a graph instantiated for launches from the card: takes the time of its kernels
 *
 * Each eight bytes at pointer + 0, step, 2 step … become (or must be) seed + their offset; sim_check adds the number of those
 * that differ to the u64 at `wrong`. So a test can show that memory is there and its own without the host having to back all
 * of it: a step of 2 MiB touches one page in 512. An address that the context's card can't reach is, as on a card, an
 * illegal address for all that the context does from then on. They act when they are submitted, as copies do.
 */
#include <string.h>
#include <sys/mman.h>

#include "cu_exec.h"
#include "cu_module.h"
#include "cu_pool.h"

enum { POINTER, BYTES, STEP, SEED, WRONG, PARAMS };

static int argument(const cu_kernel_work *kernel, size_t at, uint64_t *value)
{
    if (kernel->params) {
        memcpy(value, kernel->params[at], sizeof *value);
        return 0;
    }
    const unsigned char *buffer = NULL;
    size_t bytes = 0;
    for (void **extra = kernel->extra; extra && *extra; extra += 2) {
        if (*extra == (void *)1) /* CU_LAUNCH_PARAM_BUFFER_POINTER */
            buffer = extra[1];
        else if (*extra == (void *)2) /* CU_LAUNCH_PARAM_BUFFER_SIZE */
            bytes = *(const size_t *)extra[1];
    }
    if (!buffer || kernel->function->params[at].offset + sizeof *value > bytes)
        return -1;
    memcpy(value, buffer + kernel->function->params[at].offset, sizeof *value);
    return 0;
}

static int reaches(CUcontext ctx, cu_block *block, int writes)
{
    switch (block->kind) {
    case CU_BLOCK_HOST:
        return 1;
    case CU_BLOCK_MANAGED:
        if (!block->charged)
            cu_managed_move(block, ctx->device);
        return 1;
    case CU_BLOCK_VMM:
        return (block->flags & (writes ? PROT_WRITE : PROT_READ)) != 0;
    case CU_BLOCK_GRAPH:
        return block->uses > 0 && block->device == ctx->device;
    case CU_BLOCK_POOL:
        return block->device == ctx->device || (block->pool->reached_by >> ctx->device & 1);
    default:
        return block->device == ctx->device || (ctx->peers >> block->device & 1);
    }
}

/* Whether the card reaches all of the range, which may lie in several mappings side by side. cu_lock held. */
static int reachable(CUcontext ctx, uintptr_t start, size_t bytes, int writes)
{
    for (uintptr_t at = start; at < start + bytes;) {
        cu_block *block = cu_find(at);
        if (!block || !reaches(ctx, block, writes))
            return 0;
        at = block->start + block->bytes;
    }
    return 1;
}

static int touch(CUcontext ctx, const uint64_t *given, int checks)
{
    const uint64_t bytes = given[BYTES], step = given[STEP] < 8 ? 8 : given[STEP];
    const uintptr_t start = (uintptr_t)given[POINTER];
    if (start + bytes < start || !reachable(ctx, start, bytes, !checks) ||
        (checks && !reachable(ctx, (uintptr_t)given[WRONG], sizeof(uint64_t), 1)))
        return -1;
    uint64_t wrong = 0, found;
    for (uint64_t at = 0; at + sizeof found <= bytes; at += step) {
        const uint64_t wanted = given[SEED] + at;
        if (checks) {
            memcpy(&found, (const void *)(start + at), sizeof found);
            wrong += found != wanted;
        } else {
            memcpy((void *)(start + at), &wanted, sizeof wanted);
        }
    }
    if (checks) {
        memcpy(&found, (const void *)(uintptr_t)given[WRONG], sizeof found);
        found += wrong;
        memcpy((void *)(uintptr_t)given[WRONG], &found, sizeof found);
    }
    return 0;
}

typedef enum { NOTHING, FILL, CHECK, COUNT_DOWN, LAUNCH } deed;

static deed deed_of(const struct CUfunc_st *function, size_t *count)
{
    static const struct {
        const char *name;
        size_t params;
    } deeds[] = {[FILL] = {"sim_fill", 4}, [CHECK] = {"sim_check", 5}, [COUNT_DOWN] = {"sim_count_down", 2}, [LAUNCH] = {"sim_launch", 1}};
    if (strncmp(function->name, "sim_", 4))
        return NOTHING;
    for (int i = FILL; i <= LAUNCH; i++) {
        *count = deeds[i].params;
        if (!strcmp(function->name, deeds[i].name) && function->param_count == *count)
            return (deed)i;
    }
    return NOTHING;
}

static int arguments(const cu_kernel_work *kernel, size_t count, uint64_t *given)
{
    int bad = 0;
    for (size_t i = 0; !bad && i < count; i++)
        bad = argument(kernel, i, &given[i]);
    return bad;
}

void cu_kernel_touch(CUcontext ctx, const cu_kernel_work *kernel)
{
    uint64_t given[PARAMS] = {0};
    size_t count;
    const deed what = deed_of(kernel->function, &count);
    if (what == NOTHING || what == LAUNCH)
        return;
    int bad = arguments(kernel, count, given);
    pthread_mutex_lock(&cu_lock);
    if (!bad)
        bad = what == COUNT_DOWN ? cu_conditional_count_down(given[0], given[1]) : touch(ctx, given, what == CHECK);
    pthread_mutex_unlock(&cu_lock);
    if (bad)
        atomic_store(&ctx->error, CUDA_ERROR_ILLEGAL_ADDRESS);
}

uint64_t cu_kernel_launches_ns(const cu_kernel_work *kernel)
{
    uint64_t exec = 0;
    size_t count;
    if (deed_of(kernel->function, &count) != LAUNCH || argument(kernel, 0, &exec))
        return 0;
    return cu_exec_kernels_ns((CUgraphExec)(uintptr_t)exec);
}
