/* Attaching to a simulated machine, its locks, its processes, and what may be asked about a card.
 *
 * libcuda, libnvidia-ml and the Python facade (through either library) all stand on these functions. State directory:
 * `VCUDA_SIM_DIR`, else /run/vcuda-sim; a client needs only `<dir>/state/`:
 *
 *   machine.conf  the cards (sim_config.h)
 *   shared        the mapping (sim_shared.h), made by whoever comes first
 *   locks         byte N is POSIX-locked by the process in slot N for as long as it lives
 *   kernels       how long kernels take: lines `PATTERN NS [NS_PER_BLOCK]` (sim_kernels.h)
 *
 * POSIX record locks vanish when *any* descriptor of the file is closed in the process: nobody but this module may
 * open `locks`, and a client's descriptor is never closed.
 */
#ifndef SIM_STATE_H
#define SIM_STATE_H

#include <stddef.h>
#include <stdint.h>

#include "sim_config.h"
#include "sim_shared.h"

typedef struct {
    char directory[3072]; /* <dir>/state */
    char root[3072];      /* <dir> */
    sim_config config;
    sim_shared *shared;
    int lock_fd;
    int32_t slot; /* own process slot, or SIM_NONE: an observer */
} sim_state;

enum { SIM_UNKNOWN_PID = 1 << 22 }; /* Linux gives out none from here on (PID_MAX_LIMIT) */

/* CLOCK_MONOTONIC now. */
uint64_t sim_now(void);

/* For the body of a loop that only waits for the clock. */
static inline void sim_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

/* The directory that the environment or the default names. */
const char *sim_default_directory(void);

/* Attach to the machine in `directory` (NULL: the default one), making `shared` if nobody has. NULL with one line in
 * `why` if there is no machine or its files are damaged. The result is an observer until sim_process_join. */
sim_state *sim_attach(const char *directory, char *why, size_t why_size);

/* Drop the mapping. The locks descriptor stays open if this process is a client of the machine. */
void sim_detach(sim_state *state);

/* Claim a process slot (idempotent). 0, or -1 when all are taken. A forked child does not hold its parent's slot and
 * must not use its parent's state: libcuda refuses calls there. */
int sim_process_join(sim_state *state);

/* Whether slot `slot` belongs to a live process; its PID as this process sees it through *pid (0: not visible). */
int sim_process_alive(sim_state *state, int32_t slot, int *pid);

/* ---- visibility ---- */

/* Folder of the device nodes: $VCUDA_SIM_DEV, else <dir>/root/dev if it exists, else /dev. */
const char *sim_device_folder(const sim_state *state);
/* Whether the node (path below that folder) exists and may be opened: a node without a driver behind it counts. */
int sim_node_usable(const sim_state *state, const char *name);
/* Whether this process sees the card: its node, for a MIG instance also its capability nodes. */
int sim_card_visible(const sim_state *state, int card);

/* Take a lock that all processes of the machine share: 1 where who held it died, which is to be made consistent. */
int sim_lock(pthread_mutex_t *mutex);

/* ---- a card, under its lock ---- */

sim_card *sim_card_at(sim_state *state, int card);
/* Lock, bring the timeline up to now and (at most every 20 ms) reap the dead. Returns the time it is up to. */
uint64_t sim_card_lock(sim_state *state, int card);
void sim_card_unlock(sim_state *state, int card);
/* Reap processes that are gone at once, whatever the last look. Lock held. */
void sim_reap(sim_state *state, int card);
/* Reap them as they end, for so long: a driver ends what a process had running while the kernel closes its files; here that runs on until
 * somebody looks. Nor is anybody stopped within a card's lock meanwhile. No lock held. */
void sim_watch(sim_state *state, uint64_t for_ns);

/* ---- views for observers; each locks by itself ---- */

typedef struct {
    uint64_t used_bytes, free_bytes, busy_ns, switches, xid_count;
    int lost;
    int process_count;
    int running; /* compute is in use at this moment */
    uint64_t now_ns;
} sim_card_view;

typedef struct {
    int pid; /* as this process sees it; 0 when it is outside this PID namespace */
    int host_pid; /* as the machine's host sees it; above every PID there is, while nobody of the host has looked */
    int32_t slot;
    uint32_t generation;
    int contexts;
    uint64_t context_bytes, memory_bytes, peak_bytes, busy_ns, launches;
    char name[64];
} sim_process_view;

void sim_view_card(sim_state *state, int card, sim_card_view *view);
/* Processes that hold a context or memory on the card; returns how many there are, writes at most `capacity`. */
int sim_view_processes(sim_state *state, int card, sim_process_view *views, int capacity);
/* Busy part of [from_ns, to_ns) in ppm, of the card or (slot >= 0) of one process; bucketed by SIM_SAMPLE_NS. */
int sim_busy_ppm(sim_state *state, int card, int32_t slot, uint64_t from_ns, uint64_t to_ns);
/* The newest samples (time of the bucket's end, ppm busy) after `after_ns`, oldest first; returns the number. */
int sim_busy_samples(sim_state *state, int card, int32_t slot, uint64_t after_ns, uint64_t *end_ns, uint32_t *ppm,
                     int capacity);
/* Sleep for an injected slow_us. No lock may be held. */
void sim_slow_call(sim_state *state, int card);

/* ---- faults: text commands, also simInject ----
 *   lost CARD 0|1 | xid CARD CODE | fail_alloc CARD COUNT [CURESULT] | slow CARD MICROSECONDS | fault_launch CARD | clear CARD
 * Xids 48, 74, 79, 94, 95 do not lose a card by themselves. 0, or -1 with the reason. */
int sim_inject(sim_state *state, const char *text, char *why, size_t why_size);

/* JSON: {"driver_version", "now_ns", "cards": [{index, uuid, …, "processes": [{pid, name, …}]}]}. Bytes needed, like
 * snprintf. */
int sim_report(sim_state *state, char *buffer, size_t size);

/* ---- exported by both libraries for ctypes: `directory` NULL is the default; -1 with the reason in `buffer` ---- */
int simReport(const char *directory, char *buffer, size_t size);
int simInject(const char *directory, const char *text, char *buffer, size_t size);
int simWatch(const char *directory, uint64_t for_ns, char *buffer, size_t size);

#endif
