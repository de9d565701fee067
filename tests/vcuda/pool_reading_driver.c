/* Stands between the shim and the simulated driver: a thread that is told to is held up where it has just been answered what of a pool is in use. */
#include <dlfcn.h>
#include <stddef.h>
#include <time.h>

typedef void *handle;
#define API __attribute__((visibility("default")))
#define USED 7 /* CU_MEMPOOL_ATTR_USED_MEM_CURRENT */

static __thread int is_next;
API volatile int is_held, may_go;

/* The calling thread's next answer is the one. */
API void hold_next(void)
{
    is_next = 1;
}

API int cuMemPoolGetAttribute(handle pool, int attribute, void *value)
{
    static int (*ask)(handle, int, void *);
    if (!ask)
        ask = (int (*)(handle, int, void *))dlsym(dlopen("libsimulated-driver.so", RTLD_NOW | RTLD_LOCAL), "cuMemPoolGetAttribute");
    int result = ask(pool, attribute, value);
    if (attribute != USED || !is_next)
        return result;
    is_next = 0;
    for (is_held = 1; !may_go;)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    return result;
}
