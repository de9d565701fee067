/* Steps: contexts made, primary and green ones, their limits; and what becomes of the world when one ends. */
#include <string.h>

#include "model.h"

void code_ended(void)
{
    for (int i = 0; i < GRAPHS; i++)
        world.graphs[i].spoiled = true;
    for (int i = 0; i < EXECS; i++)
        world.execs[i].spoiled = true;
    for (int i = 0; i < STREAMS; i++)
        world.streams[i].spoiled = true;
}

void context_ended(int context)
{
    world.contexts[context].alive = false;
    for (int i = 0; i < POINTERS; i++)
        if (world.pointers[i].kind && world.pointers[i].kind != POOLED && world.pointers[i].kind != IMPORTED && world.pointers[i].context == context) {
            world.stale[i % 4] = world.pointers[i].at;
            world.pointers[i] = (struct pointer){0};
        }
    for (int i = 0; i < ARRAYS; i++)
        if (world.arrays[i].held && world.arrays[i].context == context)
            world.arrays[i] = (struct array){0};
    for (int i = 0; i < EXTERNALS; i++)
        if (world.externals[i].memory && world.externals[i].context == context)
            world.externals[i] = (struct external){0};
    for (int i = 0; i < STREAMS; i++)
        if (world.streams[i].held && world.streams[i].context == context)
            world.streams[i] = (struct stream){0};
    for (int i = 0; i < EVENTS; i++)
        if (world.events[i].held && world.events[i].context == context)
            world.events[i] = (struct event){0};
    for (int i = 0; i < MODULES; i++)
        if (world.modules[i].held && world.modules[i].context == context)
            world.modules[i] = (struct code){0};
    code_ended();
}

void look(void)
{
    CUcontext found = NULL;
    for (int device = 0; device < world.devices; device++) {
        int active = 0;
        unsigned flags;
        cuDevicePrimaryCtxGetState(device, &flags, &active);
        if (world.contexts[device].alive && !active)
            context_ended(device);
        world.contexts[device].alive = active;
    }
    world.current = NONE;
    const int result = cuCtxGetCurrent(&found);
    for (int i = 0; found && i < CONTEXTS; i++)
        if (world.contexts[i].alive && world.contexts[i].handle == found)
            world.current = i;
    say(", current = %d %d", result, found ? world.current : NONE);
}

static void use(int index)
{
    say(" cuCtxSetCurrent %d = %d", index, cuCtxSetCurrent(world.contexts[index].handle));
}

bool has_context(void)
{
    if (world.current != NONE && world.contexts[world.current].alive)
        return true;
    struct context *one = &world.contexts[0];
    say(" cuDevicePrimaryCtxRetain = %d", cuDevicePrimaryCtxRetain(&one->handle, 0));
    use(0);
    look();
    say(";");
    return world.current != NONE;
}

static void context(struct dice *dice)
{
    const int index = DEVICES + (int)roll(dice, CONTEXTS - DEVICES);
    struct context *one = &world.contexts[index];
    CUcontext popped = NULL;
    if (!one->alive) {
        const int device = (int)roll(dice, (unsigned)world.devices), result = cuCtxCreate_v2(&one->handle, roll(dice, 30) ? 0 : 3, device);
        say(" cuCtxCreate %d on %d = %d", index, device, result);
        books_judge(result, device, 64 * MIB);
        one->alive = !result;
        one->device = device;
        if (!result) /* it takes the place of the one before: the stack stays short */
            say(" cuCtxPopCurrent = %d", cuCtxPopCurrent_v2(&popped));
        if (!result)
            use(index);
    } else if (roll(dice, 2)) {
        use(index);
    } else {
        const int result = cuCtxDestroy_v2(one->handle);
        say(" cuCtxDestroy %d = %d", index, result);
        if (!result)
            context_ended(index);
    }
    look();
}

/* A reset ends the memory of the card's pools too, where a context's end leaves it. */
static void reset(int device)
{
    context_ended(device);
    for (int i = 0; i < POINTERS; i++)
        if (world.pointers[i].kind == POOLED && world.pointers[i].card == device) {
            world.stale[i % 4] = world.pointers[i].at;
            world.pointers[i] = (struct pointer){0};
        }
}

static void primary(struct dice *dice)
{
    const int device = (int)roll(dice, (unsigned)world.devices);
    struct context *one = &world.contexts[device];
    switch (roll(dice, 8)) {
    case 0:
    case 1:
        say(" cuDevicePrimaryCtxRelease %d = %d", device, cuDevicePrimaryCtxRelease_v2(device));
        break;
    case 2: {
        if (!wanted("reset"))
            break;
        const int result = cuDevicePrimaryCtxReset_v2(device);
        say(" cuDevicePrimaryCtxReset %d = %d", device, result);
        if (!result)
            reset(device);
        break;
    }
    default: {
        const int result = cuDevicePrimaryCtxRetain(&one->handle, device);
        say(" cuDevicePrimaryCtxRetain %d = %d", device, result);
        one->device = device;
        if (!result)
            use(device);
    }
    }
    look();
}

static void green(struct dice *dice)
{
    CUgreenCtx *one = &world.greens[roll(dice, GREENS)];
    const int device = (int)roll(dice, (unsigned)world.devices);
    if (*one) {
        say(" cuGreenCtxDestroy = %d", cuGreenCtxDestroy(*one));
        *one = NULL;
    } else {
        const int result = cuGreenCtxCreate(one, NULL, device, roll(dice, 10) != 0);
        say(" cuGreenCtxCreate %d = %d", device, result);
        if (result)
            *one = NULL;
    }
    look();
}

static void limit(struct dice *dice)
{
    const int which = (int)roll(dice, 8);
    size_t value = 0;
    const size_t wanted = which == 0 ? roll(dice, 4096) : roll(dice, 50) ? roll(dice, 32 << 20) : (size_t)1 << (40 + roll(dice, 24));
    say(" cuCtxSetLimit %d %zu = %d", which, wanted, cuCtxSetLimit(which, wanted));
    const int result = cuCtxGetLimit(&value, which);
    say(", cuCtxGetLimit = %d %zu", result, result ? 0 : value);
}

static void device(struct dice *dice)
{
    int found = NONE;
    size_t bytes = 0, free_bytes = 0;
    const int of = cuCtxGetDevice(&found), total = cuDeviceTotalMem_v2(&bytes, (int)roll(dice, (unsigned)world.devices));
    say(" cuCtxGetDevice = %d %d, cuDeviceTotalMem = %d %d", of, of ? NONE : found, total, bytes != 0);
    const int result = cuMemGetInfo_v2(&free_bytes, &bytes);
    const uint64_t books = of ? 0 : books_of(found);
    say(", cuMemGetInfo = %d", result);
    if (!result && !of && free_bytes + books > bytes)
        say(" !free-beside-books %zu KiB free, books %llu KiB, total %zu KiB", free_bytes >> 10, (unsigned long long)books >> 10,
            bytes >> 10);
}

static void end_contexts(void)
{
    for (int i = 0; i < GREENS; i++)
        if (world.greens[i])
            say(" %d", cuGreenCtxDestroy(world.greens[i]));
    memset(world.greens, 0, sizeof world.greens);
    for (int i = DEVICES; i < CONTEXTS; i++)
        if (world.contexts[i].alive)
            say(" %d", cuCtxDestroy_v2(world.contexts[i].handle));
    for (int device = 0; device < world.devices; device++)
        for (int times = 0; times < 100000 && !cuDevicePrimaryCtxRelease_v2(device); times++)
            ;
    for (int i = 0; i < CONTEXTS; i++)
        world.contexts[i].alive = false;
}

const struct kind context_kinds[] = {
    {"context", 6, false, context, end_contexts}, {"primary", 6, false, primary, NULL}, {"green", 2, false, green, NULL},
    {"limit", 2, true, limit, NULL},              {"device", 4, true, device, NULL},    {0},
};
