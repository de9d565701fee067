/* The real library's functions, and where its code lies. */
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>

#include "nvml/hooks.h"
#include "base/log.h"

#ifndef VC_NVML_ALIAS /* the preload library has another */
#define VC_NVML_ALIAS "libnvidia-ml-driver.so.1"
#endif

struct vc_nvml_real vc_nvml_real;

static uintptr_t code_start, code_end; /* of the real library */

static int find_code(struct dl_phdr_info *info, size_t size, void *inside)
{
    (void)size;
    uintptr_t start = UINTPTR_MAX, end = 0;
    for (int index = 0; index < info->dlpi_phnum; index++) {
        const ElfW(Phdr) *header = &info->dlpi_phdr[index];
        if (header->p_type != PT_LOAD)
            continue;
        uintptr_t from = info->dlpi_addr + header->p_vaddr, to = from + header->p_memsz;
        start = from < start ? from : start;
        end = to > end ? to : end;
    }
    uintptr_t address = (uintptr_t)inside;
    if (address < start || address >= end)
        return 0;
    code_start = start;
    code_end = end;
    return 1;
}

static void load(void)
{
    void *driver = dlopen(VC_NVML_ALIAS, RTLD_NOW | RTLD_LOCAL);
    if (!driver)
        vc_log_once(VC_NOTICE_NO_DRIVER, "cannot load %s, the real library beside this one: %s", VC_NVML_ALIAS, dlerror());
    if (driver) {
#define VC_HOOK(name, parameters, arguments) vc_nvml_real.name = (nvmlReturn_t(*) parameters)dlsym(driver, #name);
#define VC_REAL(name, parameters) vc_nvml_real.name = (nvmlReturn_t(*) parameters)dlsym(driver, #name);
#define VC_SETTER(name) vc_nvml_real.name = (nvmlReturn_t(*) VC_SETTER_PARAMETERS)dlsym(driver, #name);
#include "hooks.def"
        dl_iterate_phdr(find_code, (void *)vc_nvml_real.nvmlDeviceGetUUID);
    }
    vc_store_release(&vc_nvml_real.ready, 1);
}

void vc_nvml_load(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load);
}

bool vc_nvml_called_by_driver(const void *return_address)
{
    uintptr_t address = (uintptr_t)return_address;
    return address >= code_start && address < code_end;
}
