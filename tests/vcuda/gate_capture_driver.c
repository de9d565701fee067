/* Stands between the shim and the simulated driver and counts what reaches the driver on streams that capture. */
#include <dlfcn.h>
#include <stddef.h>

typedef void *handle;
#define API __attribute__((visibility("default")))

/* Events recorded on a stream that captured; events recorded on any other; operations captured. */
API unsigned capture_events, other_events, captured_launches;

static void *simulated(const char *name)
{
    static void *driver;
    if (!driver)
        driver = dlopen("libsimulated-driver.so", RTLD_NOW | RTLD_LOCAL);
    return dlsym(driver, name);
}

static int captures(handle stream)
{
    int status = 0;
    int (*ask)(handle, int *) = (int (*)(handle, int *))simulated("cuStreamIsCapturing");
    return ask(stream, &status) != 0 || status != 0;
}

API int cuEventRecord(handle event, handle stream)
{
    *(captures(stream) ? &capture_events : &other_events) += 1;
    return ((int (*)(handle, handle))simulated("cuEventRecord"))(event, stream);
}

API int cuEventRecordWithFlags(handle event, handle stream, unsigned flags)
{
    *(captures(stream) ? &capture_events : &other_events) += 1;
    return ((int (*)(handle, handle, unsigned))simulated("cuEventRecordWithFlags"))(event, stream, flags);
}

API int cuLaunchKernel(handle function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                       unsigned shared, handle stream, void **parameters, void **extra)
{
    captured_launches += captures(stream) != 0;
    int (*launch)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **) =
        (int (*)(handle, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, handle, void **, void **))
            simulated("cuLaunchKernel");
    return launch(function, gx, gy, gz, bx, by, bz, shared, stream, parameters, extra);
}
