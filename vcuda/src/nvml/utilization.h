/* Utilization of a share and of its processes, relative to what the share may use. */
#ifndef VC_UTILIZATION_H
#define VC_UTILIZATION_H

#include "nvml/tenants.h"
#include "base/process.h"

struct vc_utilization {
    unsigned int gpu;                 /* percent of the share's limit of GPU time, at most 100 */
    unsigned int card;                /* the same time in percent of the card */
    unsigned int slots[VC_MAX_SLOTS]; /* `gpu` of each slot */
    uint64_t stamp_us;                /* end of the window, wall clock as NVML's time stamps */
};

/* The container's GPU time on a gated card, in the window between the last two readings. Blocks for 100 ms at the first call in
 * this process while a process is on the card (`in_use`), without a lock held. `card` by its number in the process. */
void vc_utilization_of(uint32_t card, bool in_use, struct vc_utilization *found);

struct vc_busy_process {
    unsigned int pid;
    unsigned int gpu, memory; /* percent */
    uint64_t stamp_us;
};

/* The container's processes on a card of the share, with samples newer than `after_us`; return how many. `busy` has VC_MAX_SLOTS
 * places. */
unsigned int vc_busy_processes(nvmlDevice_t device, uint64_t after_us, struct vc_busy_process *busy);

#endif
