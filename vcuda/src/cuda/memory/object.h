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

/* A place in a holder: bytes of a multicast object (by device) or of a mip tail, else a box of a level and layer. */
struct vc_place {
    uint32_t kind, level, layer;
    uint64_t from[3], to[3];
};
enum { VC_PLACE_MULTICAST, VC_PLACE_BOX, VC_PLACE_TAIL };

/* `holder` (a multicast object, an array) keeps `memory` at `place`, whose reference it takes over. False: no host memory. */
bool vc_holder_bind(const void *holder, const struct vc_place *place, struct vc_object *memory);
/* It lets go of what it keeps within a place (NULL: anywhere): returns the objects, to be dropped, and their number; free the array. */
struct vc_object **vc_holder_let_go(const void *holder, const struct vc_place *place, size_t *count);

/* An array without memory of its own was made in the current context, with which it ends, or was destroyed. */
void vc_sparse_array_made(const void *array);
void vc_sparse_array_ended(const void *array);

#endif
