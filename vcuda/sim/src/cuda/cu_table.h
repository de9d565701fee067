/* Looking up an export in the table made from cu_api.def. */
#ifndef CU_TABLE_H
#define CU_TABLE_H

#include "cu_client.h"

enum { CU_LOOKUP_FOUND = 0, CU_LOOKUP_NOT_FOUND = 1, CU_LOOKUP_TOO_NEW = 2 };

/* The newest variant of base name `name` that `version` may have, of the default stream's kind that `flags` ask for;
 * *address is NULL unless *status says found. */
CUresult cu_look_up(const char *name, void **address, int version, cuuint64_t flags, int *status);

#endif
