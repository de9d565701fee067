/* Everything of the 550 library that has no meaning on a simulated card: there, and "not supported". */
#include "nvml_internal.h"

/* Arguments are ignored, whatever they are: the x86-64 and AArch64 calling conventions leave them to the caller. */
#define NV_UNSUPPORTED(name)                                                                                           \
    NVML_API nvmlReturn_t name(void);                                                                                  \
    NVML_API nvmlReturn_t name(void)                                                                                   \
    {                                                                                                                  \
        const nvmlReturn_t ready = nv_ready();                                                                         \
        return ready == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : ready;                                               \
    }
#include "nvml_unsupported.def"
