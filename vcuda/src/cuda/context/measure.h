/* What creating a context costs on this card, when nobody has told us: read from NVML around the creation. */
#ifndef VC_MEASURE_H
#define VC_MEASURE_H

#include <stdbool.h>
#include <stdint.h>

#define VC_MEASURE_PROCESSES 64

struct vc_measure {
    void *device;           /* nvmlDevice_t; NULL: no NVML, nothing is measured */
    uint64_t used_bytes;    /* of the card, at the beginning */
    uint64_t own_bytes;     /* of this process, where NVML's PIDs are ours */
    uint64_t others_bytes;  /* of all other processes listed */
    unsigned int processes;
};

/* Begin on the card with this UUID. Loads the real NVML the first time (milliseconds, small beside a context). */
void vc_measure_begin(struct vc_measure *measure, const char *uuid);

/* Bytes that the card's use grew by on our account since the beginning, or 0 if that can't be told honestly: our own
 * entry in NVML's process list says it; where we don't find ourselves there (another PID namespace), the card's total
 * does, provided that no other process came, went or changed. */
uint64_t vc_measure_end(const struct vc_measure *measure);

#endif
