/* Memory that another interface made (Vulkan, OpenGL, …), in which no shim stands: charged while CUDA has it. */
#include "cuda/memory/account.h"

CUresult vc_hook_cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *descriptor)
{
    struct vc_charge charge;
    if (!memory || !descriptor)
        return vc_real.cuImportExternalMemory(memory, descriptor);
    CUresult result = vc_charge_current(&charge, vc_round_up(descriptor->size, VC_CHUNK));
    if (result != CUDA_SUCCESS)
        return result;
    result = vc_real.cuImportExternalMemory(memory, descriptor);
    if (result != CUDA_SUCCESS) {
        vc_charge_drop(&charge);
        return result;
    }
    if (vc_charge_keep_opaque(&charge, *memory))
        return CUDA_SUCCESS;
    vc_real.cuDestroyExternalMemory(*memory);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult vc_hook_cuDestroyExternalMemory(CUexternalMemory memory)
{
    struct vc_freeing freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)memory, &freeing);
    CUresult result = vc_real.cuDestroyExternalMemory(memory);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}
