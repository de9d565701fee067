/* The face that Python sees; contracts are in vcuda/abi/scheduler.abi. */
#ifndef VC_SCHEDULER_H
#define VC_SCHEDULER_H

#include <stddef.h>
#include <stdint.h>

#include "scheduler.abi"

#endif
