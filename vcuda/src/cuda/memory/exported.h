/* What a descriptor of exported memory says of itself. */
#ifndef VC_EXPORTED_H
#define VC_EXPORTED_H

#include "region/shared.h"

/* The exporter's extent, and his slot's tag. */
struct vc_signature {
    struct vc_extent extent; /* without cards */
    uint32_t tag;
    bool is_nothing; /* no memory: a multicast object */
};

/* False: nothing says whose it is. */
bool vc_signature_read(int descriptor, struct vc_signature *signature);

#endif
