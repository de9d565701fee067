/* Memory that goes when a stream gets there: freed by cuMemFreeAsync, or left by a sparse array. */
#ifndef VC_DEPARTURE_H
#define VC_DEPARTURE_H

#include "cuda/memory/account.h"

/* `gone(what)` is called once the work that is in `stream` (an explicit handle) now is done, or its context has ended: some time
 * later, by whichever thread looks next. Without host memory or an event it is never called: what it stands for stays charged. */
void vc_depart(CUstream stream, void (*gone)(void *what), void *what);

#endif
