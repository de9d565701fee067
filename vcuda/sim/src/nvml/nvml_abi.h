/* Our declarations of the NVML binary interface, as far as the simulated library implements it.
 *
 * Facts (numbers, field order, sizes) are those of NVIDIA's public nvml.h of driver 550; sizes are pinned below.
 */
#ifndef NVML_ABI_H
#define NVML_ABI_H

#include <assert.h>
#include <stdint.h>

#define NVML_API __attribute__((visibility("default")))

typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_UNKNOWN = 999
} nvmlReturn_t;

/* Handles point into a table of the library: they stay the same for as long as the process lives. */
typedef const struct nv_handle *nvmlDevice_t;
typedef const struct nv_handle *nvmlGpuInstance_t;
typedef const struct nv_handle *nvmlComputeInstance_t;
typedef struct nv_event_set *nvmlEventSet_t;

enum {
    NVML_INIT_FLAG_NO_GPUS = 1,
    NVML_INIT_FLAG_NO_ATTACH = 2,
    NVML_DEVICE_ARCH_VOLTA = 5,
    NVML_DEVICE_ARCH_TURING = 6,
    NVML_DEVICE_ARCH_AMPERE = 7,
    NVML_DEVICE_ARCH_ADA = 8,
    NVML_DEVICE_ARCH_HOPPER = 9,
    NVML_BRAND_TESLA = 2,
    NVML_BRAND_NVIDIA = 14,
    NVML_BUS_TYPE_PCIE = 2,
    NVML_CLOCK_GRAPHICS = 0,
    NVML_CLOCK_SM = 1,
    NVML_CLOCK_MEM = 2,
    NVML_CLOCK_VIDEO = 3,
    NVML_CLOCK_COUNT = 4,
    NVML_TEMPERATURE_GPU = 0,
    NVML_TEMPERATURE_THRESHOLD_SHUTDOWN = 0,
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = 1,
    NVML_TEMPERATURE_THRESHOLD_MEM_MAX = 2,
    NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3,
    NVML_TOPOLOGY_INTERNAL = 0,
    NVML_TOPOLOGY_SINGLE = 10,
    NVML_TOPOLOGY_MULTIPLE = 20,
    NVML_TOPOLOGY_HOSTBRIDGE = 30,
    NVML_TOPOLOGY_NODE = 40,
    NVML_TOPOLOGY_SYSTEM = 50,
    NVML_P2P_CAPS_INDEX_NVLINK = 2,
    NVML_P2P_CAPS_INDEX_COUNT = 5,
    NVML_P2P_STATUS_OK = 0,
    NVML_P2P_STATUS_NOT_SUPPORTED = 5,
    NVML_NVLINK_MAX_LINKS = 18,
    NVML_TOTAL_POWER_SAMPLES = 0,
    NVML_GPU_UTILIZATION_SAMPLES = 1,
    NVML_MEMORY_UTILIZATION_SAMPLES = 2,
    NVML_PROCESSOR_CLK_SAMPLES = 5,
    NVML_MEMORY_CLK_SAMPLES = 6,
    NVML_VALUE_TYPE_UNSIGNED_INT = 1,
    NVML_VALUE_TYPE_UNSIGNED_LONG_LONG = 3
};

#define NVML_NO_INSTANCE 0xFFFFFFFFu
#define NVML_EVENT_XID 0x8ull
#define NVML_EVENT_ALL 0x1Full /* every event type that 550 supports for compute cards; only Xids ever come */
#define NVML_STRUCT_VERSION(type, number) ((unsigned)(sizeof(type) | ((unsigned)(number) << 24)))

typedef struct {
    char legacy_bus_id[16];
    unsigned domain, bus, device, pci_device_id, pci_subsystem_id;
    char bus_id[32];
} nvmlPciInfo_t;

typedef struct {
    unsigned version, domain, bus, device, pci_device_id, pci_subsystem_id, base_class, sub_class;
    char bus_id[32];
} nvmlPciInfoExt_v1_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlMemory_t;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} nvmlMemory_v2_t;

typedef struct {
    unsigned long long total, free, used;
} nvmlBAR1Memory_t;

typedef struct {
    unsigned gpu, memory;
} nvmlUtilization_t;

typedef struct {
    unsigned pid;
    unsigned long long used_gpu_memory;
} nvmlProcessInfo_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long used_gpu_memory;
    unsigned gpu_instance_id, compute_instance_id;
} nvmlProcessInfo_v2_t;

typedef struct {
    unsigned pid;
    unsigned long long used_gpu_memory;
    unsigned gpu_instance_id, compute_instance_id;
    unsigned long long used_protected_memory;
} nvmlProcessDetail_v1_t;

typedef struct {
    unsigned version, mode, count;
    nvmlProcessDetail_v1_t *entries;
} nvmlProcessDetailList_v1_t;

typedef struct {
    unsigned pid;
    unsigned long long time_stamp;
    unsigned sm_util, mem_util, enc_util, dec_util;
} nvmlProcessUtilizationSample_t;

typedef struct {
    unsigned long long time_stamp;
    unsigned pid, sm_util, mem_util, enc_util, dec_util, jpg_util, ofa_util;
} nvmlProcessUtilizationInfo_v1_t;

typedef struct {
    unsigned version, count;
    unsigned long long last_seen;
    nvmlProcessUtilizationInfo_v1_t *entries;
} nvmlProcessesUtilizationInfo_v1_t;

typedef union {
    double d;
    unsigned ui;
    unsigned long long ull;
} nvmlValue_t;

typedef struct {
    unsigned long long time_stamp;
    nvmlValue_t value;
} nvmlSample_t;

typedef struct {
    unsigned field_id, scope_id;
    long long time_stamp, latency_us;
    unsigned value_type;
    nvmlReturn_t result;
    nvmlValue_t value;
} nvmlFieldValue_t;

typedef struct {
    unsigned long long l1_cache, l2_cache, device_memory, register_file;
} nvmlEccErrorCounts_t;

typedef struct {
    unsigned long long reference_time, violation_time;
} nvmlViolationTime_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long event_type, event_data;
} nvmlEventData_v1_t;

typedef struct {
    nvmlDevice_t device;
    unsigned long long event_type, event_data;
    unsigned gpu_instance_id, compute_instance_id;
} nvmlEventData_t;

typedef struct {
    unsigned gpu_utilization, memory_utilization;
    unsigned long long max_memory_usage, time, start_time;
    unsigned is_running, reserved[5];
} nvmlAccountingStats_t;

typedef struct {
    unsigned multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
    unsigned gpu_instance_slices, compute_instance_slices;
    unsigned long long memory_mb;
} nvmlDeviceAttributes_t;

typedef struct {
    unsigned start, size;
} nvmlPlacement_t;

typedef struct {
    nvmlDevice_t device;
    unsigned id, profile_id;
    nvmlPlacement_t placement;
} nvmlGpuInstanceInfo_t;

typedef struct {
    nvmlDevice_t device;
    nvmlGpuInstance_t gpu_instance;
    unsigned id, profile_id;
    nvmlPlacement_t placement;
} nvmlComputeInstanceInfo_t;

typedef struct {
    unsigned id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mb;
} nvmlGpuInstanceProfileInfo_t;

typedef struct {
    unsigned version, id, p2p, slices, instances, multiprocessors, copy_engines, decoders, encoders, jpeg, ofa;
    unsigned long long memory_mb;
    char name[96];
} nvmlGpuInstanceProfileInfo_v2_t;

typedef struct {
    unsigned max, high, partial, low, none;
} nvmlRowRemapperHistogram_t;

static_assert(sizeof(nvmlPciInfo_t) == 68, "nvml.h: nvmlPciInfo_t");
static_assert(sizeof(nvmlPciInfoExt_v1_t) == 64, "nvml.h: nvmlPciInfoExt_v1_t");
static_assert(sizeof(nvmlMemory_v2_t) == 40, "nvml.h: nvmlMemory_v2_t");
static_assert(sizeof(nvmlProcessInfo_v1_t) == 16, "nvml.h: nvmlProcessInfo_v1_t");
static_assert(sizeof(nvmlProcessInfo_v2_t) == 24, "nvml.h: nvmlProcessInfo_v2_t");
static_assert(sizeof(nvmlProcessDetail_v1_t) == 32, "nvml.h: nvmlProcessDetail_v1_t");
static_assert(sizeof(nvmlProcessUtilizationSample_t) == 32, "nvml.h: nvmlProcessUtilizationSample_t");
static_assert(sizeof(nvmlProcessUtilizationInfo_v1_t) == 40, "nvml.h: nvmlProcessUtilizationInfo_v1_t");
static_assert(sizeof(nvmlFieldValue_t) == 40, "nvml.h: nvmlFieldValue_t");
static_assert(sizeof(nvmlEventData_t) == 32, "nvml.h: nvmlEventData_t");
static_assert(sizeof(nvmlAccountingStats_t) == 56, "nvml.h: nvmlAccountingStats_t");
static_assert(sizeof(nvmlDeviceAttributes_t) == 40, "nvml.h: nvmlDeviceAttributes_t");
static_assert(sizeof(nvmlGpuInstanceInfo_t) == 24, "nvml.h: nvmlGpuInstanceInfo_t");
static_assert(sizeof(nvmlComputeInstanceInfo_t) == 32, "nvml.h: nvmlComputeInstanceInfo_t");

#endif
