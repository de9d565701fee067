/* Arrays, and what copies share with sets and arrays. */
#ifndef CU_ARRAY_H
#define CU_ARRAY_H

#include "cu_client.h"

struct CUarray_st {
    int magic;
    uintptr_t start;
    size_t row, height, depth; /* bytes of a row; rows; planes (layers) */
    CUDA_ARRAY3D_DESCRIPTOR descriptor;
    int level; /* of a mipmapped array, whose memory it shares */
    CUcontext ctx; /* whose end is the array's */
};

/* The context of an array, or of a mipmapped one. */
CUcontext cu_array_context(const void *array, int mipmapped);

/* Do a set's data effect and fill in its operation. */
CUresult cu_set_effect(const CUDA_MEMSET_NODE_PARAMS *set, sim_op *op);

#endif
