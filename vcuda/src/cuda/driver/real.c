/* The driver's own functions, and which of our hooks stands before which. */
#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "cuda/driver/hooks.h"
#include "base/log.h"

#ifndef VC_CUDA_ALIAS /* the preload library has another */
#define VC_CUDA_ALIAS "libcuda-driver.so.1"
#endif

struct vc_real vc_real;

#define VC_REAL(name, parameters)
#define VC_HOOK(name, parameters, arguments) CUresult name parameters;
#include "hooks.def"
#undef VC_HOOK

struct hook {
    const char *name;
    void *ours;
    size_t real_offset; /* of the driver's function in vc_real */
};

static const struct hook hooks[] = {
#define VC_HOOK(name, parameters, arguments) {#name, (void *)&name, offsetof(struct vc_real, name)},
#include "hooks.def"
#undef VC_HOOK
#undef VC_REAL
};
#define HOOK_COUNT (sizeof hooks / sizeof *hooks)

struct pair {
    const void *real;
    void *ours;
};
static struct pair by_real[HOOK_COUNT];
static size_t by_real_count;

static int compare_pairs(const void *left, const void *right)
{
    const struct pair *a = left, *b = right;
    return a->real < b->real ? -1 : a->real > b->real;
}

static void load(void)
{
    /* The alias is loaded already: it is our DT_NEEDED. Symbols come from its handle, never from RTLD_NEXT or by a name
     * that could be ours. */
    void *driver = dlopen(VC_CUDA_ALIAS, RTLD_NOW | RTLD_LOCAL);
    if (!driver)
        vc_log_once(VC_NOTICE_NO_DRIVER, "cannot load %s, the real driver beside this library: %s", VC_CUDA_ALIAS, dlerror());
    if (driver) {
#define VC_HOOK(name, parameters, arguments) vc_real.name = (CUresult(*) parameters)dlsym(driver, #name);
#define VC_REAL(name, parameters) vc_real.name = (CUresult(*) parameters)dlsym(driver, #name);
#include "hooks.def"
#undef VC_HOOK
#undef VC_REAL
    }
    for (size_t index = 0; index < HOOK_COUNT; index++) {
        void *real;
        memcpy(&real, (char *)&vc_real + hooks[index].real_offset, sizeof real);
        if (real)
            by_real[by_real_count++] = (struct pair){real, hooks[index].ours};
    }
    qsort(by_real, by_real_count, sizeof *by_real, compare_pairs);
    vc_store_release(&vc_real.ready, 1);
}

void vc_real_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
}

void *vc_hook_for(const void *real)
{
    struct pair key = {.real = real};
    struct pair *found = bsearch(&key, by_real, by_real_count, sizeof *by_real, compare_pairs);
    return found ? found->ours : NULL;
}

/* The length of a name without its version and stream suffixes: cuMemAllocAsync_ptsz, cuMemAlloc_v2. */
static size_t base_length(const char *name, size_t length)
{
    for (;;) {
        size_t mark = length;
        while (mark > 0 && name[mark - 1] != '_')
            mark--;
        if (mark < 2)
            return length;
        const char *suffix = name + mark;
        size_t bytes = length - mark;
        int is_stream = bytes == 4 && (memcmp(suffix, "ptsz", 4) == 0 || memcmp(suffix, "ptds", 4) == 0);
        int is_version = bytes >= 2 && suffix[0] == 'v' && strspn(suffix + 1, "0123456789") >= bytes - 1;
        if (!is_stream && !is_version)
            return length;
        length = mark - 1;
    }
}

int vc_hooks_base_name(const char *base, size_t length)
{
    length = base_length(base, length);
    for (size_t index = 0; index < HOOK_COUNT; index++) {
        if (base_length(hooks[index].name, strlen(hooks[index].name)) == length &&
            memcmp(hooks[index].name, base, length) == 0)
            return 1;
    }
    return 0;
}
