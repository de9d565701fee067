/* Physical memory: an object lives as long as handles, mappings or something that it is bound to keep it. */
#ifndef VC_OBJECT_H
#define VC_OBJECT_H

#include "cuda/memory/account.h"
#include "region/shared.h"

/* What a handle stands for: memory that is charged, to us or to who exported it, or something that takes none. */
struct vc_object;

/* Keep the object behind a handle, or behind a mapped address; NULL: not one of ours, nothing to drop. */
struct vc_object *vc_object_hold(CUmemGenericAllocationHandle handle);
struct vc_object *vc_object_hold_at(CUdeviceptr address);

/* The opposite; the last one returns the memory to the quota, and what is bound to the object is dropped with it. */
void vc_object_drop(struct vc_object *object);

/* Memory of the host that stays there. */
bool vc_is_pinned_on_host(const CUmemAllocationProp *properties);

/* The device whose memory it is. */
CUdevice vc_object_device(const struct vc_object *object);

/* One more reference to what is held already. */
struct vc_object *vc_object_held(struct vc_object *object);

/* Whether it is charged to us. */
bool vc_object_is_ours(const struct vc_object *object);

/* Whether it takes no memory: a multicast object. */
bool vc_object_is_nothing(const struct vc_object *object);

/* A handle stands for the object from now on, whose reference it takes over. Without host memory it stays charged until the process ends. */
void vc_object_add_handle(CUmemGenericAllocationHandle value, struct vc_object *object);

/* A handle came into being of which nothing is charged: of what takes no memory, or where nothing is limited. Without host memory it is
 * not recorded. */
void vc_object_add_uncharged(CUmemGenericAllocationHandle handle, bool is_nothing);

/* What another process has exported, as it was imported. Its exporter pays as long as we hold its extent; or, if he is gone, of another
 * container or not known, who imports. */
struct vc_import {
    vc_cards cards; /* where it lies */
    vc_cards reserved; /* on these its bytes are reserved for it */
    CUdevice device;
    uint64_t bytes;
    struct vc_extent extent;
    bool held;
};

/* Charge it if we pay, and record it under the handle, which is given back if that fails. Takes over hold and
 * reservation. */
CUresult vc_object_add_import(CUmemGenericAllocationHandle handle, const struct vc_import *import);

/* The extent by which others hold it: its owner's, given at the first call if that is us; NULL: it can't have one. */
const struct vc_extent *vc_object_extent(struct vc_object *object);

#endif
