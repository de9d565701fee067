/* Memory that processes share: who holds it, and which of them pays. */
#include <string.h>

#include "sim_engine.h"

static sim_object *find(sim_card *card, uint64_t id)
{
    for (int32_t i = 0; i < card->objects_used; i++)
        if (card->objects[i].id == id)
            return &card->objects[i];
    return NULL;
}

static void hold(sim_object *object, int32_t slot)
{
    object->holders[slot / 64] |= 1ull << slot % 64;
}

int sim_object_share(sim_state *state, sim_card *card, uint64_t id, uint64_t bytes)
{
    sim_object *object = find(card, id);
    sim_memory_take(state, card, 0, 0); /* what is left of the slot's owner before goes first */
    if (!object)
        object = find(card, 0);
    if (!object && card->objects_used < SIM_MAX_OBJECTS)
        object = &card->objects[card->objects_used++];
    if (!object)
        return -1;
    if (object->id != id)
        *object = (sim_object){.id = id, .bytes = bytes, .payer = state->slot};
    hold(object, state->slot);
    return 0;
}

int sim_object_join(sim_state *state, sim_card *card, uint64_t id, uint64_t bytes)
{
    const int paid = !find(card, id);
    if (paid && sim_memory_take(state, card, bytes, 0))
        return -1;
    if (!sim_object_share(state, card, id, bytes))
        return 0;
    if (paid)
        sim_memory_give(state, card, bytes, 0);
    return -1;
}

static int32_t any_holder(const sim_object *object)
{
    for (int32_t slot = 0; slot < SIM_MAX_PROCESSES; slot++)
        if (object->holders[slot / 64] >> slot % 64 & 1)
            return slot;
    return SIM_NONE;
}

static void leave(sim_card *card, sim_object *object, int32_t slot)
{
    object->holders[slot / 64] &= ~(1ull << slot % 64);
    const int32_t next = any_holder(object);
    if (next == SIM_NONE) {
        card->usage[object->payer].memory_bytes -= object->bytes;
        card->used_bytes -= object->bytes;
        object->id = 0;
    } else if (object->payer == slot) {
        sim_usage *usage = &card->usage[next];
        card->usage[slot].memory_bytes -= object->bytes;
        usage->memory_bytes += object->bytes;
        if (usage->context_bytes + usage->memory_bytes > usage->peak_bytes)
            usage->peak_bytes = usage->context_bytes + usage->memory_bytes;
        object->payer = next;
    }
}

void sim_object_leave(sim_state *state, sim_card *card, uint64_t id)
{
    sim_object *object = find(card, id);
    if (object)
        leave(card, object, state->slot);
}

uint64_t sim_object_known(const sim_card *card, uint64_t id)
{
    for (int32_t i = 0; i < card->objects_used; i++)
        if (card->objects[i].id == id)
            return card->objects[i].bytes;
    return 0;
}

void sim_object_forget(sim_card *card, uint64_t id)
{
    sim_object *object = find(card, id);
    if (object)
        object->id = 0;
}

void sim_objects_purge(sim_card *card, int32_t slot)
{
    for (int32_t i = 0; i < card->objects_used; i++)
        if (card->objects[i].id && (card->objects[i].holders[slot / 64] >> slot % 64 & 1))
            leave(card, &card->objects[i], slot);
}
