/* The machine's description, state/machine.conf: text in, cards out.
 *
 * One statement per line, `#` starts a comment line, values with spaces stand in double quotes. Unknown keys are
 * ignored, an unknown statement or a malformed value is an error that names the line.
 *
 *   driver version=550.163.01 cuda=12040 pid_namespace=4026531836 memory_limits=dmem
 *   card index=0 minor=0 uuid=GPU-… model="NVIDIA A100-SXM4-40GB" memory=42949672960 pci=0000:01:00.0 \
 *        numa=0 cc=8.0 sms=108 context=67108864 slice_us=2000 switch_us=75 run_to_completion=0 mig=0 pools=even pool_seed=0 \
 *        context_ms=0 unlisted_kib=0 stream_kib=0 texels=0 \
 *        slice_spread_us=0 switch_spread_us=0 cold_us=0 cold_ppm=0 drag_ppm=0 gap_ns=0 gap_spread_ns=0 call_ns=0 reach_ns=0 \
 *        event_step_ns=1 event_jitter_ns=0 kernel_jitter_ppm=0 timing_seed=0
 *   card index=1 parent=0 profile=1g.5gb caps=3,4 uuid=MIG-… minor=0 memory=… …
 *
 * (One line each in the file: a backslash does not continue a line.) `index` is 0, 1, 2 … in file order. `parent`
 * makes the card a MIG instance of an earlier card that says mig=1; it has a timeline and memory of its own, and is
 * visible with its parent's node and the nvidia-caps/nvidia-cap<N> nodes listed in `caps`. Only index, minor, uuid
 * and memory are required; a client needs nothing else from outside `state/`.
 */
#ifndef SIM_CONFIG_H
#define SIM_CONFIG_H

#include <stddef.h>
#include <stdint.h>

enum { SIM_MAX_CARDS = 32, SIM_MAX_CAPS = 4, SIM_TEXT = 96 };

typedef struct {
    int32_t minor;             /* N of /dev/nvidiaN (of the parent, for a MIG instance) */
    int32_t parent;            /* index of the parent card, or -1 */
    int32_t mig;               /* 1: MIG mode, the card's own compute is not usable */
    int32_t numa;              /* NUMA node, -1 unknown */
    int32_t cc_major, cc_minor; /* compute capability */
    int32_t sms;               /* streaming multiprocessors */
    int32_t run_to_completion; /* 1: a running operation is never preempted at slice end */
    int32_t ragged_pools;      /* 1: memory pools grow and fragment by the second model (cu_pool_space.c) */
    int32_t texels;            /* 1: small arrays of different texel sizes share no chunk */
    int32_t cap_count;
    int32_t caps[SIM_MAX_CAPS]; /* minors of /dev/nvidia-caps/nvidia-capN */
    uint64_t pool_seed;
    uint64_t memory_bytes;
    uint64_t context_bytes; /* what one context costs */
    uint64_t context_ns; /* how long making one takes: one at a time, the memory comes half way */
    uint64_t unlisted_bytes; /* of that, what NVML's list of processes leaves out */
    uint64_t stream_bytes;  /* what one more stream takes, in chunks */
    uint64_t slice_ns;      /* time slice of a context while others wait */
    uint64_t switch_ns;     /* cost of changing the context */
    /* The second timing model: all 0 (and a step of 1) leaves the first one. What is drawn follows from timing_seed. */
    uint64_t slice_spread_ns;  /* a slice lasts slice_ns and up to so much more */
    uint64_t switch_spread_ns; /* a switch costs up to so much more, by which process comes after which */
    uint64_t cold_ns, cold_ppm; /* for so long after a switch, work takes longer by so much */
    uint64_t drag_ppm;         /* while host copies run, work takes longer by so much */
    uint64_t gap_ns, gap_spread_ns; /* between an operation's turn in its stream and its start */
    uint64_t call_ns, reach_ns; /* what handing a kernel over takes the host, a record half of it; and until the card has it */
    uint64_t event_step_ns, event_jitter_ns; /* events tell multiples of the step, late by up to the jitter */
    uint64_t kernel_jitter_ppm; /* a launch takes up to so much more than its kernel's time */
    uint64_t timing_seed;
    char uuid[SIM_TEXT];
    char model[SIM_TEXT];
    char pci[32];
    char profile[32]; /* MIG profile, "" for a whole card */
} sim_card_config;

typedef enum { SIM_LIMITS_NONE, SIM_LIMITS_DMEM, SIM_LIMITS_MISC } sim_memory_limits;

typedef struct {
    int card_count;
    uint64_t pid_namespace; /* the host's: whose PIDs NVML speaks. Default: the kernel's first */
    int cuda_version; /* as cuDriverGetVersion says it */
    sim_memory_limits memory_limits; /* what counts the memory of control groups; only a newer libnvidia-ml can set limits */
    char driver_version[32];
    sim_card_config cards[SIM_MAX_CARDS];
    char *text; /* the file as read, for sim_config_extra */
} sim_config;

/* Read and check `path`. 0, or -1 with one line in `why` that names file, line and reason. Free with sim_config_free. */
int sim_config_read(const char *path, sim_config *config, char *why, size_t why_size);
void sim_config_free(sim_config *config);

/* The value of any key of a card's line (also of keys this header does not know), or of the `driver` line for
 * card -1. 1 if present (copied to `value`, truncated to fit), else 0. */
int sim_config_extra(const sim_config *config, int card, const char *key, char *value, size_t value_size);

#endif
