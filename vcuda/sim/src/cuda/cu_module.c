/* Modules: loaded into a context, searched for functions and globals, unloaded. */
#include "cu_module.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cu_context.h"
#include "cu_memory.h"

#define CODE_STEP 65536ull

CUfunction cu_module_add(CUmodule module, const char *name, size_t length)
{
    CUfunction function = calloc(1, sizeof *function);
    if (!function)
        return NULL;
    function->name = strndup(name, length);
    if (!function->name) {
        free(function);
        return NULL;
    }
    function->magic = CU_MAGIC_FUNCTION;
    function->module = module;
    function->attributes[0] = 1024; /* threads per block */
    function->attributes[4] = 32;   /* registers */
    function->attributes[5] = 80;   /* PTX version */
    function->attributes[6] = 80;   /* binary version */
    function->attributes[8] = 49152; /* dynamic shared memory */
    function->attributes[9] = -1;    /* preferred carve-out: the driver's choice */
    CUfunction *end = &module->functions;
    while (*end)
        end = &(*end)->next;
    *end = function;
    return function;
}

void cu_module_add_global(CUmodule module, const char *name, size_t length, size_t bytes, int managed)
{
    cu_global *global = calloc(1, sizeof *global);
    if (!global)
        return;
    global->name = strndup(name, length);
    global->bytes = bytes;
    global->managed = managed;
    global->next = module->globals;
    module->globals = global;
}

CUfunction cu_module_find(CUmodule module, const char *name)
{
    for (CUfunction function = module->functions; function; function = function->next)
        if (!strcmp(function->name, name))
            return function;
    return module->any_name ? cu_module_add(module, name, strlen(name)) : NULL;
}

CUresult cu_function_of(CUfunction function)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return function && function->magic == CU_MAGIC_FUNCTION ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Code costs the context what its image takes, in steps. */
static CUresult charge_code(CUcontext ctx, int64_t bytes)
{
    sim_card_lock(cu_process.state, ctx->card);
    const int bad = sim_context_resize(cu_process.state, cu_card(ctx), ctx->index, bytes);
    sim_card_unlock(cu_process.state, ctx->card);
    return bad ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_SUCCESS;
}

static int lives(const cu_load *load)
{
    return load->ctx->alive && load->ctx->id == load->id;
}

static cu_load *load_in(CUmodule module, CUcontext ctx)
{
    cu_load *load = module->loads;
    while (load && (load->ctx != ctx || load->id != ctx->id))
        load = load->next;
    return load;
}

static void free_load(CUmodule module, cu_load *load)
{
    size_t at = 0;
    for (cu_global *global = module->globals; lives(load) && global; global = global->next, at++) {
        cu_block *block = load->pointers[at] && !global->managed ? cu_find((uintptr_t)load->pointers[at]) : NULL;
        if (block)
            cu_unplace(block);
    }
    free(load->pointers);
    free(load);
}

/* Entries of contexts that ended go, so that a library which outlives many of them does not grow. */
static void drop_ended(CUmodule module)
{
    for (cu_load **link = &module->loads; *link;) {
        cu_load *load = *link;
        if (lives(load)) {
            link = &load->next;
            continue;
        }
        *link = load->next;
        free_load(module, load);
    }
}

/* cu_lock held. `charges`: a library's, whose code the context does not have yet. */
static CUresult add_load(CUmodule module, CUcontext ctx, int charges)
{
    size_t globals = 0;
    for (const cu_global *global = module->globals; global; global = global->next)
        globals++;
    drop_ended(module);
    cu_load *load = calloc(1, sizeof *load);
    CUdeviceptr *pointers = calloc(globals + 1, sizeof *pointers);
    CUresult bad = load && pointers ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    if (!bad && charges)
        bad = charge_code(ctx, (int64_t)module->bytes);
    if (bad) {
        free(load);
        free(pointers);
        return bad;
    }
    *load = (cu_load){module->loads, ctx, ctx->id, pointers};
    module->loads = load;
    return CUDA_SUCCESS;
}

CUresult cu_module_need(CUmodule module, CUcontext ctx)
{
    if (module->ctx || (module->last == ctx && module->last_id == ctx->id))
        return CUDA_SUCCESS;
    pthread_mutex_lock(&cu_lock);
    const CUresult bad = load_in(module, ctx) ? CUDA_SUCCESS : add_load(module, ctx, 1);
    if (!bad) {
        module->last_id = ctx->id;
        module->last = ctx;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

void cu_module_clear(CUmodule module)
{
    pthread_mutex_lock(&cu_lock);
    for (cu_load *load = module->loads, *next; load; load = next) {
        next = load->next;
        if (!module->ctx && lives(load))
            charge_code(load->ctx, -(int64_t)module->bytes);
        free_load(module, load);
    }
    module->loads = NULL;
    for (cu_global *global = module->globals, *next; global; global = next) {
        next = global->next;
        cu_block *block = global->shared ? cu_find((uintptr_t)global->shared) : NULL;
        if (block)
            cu_unplace(block);
        free(global->name);
        free(global);
    }
    pthread_mutex_unlock(&cu_lock);
    for (CUfunction function = module->functions, next; function; function = next) {
        next = function->next;
        function->magic = 0;
        free(function->name);
        free(function);
    }
    module->functions = NULL;
    module->globals = NULL;
    module->magic = 0;
}

void cu_module_free(CUmodule module)
{
    cu_module_clear(module);
    free(module);
}

CUresult cu_module_load(CUcontext ctx, const void *image, CUmodule *module)
{
    CUmodule made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->magic = CU_MAGIC_MODULE;
    made->ctx = ctx;
    CUresult bad = cu_image_read(image, made);
    made->bytes = cu_image_bytes(image);
    for (const cu_global *global = made->globals; global; global = global->next)
        made->bytes += global->managed ? 0 : global->bytes;
    made->bytes = (made->bytes + CODE_STEP - 1) / CODE_STEP * CODE_STEP;
    if (!bad && ctx)
        bad = charge_code(ctx, (int64_t)made->bytes);
    if (bad) {
        cu_module_free(made);
        return bad;
    }
    if (ctx) {
        pthread_mutex_lock(&cu_lock);
        made->next = ctx->modules;
        ctx->modules = made;
        pthread_mutex_unlock(&cu_lock);
    }
    *module = made;
    return CUDA_SUCCESS;
}

void cu_modules_end(CUcontext ctx)
{
    pthread_mutex_lock(&cu_lock);
    CUmodule module = ctx->modules;
    ctx->modules = NULL;
    pthread_mutex_unlock(&cu_lock);
    for (CUmodule next; module; module = next) {
        next = module->next;
        cu_module_free(module);
    }
}

/* cu_lock held. */
static CUresult place_global(CUmodule module, CUcontext ctx, cu_global *global, CUdeviceptr *pointer)
{
    cu_block *block;
    if (*pointer)
        return CUDA_SUCCESS;
    (void)module;
    const size_t whole = (global->bytes + CU_CHUNK - 1) / CU_CHUNK * CU_CHUNK;
    CUresult bad = global->managed ? cu_place(NULL, ctx->device, whole, CU_BLOCK_MANAGED, 1, &block)
                                   : cu_place(ctx, ctx->device, global->bytes, CU_BLOCK_PLAIN, 0, &block);
    if (bad && global->managed)
        bad = cu_place(NULL, ctx->device, whole, CU_BLOCK_MANAGED, 0, &block);
    if (!bad) {
        block->fixed = 1;
        *pointer = block->start;
    }
    return bad;
}

/* A global gets its address when first asked for; its memory was charged with the code, a managed one's is by itself. */
CUresult cu_module_global(CUmodule module, CUcontext ctx, const char *name, int managed, CUdeviceptr *pointer, size_t *bytes)
{
    cu_global *global = module->globals;
    size_t at = 0;
    for (; global && strcmp(global->name, name); global = global->next)
        at++;
    if (!global || (managed >= 0 && managed != global->managed))
        return CUDA_ERROR_NOT_FOUND;
    CUresult bad = cu_module_need(module, ctx);
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    if (!load_in(module, ctx))
        bad = add_load(module, ctx, 0); /* a module's own context */
    CUdeviceptr *place = bad ? NULL : global->managed ? &global->shared : &load_in(module, ctx)->pointers[at];
    if (place)
        bad = place_global(module, ctx, global, place);
    if (!bad && pointer)
        *pointer = *place;
    pthread_mutex_unlock(&cu_lock);
    if (!bad && bytes)
        *bytes = global->bytes;
    return bad;
}

char *cu_read_file(const char *path, size_t *bytes)
{
    FILE *file = fopen(path, "re");
    char *data = NULL;
    long length;
    if (file && !fseek(file, 0, SEEK_END) && (length = ftell(file)) >= 0 && !fseek(file, 0, SEEK_SET) &&
        (data = calloc(1, (size_t)length + 64))) {
        *bytes = fread(data, 1, (size_t)length, file);
    }
    if (file)
        fclose(file);
    return data;
}

/* ---- the API ---- */

static CUresult module_of(CUmodule module)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    return module && module->magic == CU_MAGIC_MODULE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

CU_EXPORT CUresult cuModuleLoadData(CUmodule *module, const void *image)
{
    CUcontext ctx;
    CUresult bad = cu_current(&ctx);
    if (bad || !module || !image)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    sim_slow_call(cu_process.state, ctx->card);
    return cu_module_load(ctx, image, module);
}

CU_EXPORT CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options,
                                      void **values)
{
    if (count && (!options || !values))
        return CUDA_ERROR_INVALID_VALUE;
    const CUresult result = cuModuleLoadData(module, image);
    cu_jit_logs(count, options, values);
    return result;
}

CU_EXPORT CUresult cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return cuModuleLoadData(module, image);
}

CU_EXPORT CUresult cuModuleLoad(CUmodule *module, const char *path)
{
    CUcontext ctx;
    size_t bytes;
    const CUresult bad = cu_current(&ctx);
    if (bad || !module || !path)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    char *image = cu_read_file(path, &bytes);
    if (!image)
        return CUDA_ERROR_FILE_NOT_FOUND;
    const CUresult result = cu_module_load(ctx, image, module);
    free(image);
    return result;
}

CU_EXPORT CUresult cuModuleUnload(CUmodule module)
{
    CUresult bad = module_of(module);
    if (bad || !module->ctx)
        return bad ? bad : CUDA_ERROR_NOT_PERMITTED; /* a library's module goes with the library */
    pthread_mutex_lock(&cu_lock);
    CUmodule *link = &module->ctx->modules;
    while (*link && *link != module)
        link = &(*link)->next;
    if (*link)
        *link = module->next;
    pthread_mutex_unlock(&cu_lock);
    charge_code(module->ctx, -(int64_t)module->bytes);
    cu_module_free(module);
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    const CUresult bad = module_of(module);
    if (bad || !function || !name || !*name)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *function = cu_module_find(module, name);
    return *function ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

CU_EXPORT CUresult cuModuleGetFunctionCount(unsigned int *count, CUmodule module)
{
    const CUresult bad = module_of(module);
    if (bad || !count)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *count = 0;
    for (CUfunction function = module->functions; function; function = function->next)
        ++*count;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuModuleEnumerateFunctions(CUfunction *functions, unsigned int room, CUmodule module)
{
    const CUresult bad = module_of(module);
    if (bad || !functions || !room)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    for (CUfunction function = module->functions; function && room; function = function->next, room--)
        *functions++ = function;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name)
{
    CUcontext ctx;
    CUresult bad = module_of(module);
    if (!bad)
        bad = cu_current(&ctx);
    if (bad || !name || (!pointer && !bytes))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    return cu_module_global(module, module->ctx ? module->ctx : ctx, name, -1, pointer, bytes);
}

CU_EXPORT CUresult cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    const CUresult bad = cu_initialised();
    if (bad || !mode)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *mode = (CUmoduleLoadingMode)2; /* lazy */
    return CUDA_SUCCESS;
}
