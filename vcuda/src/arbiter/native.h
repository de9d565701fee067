/* What the cffi module offers to Python; contracts are in vcuda/abi/native.abi and vcuda/region.py. */
#ifndef VC_NATIVE_H
#define VC_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#include "region/abi.h"

#include "native.abi"

#endif
