/* The library's table of cards: read from the machine's description once per initialisation. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml_internal.h"

struct nv_handle nv_cards[SIM_MAX_CARDS];
int nv_card_count;

static int number(int card, const char *key, int otherwise)
{
    char text[32];
    return sim_config_extra(&nv_state->config, card, key, text, sizeof text) ? atoi(text) : otherwise;
}

/* `links=1:NV4,2:PIX`: how the card reaches other cards, in nvidia-smi's words. */
static void read_links(struct nv_handle *card)
{
    static const struct {
        const char *name;
        int level;
    } levels[] = {
        {"PIX", NVML_TOPOLOGY_SINGLE}, {"PXB", NVML_TOPOLOGY_MULTIPLE}, {"PHB", NVML_TOPOLOGY_HOSTBRIDGE},
        {"NODE", NVML_TOPOLOGY_NODE},  {"SYS", NVML_TOPOLOGY_SYSTEM},
    };
    char text[512], kind[8], *rest = NULL;
    int peer;
    if (!sim_config_extra(&nv_state->config, card->index, "links", text, sizeof text))
        return;
    for (char *word = strtok_r(text, ",", &rest); word; word = strtok_r(NULL, ",", &rest)) {
        if (sscanf(word, "%d:%7s", &peer, kind) != 2 || peer < 0 || peer >= SIM_MAX_CARDS)
            continue;
        if (strncmp(kind, "NV", 2) == 0)
            card->peers[peer].links = atoi(kind + 2);
        for (size_t i = 0; i < sizeof levels / sizeof *levels; i++)
            if (strcmp(kind, levels[i].name) == 0)
                card->peers[peer].level = levels[i].level;
    }
}

static void load(struct nv_handle *card, int index)
{
    const sim_card_config *config = &nv_state->config.cards[index];
    *card = (struct nv_handle){
        .index = index,
        .visible = sim_card_visible(nv_state, index),
        .parent = config->parent,
        .nvml_index = -1,
        .sm_clock = number(index, "sm_clock", 1410),
        .memory_clock = number(index, "memory_clock", 1215),
        .bus_width = number(index, "bus_width", 5120),
        .power_limit = number(index, "power_limit", 400),
        .pci_device = number(index, "pci_device", 0x20B0),
        .nvlinks = number(index, "nvlinks", 0),
        .mig_capable = number(index, "mig_capable", config->mig),
        .gpu_instance = number(index, "gi", 0),
        .compute_instance = number(index, "ci", 0),
        .slices = number(index, "slices", 1),
        .memory_slices = number(index, "memory_slices", 1),
        .start = number(index, "start", 0),
    };
    if (sscanf(config->pci, "%x:%x:%x", &card->domain, &card->bus, &card->device) != 3)
        card->bus = (unsigned)index + 1;
    for (int peer = 0; peer < SIM_MAX_CARDS; peer++)
        card->peers[peer].level = -1;
    read_links(card);
}

void nv_cards_load(void)
{
    nv_card_count = nv_state->config.card_count;
    for (int i = 0; i < nv_card_count; i++)
        load(&nv_cards[i], i);
    for (int parent = -1; parent < nv_card_count; parent++) {
        int next = 0;
        for (int i = 0; i < nv_card_count; i++)
            if (nv_cards[i].parent == parent && nv_cards[i].visible)
                nv_cards[i].nvml_index = next++;
    }
}

const sim_card_config *nv_config(nvmlDevice_t device)
{
    return &nv_state->config.cards[device->index];
}

nvmlDevice_t nv_card_of(nvmlDevice_t device)
{
    return device->parent < 0 ? device : &nv_cards[device->parent];
}

int nv_is_lost(int index)
{
    return atomic_load_explicit(&sim_card_at(nv_state, index)->faults.lost, memory_order_relaxed);
}

nvmlDevice_t nv_visible(int parent, int which)
{
    for (int i = 0; i < nv_card_count; i++)
        if (nv_cards[i].parent == parent && nv_cards[i].visible && nv_cards[i].nvml_index == which)
            return &nv_cards[i];
    return NULL;
}

int nv_links_used(nvmlDevice_t device)
{
    int used = 0;
    for (int peer = 0; peer < nv_card_count; peer++)
        used += device->peers[peer].links;
    return used;
}

nvmlDevice_t nv_link_peer(nvmlDevice_t device, unsigned link)
{
    unsigned first = 0;
    for (int peer = 0; peer < nv_card_count; peer++) {
        if (link < first + (unsigned)device->peers[peer].links)
            return &nv_cards[peer];
        first += (unsigned)device->peers[peer].links;
    }
    return NULL;
}
