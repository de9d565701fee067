/* What the parts of the simulated libnvidia-ml share: the library's state, its cards, and the checks every call makes.
 *
 * The library attaches to the machine as an observer and never detaches: in a process that is a CUDA client as well,
 * closing the locks file would tell the machine that the client has died.
 */
#ifndef NVML_INTERNAL_H
#define NVML_INTERNAL_H

#include "nvml_abi.h"
#include "sim_state.h"

/* One card or MIG instance; `index` is its place in the machine. The handles of NVML point here. */
struct nv_handle {
    int index;
    int visible;         /* when the library was initialised */
    int parent;          /* place of the parent card, or -1 */
    int nvml_index;      /* among the visible whole cards, or among the parent's visible instances */
    int sm_clock, memory_clock, bus_width, power_limit, pci_device, nvlinks, mig_capable;
    int gpu_instance, compute_instance, slices, memory_slices, start;
    unsigned domain, bus, device; /* PCI */
    struct {
        int links; /* NVLinks to it */
        int level; /* nvmlGpuTopologyLevel_t without regard to NVLink, or -1: not said */
    } peers[SIM_MAX_CARDS];
};

extern sim_state *nv_state;
extern struct nv_handle nv_cards[SIM_MAX_CARDS];
extern int nv_card_count;

/* Fill nv_cards from the machine's description and the device nodes. */
void nv_cards_load(void);

/* NVML_SUCCESS between nvmlInit and nvmlShutdown, else NVML_ERROR_UNINITIALIZED. */
nvmlReturn_t nv_ready(void);

/* Check a call on `device`: initialised, a handle of ours, not lost, pointer arguments there (`arguments_ok`).
 * Sleeps for an injected slow call. */
nvmlReturn_t nv_check(nvmlDevice_t device, int arguments_ok);
/* The same, and the device must be a whole card: NVML_ERROR_NOT_SUPPORTED for a MIG instance. */
nvmlReturn_t nv_check_card(nvmlDevice_t device, int arguments_ok);

const sim_card_config *nv_config(nvmlDevice_t device);
/* The card that has the node: itself, or a MIG instance's parent. */
nvmlDevice_t nv_card_of(nvmlDevice_t device);
int nv_is_lost(int index);
/* Number `which` of the visible whole cards (`parent` -1) or of a card's visible instances, or NULL. */
nvmlDevice_t nv_visible(int parent, int which);

/* Copy text into a caller's buffer: NVML_ERROR_INSUFFICIENT_SIZE when it does not fit. */
nvmlReturn_t nv_text(const char *text, char *buffer, unsigned size);

/* Microseconds since 1970 of a CLOCK_MONOTONIC moment: NVML's time stamps. */
unsigned long long nv_wall_us(uint64_t monotonic_ns);

/* The window that NVML's utilization averages: it ended up to a sixth of a second ago and is one second long. */
void nv_window(uint64_t *from_ns, uint64_t *to_ns);
/* Percent busy inside that window; slot -1 is the whole card. */
unsigned nv_busy_percent(int index, int32_t slot);
/* Milliwatts that a card draws while it is so busy. */
unsigned nv_power_at(nvmlDevice_t device, unsigned busy_percent);

/* NVLinks: how many of a card's links are in use, and the peer behind link `link` (NULL: none). */
int nv_links_used(nvmlDevice_t device);
nvmlDevice_t nv_link_peer(nvmlDevice_t device, unsigned link);

#endif
