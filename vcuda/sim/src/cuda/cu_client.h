/* What the parts of the simulated libcuda share inside one process: the client, contexts, streams, events, work.
 *
 * Handles are pointers to these structs, told from foreign ones by `magic`. Structs of contexts are never freed and
 * those of streams late, so that a stale handle is refused rather than read after free. Locking: `cu_lock` guards all
 * lists and the memory map of the process and is never held while sleeping or while a callback runs; a card's lock
 * may be taken inside it, not the reverse.
 */
#ifndef CU_CLIENT_H
#define CU_CLIENT_H

#include <pthread.h>
#include <stdatomic.h>

#include "sim_cuda.h"
#include "sim_engine.h"
#include "sim_kernels.h"

#define CU_EXPORT __attribute__((visibility("default")))

enum {
    CU_MAGIC_CONTEXT = 0x63747831,
    CU_MAGIC_STREAM = 0x73747231,
    CU_MAGIC_EVENT = 0x65767431,
    CU_MAGIC_MODULE = 0x6d6f6431,
    CU_MAGIC_FUNCTION = 0x666e6331,
    CU_MAGIC_GRAPH = 0x67726831,
    CU_MAGIC_NODE = 0x6e6f6431,
    CU_MAGIC_EXEC = 0x65786531,
    CU_MAGIC_POOL = 0x706f6c31,
    CU_MAGIC_ARRAY = 0x61727231,
    CU_MAGIC_LIBRARY = 0x6c696231
};

typedef struct cu_device {
    int card; /* index in the machine */
    struct CUctx_st *primary; /* made once, revived at each first retain */
    int primary_count;
    unsigned primary_flags;
    struct CUmemPoolHandle_st *default_pool, *current_pool, *graph_pool;
} cu_device;

struct CUctx_st {
    int magic, alive, primary;
    int attached; /* how often, beside its creation */
    int device;   /* ordinal */
    int card;
    int32_t index; /* on the card */
    unsigned flags, api_version;
    unsigned long long id;
    _Atomic int error; /* sticky: set by a fault on the card */
    struct CUstream_st *legacy;
    struct CUstream_st *streams; /* all, the legacy one too */
    struct CUevent_st *events;
    struct CUmod_st *modules;
    size_t limits[8];
    size_t held_limits[3], frame; /* what the card's memory is held for: cu_ctxinfo.c */
    int64_t held;
    int streams_most; /* that there were at a time */
    int cache_config, shared_config;
    uint32_t peers; /* bit per ordinal: access enabled */
};

typedef struct cu_capture cu_capture; /* cu_capture.h */
typedef struct cu_host_queue cu_host_queue; /* cu_host.c */

/* What a stream waits for of another one: memory freed there before that may be used again here. */
enum { CU_FOLLOWS = 8 };
typedef struct {
    int card;
    sim_ticket ticket;
} cu_follow;

struct CUstream_st {
    int magic;
    struct CUctx_st *ctx;
    struct CUstream_st *next;
    int32_t index; /* on the card */
    unsigned flags;
    int priority;
    unsigned long long id;
    cu_capture *_Atomic capture; /* NULL unless capturing */
    struct CUstream_st *capture_next; /* the capture's streams */
    struct CUgraphNode_st **frontier; /* what the next captured node depends on */
    size_t frontier_count;
    cu_host_queue *host_queue;
    cu_follow follows[CU_FOLLOWS];
    unsigned next_follow;
};

struct CUevent_st {
    int magic;
    struct CUctx_st *ctx;
    struct CUevent_st *next, *previous;
    unsigned flags;
    int32_t index; /* on the card */
    uint64_t generation; /* of the last record; 0: never recorded */
    sim_ticket ticket;
    unsigned long long capture_id; /* last recorded in this capture; 0: not in one */
    struct CUgraphNode_st **captured; /* the stream's frontier then */
    size_t captured_count;
};

typedef struct {
    sim_state *state;
    cu_device devices[SIM_MAX_CARDS];
    int device_count;
    _Atomic int ready; /* 1 after a successful cuInit, -1 in a child forked from there */
    _Atomic unsigned long long next_id;
} cu_client;

extern cu_client cu_process;
extern pthread_mutex_t cu_lock;

/* ---- client and contexts ---- */
int cu_initialised(void); /* CUDA_SUCCESS, or why no call is possible */
CUresult cu_device_of(CUdevice device, cu_device **found);
/* The calling thread's context; refuses a destroyed one, and gives back its sticky error. */
CUresult cu_current(CUcontext *ctx);
/* The same for a context handle given by the caller. */
CUresult cu_usable(CUcontext ctx);
sim_card *cu_card(const struct CUctx_st *ctx);
/* After a card-wide wait or push said that it is lost. */
CUresult cu_lost(CUcontext ctx);

/* ---- streams ---- */
/* The stream behind a handle: 0 and CU_STREAM_LEGACY, CU_STREAM_PER_THREAD, or a stream of any live context. */
CUresult cu_stream_of(CUstream handle, CUstream *stream);
CUresult cu_stream_new(CUcontext ctx, unsigned flags, int priority, int legacy, CUstream *stream);
void cu_streams_end(CUcontext ctx);
void cu_events_end(CUcontext ctx);
/* The host is busy with a call for so long. */
void cu_take_time(uint64_t ns);
/* Push operations; `ticket` (may be NULL) gets the moment after them. */
CUresult cu_push(CUstream stream, const sim_op *ops, int count, sim_ticket *ticket);
CUresult cu_wait(CUcontext ctx, const sim_ticket *ticket);
/* Wait for all that the context has submitted. */
CUresult cu_context_wait(CUcontext ctx);

/* ---- work: what goes into a stream, or as a node into a graph ---- */
typedef struct {
    struct CUfunc_st *function;
    unsigned grid[3], block[3];
    unsigned shared_bytes;
    void **params, **extra;
} cu_kernel_work;

typedef struct cu_work {
    CUgraphNodeType kind;
    union {
        cu_kernel_work kernel;
        CUDA_MEMCPY3D copy;
        CUDA_MEMSET_NODE_PARAMS set;
        CUDA_HOST_NODE_PARAMS host;
        CUevent event;
        CUDA_MEM_ALLOC_NODE_PARAMS alloc;
        CUdeviceptr free;
        CUgraph graph;
        struct {
            uint64_t handle;
            int type;
            unsigned size; /* bodies */
        } conditional;
    };
} cu_work;

/* Do the work in stream order, or record it if the stream is capturing. */
CUresult cu_submit(CUstream stream, const cu_work *work);
/* Do it without looking at captures; used by graph launches. */
CUresult cu_run(CUstream stream, const cu_work *work, sim_ticket *ticket);
/* Operation and data effect of a piece of work that is a single operation (kernel, copy, set). */
CUresult cu_effect(CUcontext ctx, const cu_work *work, sim_op *op);
CUresult cu_capture_add(CUstream stream, const cu_work *work, struct CUgraphNode_st **node);
/* Calls that are illegal while anything captures in global mode: CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED then. */
CUresult cu_capture_forbids(void);
CUresult cu_host_push(CUstream stream, CUhostFn function, CUstreamCallback callback, void *data);
void cu_host_end(CUstream stream);
/* What the kernel's launch takes of the card: its code, local memory, and what limits promised. */
CUresult cu_kernel_memory(CUcontext ctx, const cu_kernel_work *kernel);
CUresult cu_context_launches(CUcontext ctx, size_t frame);
uint64_t cu_kernel_op_ns(const cu_kernel_work *kernel);
/* What the kernel does to memory or to a condition, if it is one that does (cu_touch.c). */
void cu_kernel_touch(CUcontext ctx, const cu_kernel_work *kernel);
/* Time of the graph that it launches from the card, if it is the one that does. */
uint64_t cu_kernel_launches_ns(const cu_kernel_work *kernel);

#endif
