/* The container's own processes on a card of the share. */
#ifndef VC_TENANTS_H
#define VC_TENANTS_H

#include "nvml/hooks.h"

struct vc_tenant {
    unsigned int pid;   /* as the asking process's PID namespace counts */
    uint32_t slot;      /* its slot in the card's region */
    uint64_t bytes;     /* of the card, by the ledger */
    uint64_t gpu_ns;    /* GPU time charged to it since it claimed its slot; only gated shares are charged */
    uint64_t since_ns;  /* when it claimed its slot, CLOCK_MONOTONIC */
};

/* Fill in the processes that have a context or memory on the card; return how many. `processes` has VC_MAX_SLOTS places.
 * Those that this process's PID namespace can't name are left out. */
unsigned int vc_tenants(const struct vc_card *card, struct vc_tenant *processes);

/* NVML's protocol for lists: *room becomes the number there is; too small a room is an error. */
nvmlReturn_t vc_nvml_fits(unsigned int *room, const void *buffer, unsigned int count);

#endif
