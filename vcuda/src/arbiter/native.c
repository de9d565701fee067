/* Python's way to the region: thin calls that turn errors into text. */
#include "arbiter/native.h"

#include <stdio.h>

#include "region/file.h"
#include "region/overhead.h"
#include "report/report.h"

static int report_error(const struct vc_error *error, char *text, size_t bytes)
{
    snprintf(text, bytes, "%s", error->text);
    return -1;
}

int vc_native_create(const char *limits_path, const char *usage_path, const struct vc_card_limit *cards,
                     uint32_t count, char *error, size_t error_bytes)
{
    struct vc_error reason;
    return vc_files_create(limits_path, usage_path, cards, count, &reason) == 0 ? 0 : report_error(&reason, error, error_bytes);
}

int vc_native_update(const char *limits_path, const struct vc_card_limit *cards, uint32_t count, char *error,
                     size_t error_bytes)
{
    struct vc_error reason;
    return vc_limits_update(limits_path, cards, count, &reason) == 0 ? 0 : report_error(&reason, error, error_bytes);
}

int vc_native_read_limits(const char *limits_path, struct vc_limits *copy, char *error, size_t error_bytes)
{
    struct vc_error reason;
    return vc_limits_copy(limits_path, copy, &reason) == 0 ? 0 : report_error(&reason, error, error_bytes);
}

int vc_native_write_overhead(const char *limits_path, const uint64_t *bytes, uint32_t count, char *error, size_t error_bytes)
{
    struct vc_error reason;
    return vc_overhead_write(limits_path, bytes, count, &reason) == 0 ? 0 : report_error(&reason, error, error_bytes);
}

int vc_native_refuse(const char *limits_path, int refused, char *error, size_t error_bytes)
{
    struct vc_error reason;
    return vc_limits_refuse(limits_path, refused != 0, &reason) == 0 ? 0 : report_error(&reason, error, error_bytes);
}

int vc_native_read_usage(const char *limits_path, const char *usage_path, struct vc_usage_report *report,
                         char *error, size_t error_bytes)
{
    struct vc_error reason;
    return vc_report_read(limits_path, usage_path, report, &reason) == 0 ? 0 : report_error(&reason, error, error_bytes);
}
