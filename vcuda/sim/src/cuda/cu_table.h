/* Looking up an export in the table made from cu_api.def. */
#ifndef CU_TABLE_H
#define CU_TABLE_H

#include "cu_client.h"

/* A row of the table: an export, the base name and kind of default stream that it is found by, and since which version. */
typedef struct {
    const char *base;
    int since, kind;
    void (*address)(void);
} cu_api;
enum { SIM_LEGACY, SIM_THREAD };

/* What a newer driver has beyond driver 550 (vcuda/sim/src/newer); not there in a library of the 550's. */
extern const cu_api cu_newer_table[] __attribute__((weak, visibility("hidden")));
extern const size_t cu_newer_count __attribute__((weak, visibility("hidden")));

enum { CU_LOOKUP_FOUND = 0, CU_LOOKUP_NOT_FOUND = 1, CU_LOOKUP_TOO_NEW = 2 };

/* The newest variant of base name `name` that `version` may have, of the default stream's kind that `flags` ask for;
 * *address is NULL unless *status says found. */
CUresult cu_look_up(const char *name, void **address, int version, cuuint64_t flags, int *status);

#endif
