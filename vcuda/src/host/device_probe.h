/* Asks the kernel, from within a control group, which device nodes it lets a process open. */
#ifndef VC_DEVICE_PROBE_H
#define VC_DEVICE_PROBE_H

#include <stdint.h>

#include "host.abi"

#endif
