/* What keeps memory on the card beside handles and mappings: multicast objects and sparse arrays, by the places that memory
 * is bound to. */
#ifndef VC_HOLDER_H
#define VC_HOLDER_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vc_cuda.h"

struct vc_object;

/* A place in a holder: bytes of a multicast object (by device) or of a mip tail, else a box of a level and layer. */
struct vc_place {
    uint32_t kind, level, layer;
    uint64_t from[3], to[3];
};
enum { VC_PLACE_MULTICAST, VC_PLACE_BOX, VC_PLACE_TAIL };

/* `holder` (a multicast object, an array) keeps `memory`, whose reference it takes over, at `place`. False: no host memory. */
bool vc_holder_bind(const void *holder, const struct vc_place *place, struct vc_object *memory);

/* It lets go of what it keeps within a place (NULL: anywhere): returns the objects, to be dropped, and their number; free the
 * array. Takes as long as the place is large, measured in the smallest that was bound, however much is bound elsewhere. */
struct vc_object **vc_holder_let_go(const void *holder, const struct vc_place *place, size_t *count);

/* A holder was made in a context, with which it ends; one that is not told of ends with none. */
void vc_holder_made(const void *holder, CUcontext context);

/* The holders that end with a context, and their number; free the array. Without host memory none. */
const void **vc_holders_of(CUcontext context, size_t *count);

#endif
