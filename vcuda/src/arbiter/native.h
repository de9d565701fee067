/* What the cffi module offers to Python; contracts are in vcuda/abi/native.abi and vcuda/region.py. */
#ifndef VC_NATIVE_H
#define VC_NATIVE_H

#include "report/report.h"

#endif
