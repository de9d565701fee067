/* Steps: plain, pitched, managed and pinned memory, what is asked of it, and memory of pools. */
#include <stdlib.h>
#include <string.h>

#include "model.h"

static struct pointer *pointer_of(struct dice *dice)
{
    return &world.pointers[roll(dice, POINTERS)];
}

static void forget(struct pointer *one)
{
    if (one->kind < OPENED || one->kind == POOLED)
        world.stale[(one - world.pointers) % 4] = one->at;
    *one = (struct pointer){0};
}

/* By the call that belongs to it, or by the other one, which is allowed too. */
static void give(struct dice *dice, struct pointer *one)
{
    if (one->kind == OPENED) {
        say(" cuIpcCloseMemHandle = %d", cuIpcCloseMemHandle(one->at));
        forget(one);
        return;
    }
    const bool other = !roll(dice, 8) && (one->kind >= POOLED || wanted("ordered_plain"));
    const bool ordered = (one->kind >= POOLED) != other;
    CUstream stream = some_stream(dice, NULL);
    if (one->kind == MANAGED && ordered) {
        say(" managed memory is not stream-ordered");
        return;
    }
    const int result = ordered ? cuMemFreeAsync(one->at, stream) : cuMemFree_v2(one->at);
    say(" %s kind %d = %d", ordered ? "cuMemFreeAsync" : "cuMemFree", one->kind, result);
    if (!result || one->kind == CAPTURED)
        forget(one);
}

static void keep(struct pointer *one, int result, CUdeviceptr at, size_t bytes, int kind)
{
    say(" = %d", result);
    if (!result && at)
        *one = (struct pointer){at, bytes, kind, world.current, NONE};
}

/* Of an allocation on the current context's card. */
static void judge(int result, size_t bytes)
{
    if (world.current != NONE)
        books_judge(result, world.contexts[world.current].device, bytes);
}

static void plain(struct dice *dice)
{
    struct pointer *one = pointer_of(dice);
    CUdeviceptr at = 0;
    if (one->kind) {
        give(dice, one);
        return;
    }
    const size_t bytes = roll_bytes(dice);
    say(" cuMemAlloc %zu", bytes);
    const int result = cuMemAlloc_v2(&at, bytes);
    keep(one, result, at, bytes, PLAIN);
    judge(result, bytes);
}

static void pitched(struct dice *dice)
{
    struct pointer *one = pointer_of(dice);
    CUdeviceptr at = 0;
    if (one->kind) {
        give(dice, one);
        return;
    }
    size_t pitch = 0, width = 1 + roll(dice, 5000), height = roll(dice, 2000);
    const unsigned element = 4u << roll(dice, 4);
    const int result = cuMemAllocPitch_v2(&at, &pitch, width, height, element);
    say(" cuMemAllocPitch %zu x %zu, %u, pitch %zu", width, height, element, result ? 0 : pitch);
    keep(one, result, at, width * height, PLAIN);
}

/* Not above what a card has: natively that lies on the host, and docs/memory.md says that a share refuses it. */
static void managed(struct dice *dice)
{
    struct pointer *one = pointer_of(dice);
    CUdeviceptr at = 0;
    if (one->kind) {
        give(dice, one);
        return;
    }
    const size_t bytes = roll(dice, roll(dice, 4) ? 1 << 20 : 20 << 20);
    const unsigned flags = roll(dice, 10) ? 1 + roll(dice, 2) : roll(dice, 8);
    say(" cuMemAllocManaged %zu, %u", bytes, flags);
    const int result = cuMemAllocManaged(&at, bytes, flags);
    keep(one, result, at, bytes, MANAGED);
    int fullest = 0; /* it needs room on every card (docs/memory.md) */
    for (int card = 1; card < world.devices; card++)
        fullest = books_room(card) < books_room(fullest) ? card : fullest;
    books_judge(result, fullest, bytes);
}

static void stale(struct dice *dice)
{
    const CUdeviceptr at = world.stale[roll(dice, 4)] + (roll(dice, 4) ? 0 : 512);
    for (int i = 0; i < POINTERS; i++)
        if (at == world.pointers[i].at) {
            say(" is taken again");
            return;
        }
    CUstream stream = some_stream(dice, NULL);
    const bool ordered = roll(dice, 2);
    say(" %s %s = %d", ordered ? "cuMemFreeAsync" : "cuMemFree", at > 512 ? "freed before" : "nowhere",
        ordered ? cuMemFreeAsync(at, stream) : cuMemFree_v2(at));
}

static void written(struct dice *dice)
{
    const struct pointer *one = pointer_of(dice);
    unsigned char back[8] = {0};
    if (one->kind != PLAIN && one->kind != MANAGED)
        return;
    const size_t most = one->bytes < 4096 ? one->bytes : 4096, count = most < sizeof back ? most : sizeof back;
    const int set = cuMemsetD8_v2(one->at, (unsigned char)roll(dice, 256), most);
    const int read = cuMemcpyDtoH_v2(back, one->at + most - count, count);
    say(" cuMemsetD8 %zu = %d, cuMemcpyDtoH %zu = %d %d", most, set, count, read, read ? 0 : back[0] + back[count ? count - 1 : 0]);
}

static void asked(struct dice *dice)
{
    const struct pointer *one = pointer_of(dice);
    CUdeviceptr start = 0;
    size_t bytes = 0;
    int type = -1, of = -1;
    if (!one->kind)
        return;
    const CUdeviceptr at = one->at + (one->bytes ? roll(dice, (unsigned)(one->bytes < 4096 ? one->bytes : 4096)) : 0);
    const int result = cuMemGetAddressRange_v2(&start, &bytes, at);
    say(" cuMemGetAddressRange = %d %zu %d", result, result ? 0 : bytes, !result && start == one->at);
    const int first = cuPointerGetAttribute(&type, 2, at), second = cuPointerGetAttribute(&of, 9, at);
    say(", type = %d %d, device = %d %d", first, first ? 0 : type, second, second ? 0 : of);
}

static void prefetched(struct dice *dice)
{
    const struct pointer *one = pointer_of(dice);
    const int device = (int)roll(dice, (unsigned)world.devices + 1) - 1;
    CUstream stream = some_stream(dice, NULL);
    if (one->kind == MANAGED)
        say(" cuMemPrefetchAsync to %d = %d", device, cuMemPrefetchAsync(one->at, one->bytes, device, stream));
}

static void host(struct dice *dice)
{
    const unsigned which = roll(dice, HOSTS);
    if (world.hosts[which]) {
        const int result = cuMemFreeHost(world.hosts[which]);
        say(" cuMemFreeHost = %d", result);
        if (!result)
            world.hosts[which] = NULL;
        return;
    }
    void *at = NULL;
    const size_t bytes = roll(dice, 1 << 20);
    const int result = cuMemHostAlloc(&at, bytes, roll(dice, 9));
    say(" cuMemHostAlloc %zu = %d", bytes, result);
    if (!result)
        world.hosts[which] = at;
    world.host_context[which] = world.current;
}

/* Each pointer by a context of its own, as its owner may not be the current one. */
static void end_pointers(void)
{
    for (int i = 0; i < POINTERS; i++) {
        struct pointer *one = &world.pointers[i];
        if (one->kind)
            say(" %d", one->kind == OPENED   ? cuIpcCloseMemHandle(one->at)
                       : one->kind >= POOLED ? cuMemFreeAsync(one->at, NULL)
                                             : cuMemFree_v2(one->at));
        *one = (struct pointer){0};
    }
    for (int i = 0; i < HOSTS; i++)
        if (world.hosts[i])
            say(" %d", cuMemFreeHost(world.hosts[i]));
    memset(world.hosts, 0, sizeof world.hosts);
}

const struct kind memory_kinds[] = {
    {"plain", 30, true, plain, end_pointers}, {"pitched", 6, true, pitched, NULL}, {"managed", 8, true, managed, NULL},
    {"stale", 2, true, stale, NULL},          {"written", 6, true, written, NULL}, {"asked", 3, true, asked, NULL},
    {"host", 3, true, host, NULL}, {"prefetched", 2, true, prefetched, NULL},            {0},
};

/* ---- pools ---- */

static CUmemoryPool some_pool(struct dice *dice, int *device)
{
    const unsigned which = roll(dice, POOLS + 2);
    CUmemoryPool pool = NULL;
    if (which < POOLS && world.pools[which]) {
        *device = world.pool_device[which];
        return world.pools[which];
    }
    *device = (int)roll(dice, (unsigned)world.devices);
    const int result = cuDeviceGetDefaultMemPool(&pool, *device);
    say(" cuDeviceGetDefaultMemPool %d = %d", *device, result);
    return result ? NULL : pool;
}

static void ordered(struct dice *dice)
{
    struct pointer *one = pointer_of(dice);
    CUdeviceptr at = 0;
    int device, index;
    if (one->kind) {
        give(dice, one);
        return;
    }
    CUstream stream = some_stream(dice, &index);
    const bool own = roll(dice, 2);
    CUmemoryPool pool = own ? some_pool(dice, &device) : NULL;
    if (own && !pool)
        return;
    const size_t bytes = roll_bytes(dice), step = 32 * MIB, card = (size_t)64 << 30;
    for (int i = 0; own && i < POOLS; i++)
        if (pool == world.pools[i] && world.pool_managed[i] && bytes > card)
            return; /* on the host there is room for what is beyond every card; a share charges it in full, and refuses it */
    const bool capturing = index >= 0 && world.streams[index].capturing;
    say(" %s %zu", own ? "cuMemAllocFromPoolAsync" : "cuMemAllocAsync", bytes);
    const int result = own ? cuMemAllocFromPoolAsync(&at, bytes, pool, stream) : cuMemAllocAsync(&at, bytes, stream);
    keep(one, result, at, bytes, capturing ? CAPTURED : POOLED);
    bool bounded = getenv("VCUDA_SIM_POOLS") != NULL; /* these pools grow by more than is asked for */
    for (int i = 0; own && i < POOLS; i++)
        bounded |= pool == world.pools[i] && world.pool_bounded[i];
    if (own && !bounded) /* by steps of a pool: docs/memory.md, "The last of a share" */
        books_judge(result, device, bytes > card ? bytes : (bytes / step + 1) * step);
    const int context = index >= 0 ? world.streams[index].context : world.current;
    if (!result && at)
        one->card = own ? device : context != NONE ? world.contexts[context].device : NONE;
}

static void pool(struct dice *dice)
{
    const unsigned which = roll(dice, POOLS);
    if (world.pools[which]) {
        uint64_t used = 0;
        if (!wanted("pool_in_use") && (cuMemPoolGetAttribute(world.pools[which], 7, &used) || used))
            return;
        const int result = cuMemPoolDestroy(world.pools[which]);
        say(" cuMemPoolDestroy = %d", result);
        world.pools[which] = NULL; /* it is refused if a reset has ended it before */
        return;
    }
    CUmemPoolProps properties = {.handleTypes = roll(dice, 2) ? 0 : 1, .allocType = roll(dice, 20) || !wanted("managed_pools") ? 1 : (int)roll(dice, 3)};
    properties.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, (int)roll(dice, (unsigned)world.devices)};
    properties.maxSize = roll(dice, 6) || !wanted("most") ? 0 : roll(dice, 64 << 20);
    const int result = cuMemPoolCreate(&world.pools[which], &properties);
    say(" cuMemPoolCreate %d on %d most %zu = %d", properties.allocType, properties.location.id, properties.maxSize, result);
    if (result)
        world.pools[which] = NULL;
    world.pool_device[which] = properties.location.id;
    world.pool_managed[which] = properties.allocType == 2;
    world.pool_bounded[which] = properties.maxSize != 0;
}

static void pool_told(struct dice *dice)
{
    int device;
    CUmemoryPool pool = some_pool(dice, &device);
    uint64_t value = roll(dice, 3) ? (uint64_t)roll(dice, 128) << 20 : UINT64_MAX;
    if (!pool)
        return;
    switch (roll(dice, 4)) {
    case 0:
        say(" cuMemPoolSetAttribute threshold %llu = %d", (unsigned long long)value, cuMemPoolSetAttribute(pool, 4, &value));
        break;
    case 1:
        value = roll(dice, 3) ? 0 : value;
        say(" cuMemPoolTrimTo %llu = %d", (unsigned long long)value, cuMemPoolTrimTo(pool, (size_t)value));
        break;
    case 2:
        say(" cuDeviceSetMemPool %d = %d", device, cuDeviceSetMemPool(device, pool));
        break;
    default: {
        CUmemoryPool found = NULL;
        const int result = cuDeviceGetMemPool(&found, device);
        int which = NONE;
        for (int i = 0; i < POOLS; i++)
            which = found && found == world.pools[i] ? i : which;
        say(" cuDeviceGetMemPool %d = %d %d", device, result, which);
    }
    }
}

static void pool_asked(struct dice *dice)
{
    int device;
    CUmemoryPool pool = some_pool(dice, &device);
    for (int number = 3; pool && number <= 8; number++) {
        uint64_t value = 0;
        const int result = cuMemPoolGetAttribute(pool, number, &value);
        /* What is reserved and used depends on when a stream came to its end. */
        say(" %d = %d %llu", number, result, number < 5 ? (unsigned long long)value : 0);
    }
}

static void end_pools(void)
{
    for (int i = 0; i < POOLS; i++)
        if (world.pools[i])
            say(" %d", cuMemPoolDestroy(world.pools[i]));
    memset(world.pools, 0, sizeof world.pools);
    for (int device = 0; device < world.devices; device++) {
        CUmemoryPool pool = NULL;
        const int result = cuDeviceGetDefaultMemPool(&pool, device);
        say(" %d %d", result, result ? 0 : cuMemPoolTrimTo(pool, 0));
    }
}

const struct kind pool_kinds[] = {
    {"ordered", 30, true, ordered, NULL},    {"pool", 6, false, pool, end_pools}, {"pool_told", 8, false, pool_told, NULL},
    {"pool_asked", 3, false, pool_asked, NULL}, {0},
};
