/* Physical memory by handle: who else than handles and mappings keeps it. */
#ifndef VC_VMM_H
#define VC_VMM_H

#include "cuda/driver/hooks.h"

/* What a handle stands for: memory that is charged, a multicast object, or something imported, which are not. */
struct vc_object;

/* Keep the object behind a handle, or behind a mapped address; NULL: not one of ours, nothing to drop. */
struct vc_object *vc_object_hold(CUmemGenericAllocationHandle handle);
struct vc_object *vc_object_hold_at(CUdeviceptr address);

/* The opposite; the last one returns the memory to the quota, and what is bound to the object is dropped with it. */
void vc_object_drop(struct vc_object *object);

/* The device whose memory it is. */
CUdevice vc_object_device(const struct vc_object *object);

/* A handle that stands for no memory of this process came into being. Without host memory it is not recorded. */
void vc_object_add_foreign(CUmemGenericAllocationHandle handle);

#endif
