/* How long a kernel takes: rules in state/kernels, else the kernel's own name, else a base cost.
 *
 * A rule is a line `PATTERN NS [NS_PER_BLOCK [OTHER_NS EVERY_NS]]`; with the last two, NS and OTHER_NS take turns in every
 * EVERY_NS of CLOCK_MONOTONIC, by the moment of the launch: work that depends on its data. PATTERN is an fnmatch pattern on the kernel's name, the first match
 * wins, the time is NS + NS_PER_BLOCK × blocks of the grid. The file is re-read when it changes (seen within 10 ms).
 * Without a match a name that ends in _<number>(ns|us|ms|s), such as spin_1000us, takes that long; any other kernel
 * SIM_KERNEL_NS.
 */
#ifndef SIM_KERNELS_H
#define SIM_KERNELS_H

#include <stdint.h>

#include "sim_state.h"

#define SIM_KERNEL_NS 5000ull

typedef struct {
    uint64_t version; /* of the rules that `ns` and `ns_per_block` come from; 0: none yet */
    uint64_t ns;
    uint64_t ns_per_block;
    uint64_t other_ns, every_ns;
} sim_kernel_time;

/* Time of one launch of `name` with `blocks` blocks; `cache` belongs to the kernel and starts zeroed. Thread-safe. */
uint64_t sim_kernel_ns(const sim_state *state, const char *name, uint64_t blocks, uint64_t now, sim_kernel_time *cache);

#endif
