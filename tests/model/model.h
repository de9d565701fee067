/* The reference model's client: one world of CUDA objects per process, changed by random steps that depend on nothing but a
 * seed and their number. A step can therefore be left out without changing what the others ask for. */
#ifndef MODEL_H
#define MODEL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "model_cuda.h"

#define MIB ((size_t)1 << 20)
#define CHUNK (2 * MIB)

enum { DEVICES = 2, CONTEXTS = 6, STREAMS = 6, POINTERS = 24, POOLS = 5, HANDLES = 8, RANGES = 3, PARTS = 8, ARRAYS = 8 };
enum { MULTICASTS = 2, MODULES = 4, LIBRARIES = 3, GRAPHS = 5, EXECS = 5, EVENTS = 3, GREENS = 2, HOSTS = 3, TAKEN = 8 };
enum { IMPORTS = 2, EXTERNALS = 2 };
enum { NONE = -1 };
enum { PARCELS_IN = 900, PARCELS_OUT, STEPS_IN, LINES_OUT }; /* descriptors of all processes; of the workers */

/* ---- one step ---- */

struct dice {
    uint64_t state;
};

/* 0 … sides - 1. */
unsigned roll(struct dice *dice, unsigned sides);
/* Whether steps of this kind, or this feature of one, are to be taken: not those that the command left out. */
bool wanted(const char *name);
/* Bytes to ask for: mostly small, sometimes some MiB, rarely nothing or more than any card has. */
size_t roll_bytes(struct dice *dice);

/* Append to the step's line in the trace. Nothing that differs between two runs may be said: no address, no time. */
__attribute__((format(printf, 1, 2))) void say(const char *format, ...);

/* ---- the world ---- */

struct context { /* the first DEVICES are the primary ones */
    CUcontext handle;
    int device;
    bool alive;
};

enum pointer_kind { PLAIN = 1, MANAGED, OPENED, POOLED, CAPTURED, IMPORTED };

struct pointer {
    CUdeviceptr at;
    size_t bytes;
    int kind, context;
    int card; /* of a POOLED one's pool */
};

struct physical {
    CUmemGenericAllocationHandle handle;
    size_t bytes;
    int device;
    bool held;
};

struct range {
    CUdeviceptr at;
    bool reserved;
    size_t mapped[PARTS]; /* bytes of the mapping that begins in the part */
    bool taken[PARTS];
};

struct array {
    CUarray array;
    CUmipmappedArray mipmap;
    int context;
    bool held, sparse;
};

struct code {
    CUmodule module;
    CUlibrary library;
    CUfunction function;
    int context; /* of a module */
    bool held;
};

struct stream {
    CUstream handle;
    int context;
    bool held, capturing;
    bool spoiled; /* what it captures holds a function that is gone */
};

struct event {
    CUevent handle;
    int context;
    bool held;
};

struct graph {
    CUgraph graph;
    CUgraphExec exec;
    bool held;
    bool spoiled; /* a function in it is gone: it may only be destroyed */
    CUgraphNode last;
    CUdeviceptr taken[TAKEN]; /* by its allocation nodes, not freed in it */
};

struct external {
    void *memory;
    size_t bytes;
    int context;
};

struct world {
    int devices;
    int current; /* index of the current context, or NONE */
    struct context contexts[CONTEXTS];
    struct pointer pointers[POINTERS];
    CUdeviceptr stale[4];
    void *hosts[HOSTS];
    int host_context[HOSTS];
    CUmemoryPool pools[POOLS];
    int pool_device[POOLS];
    bool pool_managed[POOLS];
    bool pool_bounded[POOLS]; /* by a size of its own */
    struct physical physicals[HANDLES];
    struct range ranges[RANGES];
    CUmemGenericAllocationHandle multicasts[MULTICASTS];
    struct array arrays[ARRAYS];
    struct code modules[MODULES], libraries[LIBRARIES];
    struct stream streams[STREAMS];
    struct event events[EVENTS];
    struct graph graphs[GRAPHS], execs[EXECS];
    CUgreenCtx greens[GREENS];
    CUmemoryPool imports[IMPORTS];
    struct external externals[EXTERNALS];
};

extern struct world world;

/* Whether a context is current; says so in the trace if none is. */
bool has_context(void);
/* A stream's handle: one of the world's, or a default one (NULL, legacy, per-thread). `index` (may be NULL): which, or NONE. */
CUstream some_stream(struct dice *dice, int *index);
/* All that the context owned is gone. */
void context_ended(int context);
/* No graph may use this code again. */
void code_ended(void);
/* Ask the driver which context is current, and whether the primary ones are alive. */
void look(void);

/* ---- the kinds of steps; each file has a table, ended by a NULL name ---- */

struct kind {
    const char *name;
    unsigned weight;
    bool needs_context;
    void (*run)(struct dice *dice);
    void (*end)(void); /* give back all that is left, at the end of the run; may be NULL */
};

extern const struct kind memory_kinds[], pool_kinds[], map_kinds[], array_kinds[], code_kinds[], work_kinds[], graph_kinds[],
    context_kinds[], sharing_kinds[];

/* ---- what the card and the ledger say ---- */

/* `state` is the simulated machine's mapping; `usage` the share's (NULL: natively), with its limits in bytes. */
void books_open(const char *state, const char *usage, const uint64_t *limits);
/* Say what breaks the promise: a ledger below the books, books above the limit. Returns whether something did. */
bool books_check(void);
int64_t books_room(int card); /* between ledger and limit */
/* Say so if an allocation was refused that the limit has room for by the ledger itself. */
void books_judge(int result, int card, size_t bytes);
uint64_t books_of(int card);
uint64_t ledger_of(int card);

#endif
