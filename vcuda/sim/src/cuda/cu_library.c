/* Libraries and kernels (modules without a context), and the linker. */
#include <stdlib.h>
#include <string.h>

#include "cu_module.h"

static CUresult library_of(CUlibrary library)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return library && library->magic == CU_MAGIC_LIBRARY ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CU_EXPORT CUresult cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options, void **values,
                                     unsigned int count, CUlibraryOption *library_options, void **library_values,
                                     unsigned int library_count)
{
    CUresult bad = cu_initialised();
    if (bad || !library || !image || (library_count && (!library_options || !library_values)))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    CUlibrary made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bad = cu_module_load(NULL, image, &made->module);
    cu_jit_logs(count, options, values);
    if (bad) {
        free(made);
        return bad;
    }
    made->magic = CU_MAGIC_LIBRARY;
    made->module->library = made;
    *library = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options, void **values,
                                         unsigned int count, CUlibraryOption *library_options, void **library_values,
                                         unsigned int library_count)
{
    size_t bytes;
    const CUresult bad = cu_initialised();
    if (bad || !path)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    char *image = cu_read_file(path, &bytes);
    if (!image)
        return CUDA_ERROR_FILE_NOT_FOUND;
    const CUresult result = cuLibraryLoadData(library, image, options, values, count, library_options, library_values,
                                              library_count);
    free(image);
    return result;
}

CU_EXPORT CUresult cuLibraryUnload(CUlibrary library)
{
    const CUresult bad = library_of(library);
    if (bad)
        return bad;
    cu_module_free(library->module);
    library->magic = 0;
    free(library);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    const CUresult bad = library_of(library);
    if (bad || !kernel || !name)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *kernel = (CUkernel)cu_module_find(library->module, name);
    return *kernel ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CU_EXPORT CUresult cuLibraryGetKernelCount(unsigned int *count, CUlibrary library)
{
    const CUresult bad = library_of(library);
    if (bad || !count)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *count = 0;
    for (CUfunction function = library->module->functions; function; function = function->next)
        ++*count;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int room, CUlibrary library)
{
    const CUresult bad = library_of(library);
    if (bad || !kernels || !room)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    for (CUfunction function = library->module->functions; function && room; function = function->next, room--)
        *kernels++ = (CUkernel)function;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    CUcontext ctx;
    CUresult bad = library_of(library);
    if (!bad)
        bad = cu_current(&ctx);
    if (bad || !module)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    bad = cu_module_need(library->module, ctx); /* "associated with the current context": it is loaded there */
    if (!bad)
        *module = library->module;
    return bad;
}

CU_EXPORT CUresult cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)
{
    CUcontext ctx;
    CUresult bad = library_of(library);
    if (!bad)
        bad = cu_current(&ctx);
    if (bad || !name)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    return cu_module_global(library->module, ctx, name, 0, pointer, bytes);
}

CU_EXPORT CUresult cuLibraryGetManaged(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)
{
    CUcontext ctx;
    CUresult bad = library_of(library);
    if (!bad)
        bad = cu_current(&ctx);
    if (bad || !name)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    return cu_module_global(library->module, ctx, name, 1, pointer, bytes);
}

CU_EXPORT CUresult cuLibraryGetUnifiedFunction(void **function, CUlibrary library, const char *name)
{
    (void)function, (void)name;
    const CUresult bad = library_of(library);
    return bad ? bad : CUDA_ERROR_NOT_FOUND;
}

/* ---- the linker: keeps its inputs side by side ---- */

struct CUlinkState_st {
    unsigned char *image;
    size_t bytes;
    uint64_t count;
};

void cu_jit_logs(unsigned count, const CUjit_option *options, void **values)
{
    char *buffer = NULL;
    for (unsigned i = 0; i < count; i++) {
        const int option = (int)options[i];
        if (option == 3 || option == 5) { /* the buffers for infos and errors, each followed by its size */
            buffer = values[i];
        } else if (option == 4 || option == 6) {
            if (buffer && (uintptr_t)values[i] > 0)
                *buffer = 0;
            values[i] = NULL; /* bytes written */
        }
    }
}

CU_EXPORT CUresult cuLinkCreate_v2(unsigned int count, CUjit_option *options, void **values, CUlinkState *state)
{
    CUcontext ctx;
    const CUresult bad = cu_current(&ctx);
    if (bad || !state || (count && (!options || !values)))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    CUlinkState made = calloc(1, sizeof *made);
    if (made && !(made->image = calloc(1, sizeof(cu_linked)))) {
        free(made);
        made = NULL;
    }
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->bytes = sizeof(cu_linked);
    cu_jit_logs(count, options, values);
    *state = made;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t bytes, const char *name,
                                    unsigned int count, CUjit_option *options, void **values)
{
    (void)name, (void)count, (void)options, (void)values;
    if (!state || !data || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if ((int)type < 0 || (int)type > 4)
        return CUDA_ERROR_INVALID_VALUE;
    const size_t length = (bytes + 8) & ~(size_t)7; /* room for PTX's terminating zero */
    unsigned char *more = realloc(state->image, state->bytes + sizeof(uint64_t) + length);
    if (!more)
        return CUDA_ERROR_OUT_OF_MEMORY;
    state->image = more;
    const uint64_t stored = length;
    memcpy(more + state->bytes, &stored, sizeof stored);
    memset(more + state->bytes + sizeof stored, 0, length);
    memcpy(more + state->bytes + sizeof stored, data, bytes);
    struct CUmod_st probe = {.magic = 0};
    const CUresult bad = cu_image_read(more + state->bytes + sizeof stored, &probe);
    cu_module_clear(&probe);
    if (bad)
        return (int)type == 1 ? CUDA_ERROR_INVALID_PTX : CUDA_ERROR_INVALID_IMAGE;
    state->bytes += sizeof stored + length;
    state->count++;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLinkAddFile_v2(CUlinkState state, CUjitInputType type, const char *path, unsigned int count,
                                    CUjit_option *options, void **values)
{
    size_t bytes;
    if (!state || !path)
        return CUDA_ERROR_INVALID_VALUE;
    char *data = cu_read_file(path, &bytes);
    if (!data)
        return CUDA_ERROR_FILE_NOT_FOUND;
    const CUresult result = cuLinkAddData_v2(state, type, data, bytes, path, count, options, values);
    free(data);
    return result;
}

CU_EXPORT CUresult cuLinkComplete(CUlinkState state, void **image, size_t *bytes)
{
    if (!state || !image || !state->count)
        return CUDA_ERROR_INVALID_VALUE;
    cu_linked header = {.bytes = state->bytes, .count = state->count};
    memcpy(header.magic, CU_LINKED_MAGIC, sizeof header.magic);
    memcpy(state->image, &header, sizeof header);
    *image = state->image;
    if (bytes)
        *bytes = state->bytes;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuLinkDestroy(CUlinkState state)
{
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    free(state->image);
    free(state);
    return CUDA_SUCCESS;
}
