/* Layout of state/shared: the one mapping through which all clients of a simulated machine see the same cards.
 *
 * Everything of a card is read and written under its robust mutex (sim_card_lock), except single aligned words that
 * are documented as readable without it. Times are CLOCK_MONOTONIC nanoseconds. A client may die at any instruction:
 * whatever it owned is found by its process slot and removed by the next one who looks (sim_reap).
 */
#ifndef SIM_SHARED_H
#define SIM_SHARED_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>

#include "sim_config.h"

#define SIM_MAGIC 0x314d495341445543ull
enum {
    SIM_LAYOUT = 3,
    SIM_MAX_PROCESSES = 256,
    SIM_MAX_CONTEXTS = 256,  /* per card */
    SIM_MAX_STREAMS = 1024,  /* per card */
    SIM_MAX_EVENTS = 131072, /* per card */
    SIM_RING = 1024,         /* operations a stream holds before submission blocks, as on a real card */
    SIM_SAMPLES = 64,        /* ring of utilization buckets */
    SIM_XIDS = 16,
    SIM_MAX_OBJECTS = 4096, /* per card: memory that a process has handed to others */
    SIM_MAX_LIMITS = 128,   /* per card: control groups with a limit */
    SIM_GROUP_TEXT = 512,
    SIM_NONE = -1
};
#define SIM_SAMPLE_NS 50000000ull /* width of a utilization bucket */

/* ---- work ---- */

typedef enum {
    SIM_OP_WORK = 1, /* occupies the card's compute: kernels, graphs, memsets, device copies */
    SIM_OP_COPY_IN,  /* occupies the host-to-device copy engine */
    SIM_OP_COPY_OUT, /* occupies the device-to-host copy engine */
    SIM_OP_RECORD,   /* stamps event `event`, generation `value` */
    SIM_OP_WAIT,     /* until event `event` of card `card` has reached generation `value` */
    SIM_OP_HOST,     /* until its owner says sim_host_done: callbacks */
    SIM_OP_AFTER     /* until stream `event` of this card (with the serial in `value`'s upper half) has done its lower half */
} sim_op_kind;

typedef struct {
    uint8_t kind;
    uint8_t unused;
    uint16_t card;  /* SIM_OP_WAIT: the event's card */
    uint32_t event; /* SIM_OP_WORK: launches that it counts as */
    uint64_t order; /* submission order within the context: legacy-stream barriers compare it */
    uint64_t ns;    /* duration alone on the card */
    uint64_t reach_ns; /* it reaches the card no earlier */
    uint64_t value;
} sim_op;

typedef struct {
    uint64_t generation; /* last recorded; written by the owner under the card's lock */
    _Atomic uint64_t done; /* last completed generation; readable without the lock */
    _Atomic uint64_t time_ns; /* when `done` completed; valid once `done` >= the generation asked for */
    int32_t owner; /* process slot, or SIM_NONE: free */
    int32_t next_free;
} sim_event;

typedef struct {
    int32_t context;  /* context index on this card, or SIM_NONE: free */
    int32_t next;     /* next stream of the same context */
    int32_t priority;
    uint8_t blocking; /* takes part in the legacy default stream's barriers */
    uint8_t legacy;   /* is the legacy default stream */
    uint8_t host_reached; /* the head is SIM_OP_HOST and may run now */
    uint8_t started;  /* the head has been admitted (its barriers were met) */
    uint8_t closing;  /* freed as soon as it is empty */
    uint8_t unused[2];
    uint32_t serial;  /* grows with each use of the entry: tells a ticket of a stream that is gone */
    _Atomic uint64_t submitted; /* operations ever pushed */
    _Atomic uint64_t done;      /* operations ever completed; readable without the lock */
    uint64_t submitted_ns;      /* sum of durations ever pushed: waiters predict with it */
    uint64_t done_ns;           /* of those completed */
    uint64_t left_ns;           /* of the head, once started */
    uint64_t ready_ns;          /* the head does not run before that, once started */
    uint64_t stamped_ns;        /* the last event's time: the next one is not before it */
    sim_op ring[SIM_RING];
} sim_stream;

typedef struct {
    int32_t process; /* process slot, or SIM_NONE: free */
    int32_t first_stream;
    int32_t legacy_stream;
    int32_t foreign; /* a stream waits for an event of this card + 1; 0: none does */
    uint64_t order; /* last submission order given out */
    uint64_t bytes; /* what the context itself costs */
} sim_context;

/* ---- accounting ---- */

typedef struct {
    uint64_t bucket; /* start time / SIM_SAMPLE_NS: tells a stale entry */
    uint64_t busy_ns; /* compute busy inside the bucket */
} sim_sample;

typedef struct {
    uint32_t generation; /* of the process slot that this belongs to; 0: unused */
    int32_t contexts;
    uint64_t context_bytes;
    uint64_t memory_bytes; /* allocations, without contexts */
    uint64_t managed_bytes; /* of these, managed memory, which no group's limit counts */
    uint64_t peak_bytes;   /* of both together */
    uint64_t busy_ns;      /* ground truth of GPU time: union of its busy intervals */
    uint64_t launches;
    sim_sample samples[SIM_SAMPLES];
} sim_usage;

typedef struct {
    _Atomic int32_t lost;         /* every call on the card fails, NVML says GPU_IS_LOST */
    _Atomic int32_t fail_next;    /* the next n allocations fail; -1: all */
    _Atomic int32_t fail_code;    /* with this CUresult */
    _Atomic int32_t slow_us;      /* every call takes that much longer */
    _Atomic int32_t fault_launch; /* the next launch ends in CUDA_ERROR_ILLEGAL_ADDRESS (sticky for its process) */
    _Atomic uint64_t xid_count; /* Xids ever; the last SIM_XIDS are in `xids`, number n at n % SIM_XIDS */
    struct {
        uint64_t code;
        uint64_t time_ns;
    } xids[SIM_XIDS];
} sim_faults;

/* Memory that processes share. It is the card's until the last of them lets go; one of them pays for it meanwhile. */
typedef struct {
    uint64_t id; /* 0: free */
    uint64_t bytes;
    int32_t payer; /* process slot whose memory_bytes hold it */
    uint64_t holders[SIM_MAX_PROCESSES / 64];
} sim_object;

/* What the processes of a control group may hold together (sim_limits.c). */
typedef struct {
    uint64_t group; /* its ID, which is its folder's inode number; 0: free */
    uint64_t soft_bytes, hard_bytes;
    uint64_t before_bytes[SIM_MAX_PROCESSES]; /* by the driver's own accounting: held when the limit came, never counted */
    char path[SIM_GROUP_TEXT]; /* from the root of the hierarchy on */
} sim_limit;

typedef struct {
    pthread_mutex_t mutex;
    sim_card_config config;
    sim_faults faults;
    uint64_t time_ns;    /* the timeline has been evaluated up to here */
    int32_t current;     /* context on the card, or SIM_NONE */
    int32_t switching;   /* a context switch is under way until switch_end_ns */
    uint64_t switch_end_ns;
    uint64_t slice_end_ns;
    uint64_t cold_end_ns; /* until then the context on the card fills caches anew */
    uint64_t random;      /* of the second timing model */
    uint64_t used_bytes; /* all processes' contexts and allocations */
    uint64_t busy_ns;    /* since the machine was made */
    uint64_t switches;
    uint64_t reap_ns;    /* last look for dead processes */
    int32_t first_free_event;
    int32_t events_used;  /* high-water mark */
    int32_t contexts_used; /* high-water mark */
    int32_t streams_used;  /* high-water mark */
    sim_sample samples[SIM_SAMPLES];
    int32_t objects_used; /* high-water mark */
    sim_object objects[SIM_MAX_OBJECTS];
    int32_t limits_used; /* high-water mark */
    sim_limit limits[SIM_MAX_LIMITS];
    sim_usage usage[SIM_MAX_PROCESSES];
    sim_context contexts[SIM_MAX_CONTEXTS];
    sim_event events[SIM_MAX_EVENTS];
    sim_stream streams[SIM_MAX_STREAMS];
} sim_card;

/* ---- the machine ---- */

typedef struct {
    _Atomic int32_t pid; /* in its own PID namespace; 0: free */
    _Atomic int32_t host_pid; /* in the machine's; 0: nobody who could tell has looked yet */
    uint32_t generation; /* grows with each use of the slot */
    uint64_t start_ticks; /* /proc/PID/stat field 22 */
    uint64_t pid_namespace; /* inode number */
    char name[64]; /* argv[0] or comm, for reports */
    char group[SIM_GROUP_TEXT]; /* its control group, when it last took memory of a card with limits */
} sim_process;

typedef struct {
    uint64_t magic; /* written last */
    uint32_t layout;
    uint32_t card_count;
    uint64_t size;
    uint64_t config_hash;
    char driver_version[32];
    int32_t cuda_version;
    _Atomic uint32_t injections; /* faults injected ever; a futex: who waits for events of a card sleeps on it */
    pthread_mutex_t making_mutex; /* of contexts, where that takes time; no other is held with it */
    pthread_mutex_t process_mutex; /* claims and frees process slots; taken after a card's mutex, never before */
    sim_process processes[SIM_MAX_PROCESSES];
    sim_card cards[];
} sim_shared;

#endif
