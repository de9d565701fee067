/* Stream capture: work that is recorded into a graph instead of being done. */
#ifndef CU_CAPTURE_H
#define CU_CAPTURE_H

#include "cu_client.h"

/* An ordinary call on a capturing stream that must not be: the capture becomes invalid. Returns the error to give. */
/* Work for the legacy stream while a blocking stream of its context captures: refused, the capture is invalid. */
CUresult cu_capture_implicit(CUstream stream);
CUresult cu_capture_break(CUstream stream);
/* The stream goes away while capturing. */
void cu_capture_abandon(CUstream stream);
/* cuEventRecord on a capturing stream: the event stands for the capture's frontier. */
CUresult cu_capture_record(CUstream stream, CUevent event);
/* cuStreamWaitEvent with a captured event: the stream joins the capture. */
CUresult cu_capture_wait(CUstream stream, CUevent event);
/* An allocation becomes a node whose address is known at once. */
CUresult cu_capture_alloc(CUstream stream, cu_work *work, CUdeviceptr *pointer);

CUresult cu_event_record(CUevent event, CUstream stream, sim_ticket *after);
CUresult cu_event_wait(CUevent event, CUstream stream, sim_ticket *after);

#endif
