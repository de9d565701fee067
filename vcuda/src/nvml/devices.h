/* NVML's devices and the share's cards. */
#ifndef VC_DEVICES_H
#define VC_DEVICES_H

#include "nvml/hooks.h"

/* Card of the process that this handle is (a GPU or a MIG instance), or -1. */
int vc_card_of_handle(nvmlDevice_t device);

#endif
