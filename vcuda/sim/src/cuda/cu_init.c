/* cuInit, versions, errors: how a process becomes a client of the machine. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cu_client.h"

cu_client cu_process;
pthread_mutex_t cu_lock = PTHREAD_MUTEX_INITIALIZER;

static pthread_mutex_t init_mutex = PTHREAD_MUTEX_INITIALIZER;

/* A child shares its parent's card no more than with the real driver: every call there says NOT_INITIALIZED. */
static void in_forked_child(void)
{
    if (atomic_load(&cu_process.ready) == 1)
        atomic_store(&cu_process.ready, -1);
}

int cu_initialised(void)
{
    return atomic_load_explicit(&cu_process.ready, memory_order_acquire) == 1 ? CUDA_SUCCESS : CUDA_ERROR_NOT_INITIALIZED;
}

static int card_matches(const sim_card_config *card, const char *wanted)
{
    return strlen(wanted) > 4 && (!strncasecmp(wanted, "GPU-", 4) || !strncasecmp(wanted, "MIG-", 4)) &&
           !strncasecmp(card->uuid, wanted, strlen(wanted));
}

/* The visible cards in the machine's order; a MIG instance counts, the card it is cut from does not. */
static int visible_cards(int *cards)
{
    const sim_config *config = &cu_process.state->config;
    int count = 0;
    for (int i = 0; i < config->card_count; i++)
        if (!config->cards[i].mig && sim_card_visible(cu_process.state, i))
            cards[count++] = i;
    return count;
}

/* CUDA_VISIBLE_DEVICES: the list ends at the first entry that names no card. */
static int chosen_cards(const int *cards, int count, const char *wanted, int *chosen)
{
    char text[1024];
    int used = 0;
    snprintf(text, sizeof text, "%s", wanted);
    char *rest = text;
    for (char *entry; (entry = strsep(&rest, ",")) && used < SIM_MAX_CARDS;) {
        char *end;
        int found = -1;
        while (*entry == ' ')
            entry++;
        const long number = strtol(entry, &end, 10);
        if (end != entry && *end == 0 && number >= 0 && number < count)
            found = cards[number];
        for (int i = 0; end == entry && i < count && found < 0; i++)
            if (card_matches(&cu_process.state->config.cards[cards[i]], entry))
                found = cards[i];
        for (int i = 0; i < used; i++)
            if (chosen[i] == found)
                return 0; /* a card twice: none, as the real driver has it */
        if (found < 0)
            break;
        chosen[used++] = found;
    }
    return used;
}

static void list_devices(void)
{
    int cards[SIM_MAX_CARDS], chosen[SIM_MAX_CARDS];
    int count = visible_cards(cards);
    const char *wanted = getenv("CUDA_VISIBLE_DEVICES");
    if (wanted)
        count = chosen_cards(cards, count, wanted, chosen);
    else
        memcpy(chosen, cards, sizeof chosen);
    /* A process gets one MIG instance, and then nothing else (MIG user guide, device enumeration). */
    if (count > 1 && cu_process.state->config.cards[chosen[0]].parent >= 0)
        count = 1;
    for (int i = 0; i < count; i++)
        cu_process.devices[i].card = chosen[i];
    cu_process.device_count = count;
}

static CUresult join(void)
{
    char why[4096] = "";
    if (!cu_process.state)
        cu_process.state = sim_attach(NULL, why, sizeof why);
    if (!cu_process.state) {
        fprintf(stderr, "simulated CUDA driver: %s\n", why);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    if (!sim_node_usable(cu_process.state, "nvidiactl"))
        return CUDA_ERROR_NO_DEVICE;
    list_devices();
    if (cu_process.device_count == 0)
        return CUDA_ERROR_NO_DEVICE;
    if (!sim_node_usable(cu_process.state, "nvidia-uvm"))
        return CUDA_ERROR_UNKNOWN;
    if (sim_process_join(cu_process.state)) {
        fprintf(stderr, "simulated CUDA driver: all %d process slots of %s are taken\n", SIM_MAX_PROCESSES,
                cu_process.state->root);
        return CUDA_ERROR_SYSTEM_NOT_READY;
    }
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuInit(unsigned int flags)
{
    static int atfork;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (atomic_load(&cu_process.ready) == -1)
        return CUDA_ERROR_NOT_INITIALIZED;
    pthread_mutex_lock(&init_mutex);
    CUresult result = CUDA_SUCCESS;
    if (!atomic_load(&cu_process.ready)) {
        if (!atfork)
            atfork = !pthread_atfork(NULL, NULL, in_forked_child);
        result = join();
        if (result == CUDA_SUCCESS)
            atomic_store_explicit(&cu_process.ready, 1, memory_order_release);
    }
    pthread_mutex_unlock(&init_mutex);
    return result;
}

CU_EXPORT CUresult cuDriverGetVersion(int *version)
{
    char why[4096];
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&init_mutex);
    if (!cu_process.state && atomic_load(&cu_process.ready) == 0)
        cu_process.state = sim_attach(NULL, why, sizeof why); /* works before cuInit, and without a machine */
    *version = cu_process.state ? cu_process.state->config.cuda_version : 12040;
    pthread_mutex_unlock(&init_mutex);
    return CUDA_SUCCESS;
}

static const struct {
    CUresult code;
    const char *name, *text;
} errors[] = {
#define CU_ERROR(name, code, text) {code, "CUDA_" #name, text},
#include "cu_errors.def"
#undef CU_ERROR
};

static CUresult find_error(CUresult error, const char **text, int want_name)
{
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    *text = NULL;
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
        if (errors[i].code == error) {
            *text = want_name ? errors[i].name : errors[i].text;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuGetErrorName(CUresult error, const char **text)
{
    return find_error(error, text, 1);
}

CU_EXPORT CUresult cuGetErrorString(CUresult error, const char **text)
{
    return find_error(error, text, 0);
}

/* Private tables belong to the CUDA runtime's handshake with the genuine driver; we have none. */
CU_EXPORT CUresult cuGetExportTable(const void **table, const CUuuid *id)
{
    if (!table || !id)
        return CUDA_ERROR_INVALID_VALUE;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
