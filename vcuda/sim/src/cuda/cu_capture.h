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

/* Begin a capture: into a graph (an existing one, if given), or into a graphics API's command list. `recaptured` is the graph
 * whose nodes take over the work. */
typedef enum { CU_CAPTURE_TO_GRAPH, CU_CAPTURE_TO_GRAPHICS } cu_capture_use;
CUresult cu_capture_begin(CUstream stream, CUgraph graph, struct CUgraphNode_st *const *from, size_t count, int mode,
                          cu_capture_use use, CUgraph recaptured);
CUresult cu_capture_end(CUstream stream, int to_graphics, CUgraph *graph);

CUresult cu_event_record(CUevent event, CUstream stream, sim_ticket *after);
CUresult cu_event_wait(CUevent event, CUstream stream, sim_ticket *after);

#endif
