/* Contexts whose memory another context owns. */
#include "cuda/driver/owner.h"

#include "base/ledger.h"

static struct vc_ledger owners = VC_LEDGER_INITIALIZER;
static uint32_t any;

static void forget(void)
{
    vc_ledger_reset(&owners);
    any = 0;
}

void vc_owner_set(CUcontext context, CUcontext owner)
{
    static uint32_t watching;
    if (VC_UNLIKELY(!vc_load_relaxed(&watching)) && __atomic_exchange_n(&watching, 1, __ATOMIC_RELAXED) == 0)
        vc_region_on_fork(forget);
    struct vc_entry entry = {.key = (uint64_t)(uintptr_t)context, .owner = (uint64_t)(uintptr_t)owner};
    if (context != owner && vc_ledger_put(&owners, &entry))
        vc_store_release(&any, 1);
}

CUcontext vc_context_owner(CUcontext context)
{
    struct vc_entry entry;
    if (VC_LIKELY(!vc_load_acquire(&any)) || !context || !vc_ledger_get(&owners, (uint64_t)(uintptr_t)context, &entry))
        return context;
    return (CUcontext)(uintptr_t)entry.owner;
}
