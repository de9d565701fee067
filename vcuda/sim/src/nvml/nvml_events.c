/* Events: sets of cards whose Xids are waited for. */
#include <linux/futex.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "nvml_internal.h"

struct nv_event_set {
    struct {
        unsigned long long types; /* registered for; 0: not in the set */
        uint64_t seen; /* Xids delivered */
    } cards[SIM_MAX_CARDS];
};

NVML_API nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

NVML_API nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set)
{
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    free(set);
    return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    const nvmlReturn_t result = nv_check_card(device, types != NULL);
    if (result == NVML_SUCCESS)
        *types = NVML_EVENT_ALL;
    return result;
}

NVML_API nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    sim_card_view view;
    const nvmlReturn_t result = nv_check_card(device, set != NULL);
    if (result != NVML_SUCCESS)
        return result;
    if (types & ~NVML_EVENT_ALL)
        return NVML_ERROR_NOT_SUPPORTED;
    sim_view_card(nv_state, device->index, &view);
    set->cards[device->index].types |= types;
    set->cards[device->index].seen = view.xid_count; /* only what happens from now on */
    return NVML_SUCCESS;
}

/* Deliver the oldest Xid that the set has not had. */
static int take_event(nvmlEventSet_t set, nvmlEventData_t *data)
{
    for (int i = 0; i < nv_card_count; i++) {
        if (!(set->cards[i].types & NVML_EVENT_XID))
            continue;
        sim_card_lock(nv_state, i);
        const sim_faults *faults = &sim_card_at(nv_state, i)->faults;
        const uint64_t count = faults->xid_count;
        uint64_t next = set->cards[i].seen;
        if (next + SIM_XIDS < count) /* the card remembers only the last ones */
            next = count - SIM_XIDS;
        const uint64_t code = faults->xids[next % SIM_XIDS].code;
        sim_card_unlock(nv_state, i);
        if (next >= count)
            continue;
        set->cards[i].seen = next + 1;
        *data = (nvmlEventData_t){&nv_cards[i], NVML_EVENT_XID, code, NVML_NO_INSTANCE, NVML_NO_INSTANCE};
        return 1;
    }
    return 0;
}

static int any_lost(const struct nv_event_set *set)
{
    for (int i = 0; i < nv_card_count; i++)
        if (set->cards[i].types && nv_is_lost(i))
            return 1;
    return 0;
}

/* Events that are pending come first; then, as nvml.h documents, a lost card of the set ends the wait at once. */
static nvmlReturn_t wait_event(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    const uint64_t until = sim_now() + (uint64_t)timeout_ms * 1000000;
    if (nv_ready() != NVML_SUCCESS)
        return NVML_ERROR_UNINITIALIZED;
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    _Atomic uint32_t *const injections = &nv_state->shared->injections;
    for (;;) {
        const uint32_t before = atomic_load(injections); /* read first: what is injected from now on ends the sleep */
        if (take_event(set, data))
            return NVML_SUCCESS;
        if (any_lost(set))
            return NVML_ERROR_GPU_IS_LOST;
        const uint64_t now = sim_now();
        if (now >= until)
            return NVML_ERROR_TIMEOUT;
        const struct timespec left = {(time_t)((until - now) / 1000000000), (long)((until - now) % 1000000000)};
        syscall(SYS_futex, injections, FUTEX_WAIT, before, &left, NULL, 0);
    }
}

NVML_API nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms)
{
    return data ? wait_event(set, data, timeout_ms) : NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned timeout_ms)
{
    nvmlEventData_t full;
    if (!data)
        return NVML_ERROR_INVALID_ARGUMENT;
    const nvmlReturn_t result = wait_event(set, &full, timeout_ms);
    if (result == NVML_SUCCESS)
        *data = (nvmlEventData_v1_t){full.device, full.event_type, full.event_data};
    return result;
}
