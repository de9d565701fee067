/* Code and what it needs of the card when it is launched. */
#ifndef VC_CODE_H
#define VC_CODE_H

#include "cuda/memory/context_memory.h"

CUresult vc_launch_pay_first(CUfunction function, CUstream stream);

/* Before a launch of a function, or of a library's kernel, on a stream (NULL: in the current context): pay for its frame, in a context
 * that has not used it for its library, and for a thread's own stream. CUDA_ERROR_OUT_OF_MEMORY: it must not be launched. */
static inline CUresult vc_launch_pay(CUfunction function, CUstream stream)
{
    return VC_LIKELY(vc_frame_is_paid(function) && vc_stream_is_paid(stream)) ? CUDA_SUCCESS : vc_launch_pay_first(function, stream);
}

/* The same for what a kernel node launches; NULL: nothing. */
static inline CUresult vc_node_pay(const CUDA_KERNEL_NODE_PARAMS *node)
{
    return node ? vc_launch_pay(node->func ? node->func : (CUfunction)node->kern, NULL) : CUDA_SUCCESS;
}

/* The hooks' memory side. */
CUresult vc_module_unload(CUmodule module);
CUresult vc_library_unload(CUlibrary library);

#endif
