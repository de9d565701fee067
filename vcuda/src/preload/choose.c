/* Which look-ups get a hook: those that would find a function of the real driver that we hook; nothing else changes.
 *
 * Nothing is loaded for it, no thread waits, and a process without CUDA never gets past the first comparison of names. */
#include "preload/choose.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "preload/libc.h"
#include "preload/names.h"
#include "preload/preload.h"
#include "base/atomic.h"

void *vc_libc_dlsym(void *handle, const char *name);
void *vc_libc_dlopen(const char *file, int flags);

#define VC__PATH_BYTES 4096
char vc_preload_cuda[VC__PATH_BYTES] = "libcuda.so.1";
char vc_preload_nvml[VC__PATH_BYTES] = "libnvidia-ml.so.1";

enum driver { DRIVER_CUDA, DRIVER_NVML };

/* Our exports, by address only: their types are those of the owners' files. */
#define VC_HOOK(name, parameters, arguments) extern void name(void);
#define VC_REAL(name, parameters)
#define VC_SETTER(name) extern void name(void);
#include "cuda/driver/hooks.def"
#include "nvml/hooks.def"
#undef VC_HOOK
#undef VC_SETTER

static const struct export {
    const char *name;
    void *ours;
} exports[] = {
#define VC_HOOK(name, parameters, arguments) {#name, (void *)name},
#define VC_SETTER(name) {#name, (void *)name},
#include "cuda/driver/hooks.def"
#include "nvml/hooks.def"
#undef VC_HOOK
#undef VC_SETTER
};

static void *our_export(const char *name)
{
    for (size_t index = 0; index < sizeof exports / sizeof *exports; index++)
        if (strcmp(exports[index].name, name) == 0)
            return exports[index].ours;
    return NULL;
}

static bool is_file(const char *path, const char *library)
{
    const char *slash = path ? strrchr(path, '/') : NULL, *file = slash ? slash + 1 : path;
    size_t length = strlen(library);
    return file && strncmp(file, library, length) == 0 && (file[length] == '\0' || file[length] == '.');
}

/* Whether this address lies in the real libcuda or libnvidia-ml. */
static bool is_drivers(const void *address, Dl_info *info, enum driver *driver)
{
    if (!dladdr(address, info))
        return false;
    bool cuda = is_file(info->dli_fname, "libcuda.so");
    *driver = cuda ? DRIVER_CUDA : DRIVER_NVML;
    return cuda || is_file(info->dli_fname, "libnvidia-ml.so");
}

/* From here on the hooks need the real functions: those of the file that the application found. */
static void use(const char *file, enum driver driver)
{
    static uint32_t named[2];
    char *name = driver == DRIVER_CUDA ? vc_preload_cuda : vc_preload_nvml;
    uint32_t before = 0;
    if (strlen(file) < VC__PATH_BYTES && strchr(file, '/') &&
        __atomic_compare_exchange_n(&named[driver], &before, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
        strcpy(name, file);
    vc_preload_load(driver == DRIVER_CUDA);
}

static bool is_loaded(enum driver driver)
{
    void *handle = vc_libc_dlopen(driver == DRIVER_CUDA ? vc_preload_cuda : vc_preload_nvml, RTLD_LAZY | RTLD_NOLOAD);
    if (handle)
        dlclose(handle);
    return handle != NULL;
}

static void *look(void *handle, const char *name, const char *version)
{
    return version ? vc_libc.vsym(handle, name, version) : vc_libc.sym(handle, name);
}

/* Programs that ask libc for its dlsym to find the driver's functions with it. */
static void *choose_lookup(void *handle, const char *name, const char *version)
{
    if (handle == RTLD_NEXT || handle == RTLD_DEFAULT)
        return VC_JUMP; /* the first is another interposer's question, the second finds ours anyway */
    void *found = look(handle, name, version);
    if (found && (found == (void *)vc_libc.sym || found == (void *)vc_libc.vsym))
        return vc_preload_lookup(found == (void *)vc_libc.vsym);
    return VC_JUMP;
}

void *vc_preload_choose(void *handle, const char *name, const char *version)
{
    vc_libc_find();
    if (!name)
        return VC_JUMP;
    if (name[0] == 'd' && (strcmp(name, "dlsym") == 0 || strcmp(name, "dlvsym") == 0))
        return choose_lookup(handle, name, version);
    bool nvml = strncmp(name, "nvml", 4) == 0;
    if (!nvml && !(name[0] == 'c' && name[1] == 'u' && name[2] >= 'A' && name[2] <= 'Z'))
        return VC_JUMP;
    void *ours = our_export(name);
    if (!ours)
        return VC_JUMP;
    if (handle == RTLD_DEFAULT || handle == RTLD_NEXT) {
        /* libc would find our export, or, asked by who comes after us, what is behind it. That is right if the driver is there and
         * has such a function; our hook calls the driver's directly, so whoever is asking gets into no loop. */
        enum driver driver = nvml ? DRIVER_NVML : DRIVER_CUDA;
        if (!is_loaded(driver))
            return look(RTLD_NEXT, name, version) ? VC_JUMP : VC_NOTHING; /* sets dlerror; behind us, as we are not the driver */
        vc_preload_load(!nvml);
        return vc_preload_has(name, !nvml) ? ours : VC_JUMP;
    }
    Dl_info info;
    enum driver driver;
    void *found = look(handle, name, version);
    if (!found || found == ours || !is_drivers(found, &info, &driver))
        return VC_JUMP;
    use(info.dli_fname, driver);
    return ours;
}

long vc_preload_space(long space, const char *file)
{
    vc_libc_find();
    bool driver = file && (is_file(file, "libcuda.so") || is_file(file, "libnvidia-ml.so"));
    return driver ? LM_ID_BASE : space;
}
