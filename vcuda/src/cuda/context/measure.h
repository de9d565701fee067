/* What creating a context costs on this card, when nobody has told us: read from NVML around the creation. */
#ifndef VC_MEASURE_H
#define VC_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#define VC_MEASURE_PROCESSES 256

struct vc_measure {
    void *device;        /* nvmlDevice_t; NULL: no NVML, nothing is measured */
    uint64_t used_bytes; /* of the card, at the beginning */
    unsigned int count;  /* of the processes listed then */
    struct vc_measured_process {
        unsigned int pid;
        uint64_t bytes;
    } processes[VC_MEASURE_PROCESSES];
};

/* Begin on the card with this UUID. Loads the real NVML the first time (milliseconds, small beside a context). */
void vc_measure_begin(struct vc_measure *measure, const char *uuid);

/* Bytes that the card's use grew by on our account since the beginning, or 0 if that can't be told. Our own entry in NVML's process list
 * says it, but for a little that only the card's total shows. Where NVML counts processes otherwise than we do (every pod), ours is the least of those that came: whoever else came
 * has a context, too. Where we are not listed at all, it is what the card's total grew by beyond the processes that are. */
uint64_t vc_measure_end(const struct vc_measure *measure);

#endif
