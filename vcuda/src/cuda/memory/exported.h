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

/* False: nothing says whose it is. */
bool vc_signature_read(int descriptor, struct vc_signature *signature);

#endif
