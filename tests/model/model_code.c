/* Steps: modules and libraries, with and without __device__ arrays, and their kernels. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model.h"

#define KERNEL(name) ".visible .entry " name "(.param .u64 a, .param .u32 n) { ret; }\n"

/* PTX with an array of that many bytes and a comment that makes it that long. To be freed. */
static char *image(struct dice *dice, size_t *array_bytes)
{
    const size_t more = roll(dice, 4) ? 0 : roll(dice, 300000);
    const unsigned kind = roll(dice, 4);
    char *text = malloc(more + 1024);
    *array_bytes = kind == 0 ? 0 : kind == 1 ? 4 + 4 * roll(dice, 4096) : kind == 2 ? MIB * (1 + roll(dice, 8)) : 4;
    size_t used = (size_t)sprintf(text, ".version 8.0\n.target sm_80\n.address_size 64\n");
    if (*array_bytes)
        used += (size_t)sprintf(text + used, ".visible .global .align 4 .b8 table[%zu];\n", *array_bytes);
    used += (size_t)sprintf(text + used, KERNEL("spin_1us") KERNEL("spin_2ms") "//");
    memset(text + used, '.', more);
    text[used + more] = 0;
    if (!roll(dice, 24))
        text[0] = '?'; /* no image at all */
    return text;
}

static void module(struct dice *dice)
{
    struct code *one = &world.modules[roll(dice, MODULES)];
    if (one->held) {
        const int result = cuModuleUnload(one->module);
        say(" cuModuleUnload = %d", result);
        if (!result)
            *one = (struct code){0};
        code_ended();
        return;
    }
    size_t array_bytes;
    char *text = image(dice, &array_bytes);
    const int result = cuModuleLoadData(&one->module, text);
    say(" cuModuleLoadData %zu with %zu = %d", strlen(text), array_bytes, result);
    free(text);
    one->held = !result;
    one->context = world.current;
    if (!result)
        say(", cuModuleGetFunction = %d", cuModuleGetFunction(&one->function, one->module, roll(dice, 12) ? "spin_1us" : "spin_2ms"));
}

static void module_global(struct dice *dice)
{
    const struct code *one = &world.modules[roll(dice, MODULES)];
    CUdeviceptr at = 0;
    size_t bytes = 0;
    unsigned char back[4] = {0};
    if (!one->held)
        return;
    const int result = cuModuleGetGlobal_v2(&at, &bytes, one->module, "table");
    say(" cuModuleGetGlobal = %d %zu", result, result ? 0 : bytes);
    if (!result && bytes)
        say(", cuMemsetD8 = %d, cuMemcpyDtoH = %d", cuMemsetD8_v2(at, 7, 4), cuMemcpyDtoH_v2(back, at, 4));
    say(" %d", back[3]);
}

static void library(struct dice *dice)
{
    struct code *one = &world.libraries[roll(dice, LIBRARIES)];
    if (one->held) {
        const int result = cuLibraryUnload(one->library);
        say(" cuLibraryUnload = %d", result);
        if (!result)
            *one = (struct code){0};
        code_ended();
        return;
    }
    size_t array_bytes;
    char *text = image(dice, &array_bytes);
    if (array_bytes && !wanted("library_arrays")) {
        free(text);
        return;
    }
    const int result = cuLibraryLoadData(&one->library, text, NULL, NULL, 0, NULL, NULL, 0);
    say(" cuLibraryLoadData %zu with %zu = %d", strlen(text), array_bytes, result);
    free(text);
    one->held = !result;
}

static void library_used(struct dice *dice)
{
    struct code *one = &world.libraries[roll(dice, LIBRARIES)];
    CUdeviceptr at = 0;
    CUkernel kernel = NULL;
    size_t bytes = 0;
    if (!one->held)
        return;
    switch (roll(dice, 3)) {
    case 0: {
        const int result = cuLibraryGetGlobal(&at, &bytes, one->library, "table");
        say(" cuLibraryGetGlobal = %d %zu", result, result ? 0 : bytes);
        break;
    }
    case 1: {
        const int result = cuLibraryGetModule(&one->module, one->library);
        const int second = result ? 0 : cuModuleGetGlobal_v2(&at, &bytes, one->module, "table");
        say(" cuLibraryGetModule = %d, cuModuleGetGlobal = %d %zu", result, second, result || second ? 0 : bytes);
        break;
    }
    default: {
        const int result = cuLibraryGetKernel(&kernel, one->library, "spin_1us");
        say(" cuLibraryGetKernel = %d", result);
        one->function = result ? NULL : (CUfunction)kernel;
    }
    }
}

static void launched(struct dice *dice)
{
    struct code *one = roll(dice, 3) ? &world.modules[roll(dice, MODULES)] : &world.libraries[roll(dice, LIBRARIES)];
    CUstream stream = some_stream(dice, NULL);
    CUdeviceptr at = 0;
    unsigned count = 0;
    void *parameters[] = {&at, &count};
    if (!one->held || !one->function)
        return;
    const unsigned grid = 1 + roll(dice, 50);
    say(" cuLaunchKernel %u = %d", grid, cuLaunchKernel(one->function, grid, 1, 1, 32, 1, 1, 0, stream, parameters, NULL));
}

static void end_code(void)
{
    for (int i = 0; i < MODULES; i++)
        if (world.modules[i].held)
            say(" %d", cuModuleUnload(world.modules[i].module));
    for (int i = 0; i < LIBRARIES; i++)
        if (world.libraries[i].held)
            say(" %d", cuLibraryUnload(world.libraries[i].library));
    memset(world.modules, 0, sizeof world.modules);
    memset(world.libraries, 0, sizeof world.libraries);
}

const struct kind code_kinds[] = {
    {"module", 8, true, module, end_code},       {"module_global", 3, true, module_global, NULL},
    {"library", 5, false, library, NULL},        {"library_used", 5, true, library_used, NULL},
    {"launched", 12, true, launched, NULL},      {0},
};
