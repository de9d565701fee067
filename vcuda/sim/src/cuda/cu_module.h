/* Modules, libraries and functions: names found in an image, with what the driver would know of them. */
#ifndef CU_MODULE_H
#define CU_MODULE_H

#include "cu_client.h"

enum { CU_PARAMS = 64 };

/* A kernel is a function that has not been bound to a context: one struct serves both handles. */
struct CUfunc_st {
    int magic;
    struct CUfunc_st *next;
    CUmodule module;
    char *name;
    size_t param_count;
    struct {
        size_t offset, bytes;
    } params[CU_PARAMS];
    int attributes[16];
    sim_kernel_time time;
    unsigned legacy_block[3]; /* cuFuncSetBlockShape */
};

/* A context that has the module, and which life of it. */
typedef struct cu_load {
    struct cu_load *next;
    CUcontext ctx;
    unsigned long long id;
    CUdeviceptr *pointers; /* of the module's globals, in their order; 0: not asked for yet */
} cu_load;

typedef struct cu_global {
    struct cu_global *next;
    char *name;
    size_t bytes;
    int managed;
    CUdeviceptr shared; /* managed: the same in every context */
} cu_global;

struct CUmod_st {
    int magic;
    CUcontext ctx; /* NULL: a library's */
    CUmodule next;
    CUfunction functions;
    cu_global *globals;
    int any_name; /* the image's names can't be read (compressed): each that is asked for exists */
    size_t bytes;   /* code and variables: charged to the context, a library's with its first use there */
    cu_load *loads; /* under cu_lock */
    _Atomic(CUcontext) last; /* used it last; `last_id` tells whether that is the same context still */
    _Atomic unsigned long long last_id;
    CUlibrary library;
};

struct CUlib_st {
    int magic;
    CUmodule module;
};

/* Read an image (PTX, cubin, fat binary or the product of cuLinkComplete) into an empty module. */
CUresult cu_image_read(const void *image, CUmodule module);
/* Bytes of an image that says its own length; PTX: up to the terminating zero, included. 0: not an image. */
size_t cu_image_bytes(const void *image);
CUfunction cu_module_add(CUmodule module, const char *name, size_t length);
void cu_module_add_global(CUmodule module, const char *name, size_t length, size_t bytes, int managed);

CUresult cu_module_load(CUcontext ctx, const void *image, CUmodule *module);
void cu_module_free(CUmodule module);
void cu_module_clear(CUmodule module); /* free what it holds */
/* A library's code is loaded when a context first uses it, and charged there: each context has its own code and variables. */
CUresult cu_module_need(CUmodule module, CUcontext ctx);
CUfunction cu_module_find(CUmodule module, const char *name);
/* `managed`: whether the variable must be a managed one; -1: it may be either. */
CUresult cu_module_global(CUmodule module, CUcontext ctx, const char *name, int managed, CUdeviceptr *pointer, size_t *bytes);
CUresult cu_function_of(CUfunction function);
/* JIT options that give back text or sizes: our logs are empty. */
void cu_jit_logs(unsigned count, const CUjit_option *options, void **values);
char *cu_read_file(const char *path, size_t *bytes);

/* The product of cuLinkComplete: this header, then `count` images, each after its 8-byte length. */
typedef struct {
    char magic[8];
    uint64_t bytes; /* with this header */
    uint64_t count;
} cu_linked;
#define CU_LINKED_MAGIC "SIMLINK1"

#endif
