/* Ends of a context's life that several parts take part in. */
#ifndef CU_CONTEXT_H
#define CU_CONTEXT_H

#include "cu_client.h"

/* Guards the devices' primary contexts and their counts; taken before every other lock. */
extern pthread_mutex_t cu_primary_mutex;
extern const size_t cu_default_limits[8]; /* by CUlimit */

/* Free all that the context has, its place on the card last. Work that is still queued is dropped. */
void cu_context_end(CUcontext ctx);
void cu_modules_end(CUcontext ctx);

#endif
