/* How busy the tenant keeps its share: its own GPU time against what the share may use, 100 = all of it.
 *
 * NVML's own figures are those of the whole card, neighbours included. Ours come from the GPU time that the gate charges,
 * between two readings of the region: the previous question's and this one's, at least NVML's sample period apart. The first
 * question of a process about a card that is in use takes both readings itself, 100 ms apart. A share without a gate has the card
 * for itself: there the driver's figures are the tenant's. */
#include "nvml/utilization.h"

#include <pthread.h>
#include <string.h>

#include "nvml/devices.h"
#include "region/share.h"
#include "base/clock.h"
#include "base/fork.h"

#define VC__PERIOD_NS 166666667u /* NVML's shortest sample period, 1/6 s */
#define VC__FIRST_NS 100000000u
#define VC__FIRST_PID_NAMESPACE 0xEFFFFFFCu /* inode of the host's PID namespace: PROC_PID_INIT_INO of the kernel */

struct reading {
    uint64_t time_ns; /* 0: not taken */
    uint64_t card_ns;
    uint64_t slot_ns[VC_MAX_SLOTS];
    uint64_t slot_since_ns[VC_MAX_SLOTS];
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct history {
    struct reading older, newer;
} histories[VC_MAX_PROCESS_CARDS];

/* In a forked child: another thread of the parent may have held the mutex. */
static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
}
VC_AT_FORK(forget);

static void take(struct reading *reading, const struct vc_card *card)
{
    const struct vc_usage *usage = card->region->usage;
    reading->time_ns = vc_now_ns();
    reading->card_ns = vc_load_relaxed(&card->usage->gpu_ns);
    for (uint32_t slot = 0; slot < VC_MAX_SLOTS; slot++) {
        reading->slot_ns[slot] = vc_load_relaxed(&usage->slots[slot].cards[card->index].gpu_ns);
        reading->slot_since_ns[slot] = vc_load_relaxed(&usage->slots[slot].claimed_ns);
    }
}

/* Refunds make the counters fall; what a process was charged before it was seen running is not of this window. */
static uint64_t grown(uint64_t before, uint64_t after)
{
    return after > before && after - before < UINT64_MAX / 2 ? after - before : 0;
}

static unsigned int percent(uint64_t busy_ns, uint64_t window_ns, uint32_t cores)
{
    double share = window_ns ? 100.0 * (double)busy_ns / (double)window_ns / (cores / 100.0) : 0;
    return share >= 100 ? 100 : (unsigned int)(share + 0.5);
}

void vc_utilization_of(uint32_t number, bool in_use, struct vc_utilization *found)
{
    struct history *history = &histories[number];
    const struct vc_card *card = vc_card(number);

    pthread_mutex_lock(&mutex);
    if (history->newer.time_ns == 0)
        take(&history->newer, card);
    bool first = history->older.time_ns == 0;
    uint64_t until = history->newer.time_ns + VC__FIRST_NS;
    pthread_mutex_unlock(&mutex);
    for (uint64_t now; first && in_use && (now = vc_now_ns()) < until;)
        vc_sleep_ns(until - now);

    pthread_mutex_lock(&mutex);
    if (vc_now_ns() - history->newer.time_ns >= (history->older.time_ns ? VC__PERIOD_NS : VC__FIRST_NS)) {
        history->older = history->newer;
        take(&history->newer, card);
    }
    const struct reading *older = &history->older, *newer = &history->newer;
    uint64_t window = older->time_ns ? newer->time_ns - older->time_ns : 0;
    uint32_t cores = vc_load_relaxed(&card->limit->core_limit);
    cores = cores < 1 || cores > 100 ? 100 : cores;
    uint64_t busy = grown(older->card_ns, newer->card_ns);
    found->gpu = percent(busy, window, cores);
    found->card = percent(busy, window, 100);
    for (uint32_t slot = 0; slot < VC_MAX_SLOTS; slot++) {
        bool same = older->slot_since_ns[slot] == newer->slot_since_ns[slot];
        found->slots[slot] = percent(grown(same ? older->slot_ns[slot] : 0, newer->slot_ns[slot]), window, cores);
    }
    uint64_t age_ns = vc_now_ns() - newer->time_ns;
    pthread_mutex_unlock(&mutex);

    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    found->stamp_us = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u - age_ns / 1000u;
}

/* How to answer for a handle. */
enum source {
    SOURCE_DRIVER,  /* not a card of the share, or one that only this container uses */
    SOURCE_REGION,
    SOURCE_NOBODY,  /* other containers use the card too, and what this one uses is not known */
};

static enum source source_of(int number)
{
    const struct vc_card *card = number >= 0 ? vc_card((uint32_t)number) : NULL;
    if (!card || !vc_gate_needed(card->limit))
        return SOURCE_DRIVER;
    return card->region->state == VC_REGION_ENFORCED ? SOURCE_REGION : SOURCE_NOBODY;
}

/* The share's part of the card's memory traffic is not measured: it is taken to follow the GPU time. */
static unsigned int memory_part(const nvmlUtilization_t *card, const struct vc_utilization *own, unsigned int gpu)
{
    if (card->gpu == 0 || own->card == 0 || own->gpu == 0)
        return 0;
    double traffic = (double)card->memory * (own->card < card->gpu ? (double)own->card / card->gpu : 1.0);
    double of_share = traffic * own->gpu / own->card * gpu / own->gpu;
    return of_share >= 100 ? 100 : (unsigned int)(of_share + 0.5);
}

nvmlReturn_t vc_hook_nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    int card = vc_card_of_handle(device);
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetUtilizationRates(device, utilization);
    if (result != NVML_SUCCESS || source_of(card) == SOURCE_DRIVER)
        return result;
    if (source_of(card) == SOURCE_NOBODY) {
        *utilization = (nvmlUtilization_t){0};
        return NVML_ERROR_NOT_SUPPORTED;
    }
    struct vc_tenant processes[VC_MAX_SLOTS];
    struct vc_utilization own;
    vc_utilization_of((uint32_t)card, vc_tenants(vc_card((uint32_t)card), processes) > 0, &own);
    utilization->memory = memory_part(utilization, &own, own.gpu);
    utilization->gpu = own.gpu;
    return result;
}

nvmlReturn_t vc_hook_nvmlDeviceGetSamples(nvmlDevice_t device, unsigned int type, unsigned long long after_us,
                                          unsigned int *value_type, unsigned int *count, nvmlSample_t *samples)
{
    bool of_share = type == NVML_GPU_UTILIZATION_SAMPLES || type == NVML_MEMORY_UTILIZATION_SAMPLES;
    if (!of_share || !value_type || !count || source_of(vc_card_of_handle(device)) == SOURCE_DRIVER)
        return vc_nvml_real.nvmlDeviceGetSamples(device, type, after_us, value_type, count, samples);
    unsigned int room = *count;
    nvmlReturn_t result = vc_nvml_real.nvmlDeviceGetSamples(device, type, after_us, value_type, count, NULL);
    *count = 0;
    if (result != NVML_SUCCESS)
        return result;
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (!samples) {
        *count = 1;
        return result;
    }
    nvmlUtilization_t utilization;
    struct vc_utilization own;
    if (!vc_nvml_real.nvmlDeviceGetUtilizationRates)
        return NVML_ERROR_NOT_SUPPORTED;
    result = vc_hook_nvmlDeviceGetUtilizationRates(device, &utilization);
    if (result != NVML_SUCCESS)
        return result;
    vc_utilization_of((uint32_t)vc_card_of_handle(device), false, &own); /* the reading just taken */
    if (room == 0 || own.stamp_us <= after_us)
        return room == 0 ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_FOUND;
    samples[0] = (nvmlSample_t){.timeStamp = own.stamp_us};
    samples[0].sampleValue.uiVal = type == NVML_GPU_UTILIZATION_SAMPLES ? utilization.gpu : utilization.memory;
    *count = 1;
    return result;
}

/* What the driver says of a process by this PID: it counts as the host does, so this helps only where we do, too. */
static bool ask_driver(nvmlDevice_t device, unsigned int pid, struct vc_busy_process *busy)
{
    nvmlProcessUtilizationSample_t samples[4 * VC_MAX_SLOTS];
    unsigned int count = 4 * VC_MAX_SLOTS;
    bool found = false;
    if (!vc_nvml_real.nvmlDeviceGetProcessUtilization ||
        vc_nvml_real.nvmlDeviceGetProcessUtilization(device, samples, &count, 0) != NVML_SUCCESS)
        return false;
    for (unsigned int index = 0; index < count; index++) {
        if (samples[index].pid != pid || samples[index].timeStamp < busy->stamp_us)
            continue;
        *busy = (struct vc_busy_process){pid, samples[index].smUtil, samples[index].memUtil, samples[index].timeStamp};
        found = true;
    }
    return found;
}

/* The container's processes that have the card for themselves. */
static unsigned int busy_alone(nvmlDevice_t device, const struct vc_tenant *processes, unsigned int count,
                               struct vc_busy_process *busy)
{
    struct vc_identity self;
    unsigned int known = 0;
    vc_identify_self(&self);
    for (unsigned int index = 0; index < count; index++) {
        nvmlUtilization_t rates;
        busy[known] = (struct vc_busy_process){.pid = processes[index].pid};
        if (self.pid_namespace == VC__FIRST_PID_NAMESPACE) {
            known += ask_driver(device, processes[index].pid, &busy[known]);
        } else if (count == 1 && vc_nvml_real.nvmlDeviceGetUtilizationRates &&
                   vc_nvml_real.nvmlDeviceGetUtilizationRates(device, &rates) == NVML_SUCCESS) {
            struct timespec now;
            clock_gettime(CLOCK_REALTIME, &now);
            uint64_t stamp_us = (uint64_t)now.tv_sec * 1000000u + (uint64_t)now.tv_nsec / 1000u;
            busy[known++] = (struct vc_busy_process){processes[index].pid, rates.gpu, rates.memory, stamp_us};
        } /* of several, the driver's PIDs can't be told apart: they are left out */
    }
    return known;
}

unsigned int vc_busy_processes(nvmlDevice_t device, uint64_t after_us, struct vc_busy_process *busy)
{
    uint32_t card = (uint32_t)vc_card_of_handle(device);
    struct vc_tenant processes[VC_MAX_SLOTS];
    unsigned int count = vc_tenants(vc_card(card), processes), known = 0, newer = 0;
    if (source_of((int)card) == SOURCE_DRIVER) {
        known = busy_alone(device, processes, count, busy);
    } else if (count > 0) {
        nvmlUtilization_t rates = {0};
        struct vc_utilization own;
        vc_utilization_of(card, true, &own);
        if (vc_nvml_real.nvmlDeviceGetUtilizationRates)
            vc_nvml_real.nvmlDeviceGetUtilizationRates(device, &rates);
        for (; known < count; known++) {
            unsigned int gpu = own.slots[processes[known].slot];
            busy[known] = (struct vc_busy_process){processes[known].pid, gpu, memory_part(&rates, &own, gpu), own.stamp_us};
        }
    }
    for (unsigned int index = 0; index < known; index++)
        if (busy[index].stamp_us > after_us)
            busy[newer++] = busy[index];
    return newer;
}
