/* What a container's processes say they use, for those who only look: Python, and the program inside the container. */
#ifndef VC_REPORT_H
#define VC_REPORT_H

#include <stddef.h>
#include <stdint.h>

#include "region/abi.h"
#include "region/file.h"

#include "native.abi"

/* Read both files of a region, safe against anything that is done to the usage. Returns 0, or -1 with *error. */
int vc_report_read(const char *limits_path, const char *usage_path, struct vc_usage_report *report, struct vc_error *error);

#endif
