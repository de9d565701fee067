/* Contexts whose memory another context owns. */
#include "cuda/driver/owner.h"

#include <stdlib.h>

#include "base/table.h"

struct owned {
    uint64_t key; /* the context */
    CUcontext owner;
};
VC_TABLE(owners, struct owned);
static uint32_t any;

void vc_owner_set(CUcontext context, CUcontext owner)
{
    struct owned owned = {(uint64_t)(uintptr_t)context, owner};
    if (context != owner && vc_table_put(&owners, &owned))
        vc_store_release(&any, 1);
}

CUcontext vc_context_owner(CUcontext context)
{
    struct owned owned;
    if (VC_LIKELY(!vc_load_acquire(&any)) || !context || !vc_table_get(&owners, (uint64_t)(uintptr_t)context, &owned))
        return context;
    return owned.owner;
}

static bool is_owned_by(const void *record, const void *owner)
{
    return ((const struct owned *)record)->owner == owner;
}

void vc_owner_ended(CUcontext owner)
{
    struct owned one;
    size_t count;
    if (VC_LIKELY(!vc_load_acquire(&any)) || !owner)
        return;
    free(vc_table_take_all(&owners, is_owned_by, owner, &count));
    vc_table_take(&owners, (uint64_t)(uintptr_t)owner, &one);
}
