/* What a descriptor of exported memory says of itself. */
#ifndef VC_EXPORTED_H
#define VC_EXPORTED_H

#include "cuda/memory/object.h"

/* The exporter's extent, and his slot's tag. */
struct vc_signature {
    struct vc_extent extent; /* without cards */
    uint32_t tag;
    bool is_nothing; /* no memory: a multicast object */
};

/* Our object behind a descriptor, held; NULL: another process's. */
struct vc_object *vc_exported_find(int descriptor);

/* Hold what it says, on all cards of whichever of our regions knows the exporter: on which it lies, the caller finds out, and narrows that.
 * False: none does. */
bool vc_signature_hold(const struct vc_signature *signature, struct vc_extent *extent);

/* Where there is room for what is about to be imported, reserved on each of these cards; none: nowhere. */
vc_cards vc_reserve_anywhere(uint64_t bytes);

/* False: nothing says whose it is. */
bool vc_signature_read(int descriptor, struct vc_signature *signature);

#endif
