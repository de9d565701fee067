/* What observers may ask about a card: memory, processes, utilization; and injected slowness. */
#include <string.h>
#include <time.h>

#include "sim_engine.h"

void sim_view_card(sim_state *state, int index, sim_card_view *view)
{
    const uint64_t now = sim_card_lock(state, index);
    const sim_card *card = sim_card_at(state, index);
    sim_reap(state, index);
    *view = (sim_card_view){
        .used_bytes = card->used_bytes,
        .free_bytes = card->config.memory_bytes - card->used_bytes,
        .busy_ns = card->busy_ns,
        .switches = card->switches,
        .xid_count = card->faults.xid_count,
        .lost = card->faults.lost,
        .now_ns = now,
    };
    for (int i = 0; i < SIM_MAX_PROCESSES; i++)
        view->process_count += card->usage[i].contexts > 0 || card->usage[i].memory_bytes > 0;
    for (int32_t s = card->current == SIM_NONE ? SIM_NONE : card->contexts[card->current].first_stream; s != SIM_NONE;
         s = card->streams[s].next) {
        const sim_stream *stream = &card->streams[s];
        view->running |= stream->started && stream->ring[stream->done % SIM_RING].kind == SIM_OP_WORK;
    }
    sim_card_unlock(state, index);
}

int sim_view_processes(sim_state *state, int index, sim_process_view *views, int capacity)
{
    int count = 0;
    sim_card_lock(state, index);
    sim_reap(state, index);
    const sim_card *card = sim_card_at(state, index);
    for (int32_t i = 0; i < SIM_MAX_PROCESSES; i++) {
        const sim_usage *usage = &card->usage[i];
        int pid;
        if ((usage->contexts == 0 && usage->memory_bytes == 0) || !sim_process_alive(state, i, &pid))
            continue;
        if (count < capacity) {
            const int host_pid = state->shared->processes[i].host_pid;
            views[count] = (sim_process_view){
                .pid = pid,
                .host_pid = host_pid ? host_pid : SIM_UNKNOWN_PID + i,
                .slot = i,
                .generation = usage->generation,
                .contexts = usage->contexts,
                .context_bytes = usage->context_bytes,
                .memory_bytes = usage->memory_bytes,
                .peak_bytes = usage->peak_bytes,
                .busy_ns = usage->busy_ns,
                .launches = usage->launches,
            };
            memcpy(views[count].name, state->shared->processes[i].name, sizeof views[count].name);
            views[count].name[sizeof views[count].name - 1] = 0;
        }
        count++;
    }
    sim_card_unlock(state, index);
    return count;
}

static const sim_sample *samples_of(const sim_card *card, int32_t slot)
{
    return slot < 0 ? card->samples : card->usage[slot].samples;
}

int sim_busy_ppm(sim_state *state, int index, int32_t slot, uint64_t from_ns, uint64_t to_ns)
{
    if (to_ns <= from_ns)
        return 0;
    sim_card_lock(state, index);
    const sim_sample *samples = samples_of(sim_card_at(state, index), slot);
    double busy = 0;
    for (uint64_t bucket = from_ns / SIM_SAMPLE_NS; bucket * SIM_SAMPLE_NS < to_ns; bucket++) {
        const sim_sample *sample = &samples[bucket % SIM_SAMPLES];
        const uint64_t start = bucket * SIM_SAMPLE_NS, end = start + SIM_SAMPLE_NS;
        const uint64_t low = start > from_ns ? start : from_ns, high = end < to_ns ? end : to_ns;
        if (sample->bucket == bucket)
            busy += (double)sample->busy_ns * (double)(high - low) / (double)SIM_SAMPLE_NS;
    }
    sim_card_unlock(state, index);
    const double ppm = busy * 1e6 / (double)(to_ns - from_ns);
    return ppm > 1e6 ? 1000000 : (int)ppm;
}

int sim_busy_samples(sim_state *state, int index, int32_t slot, uint64_t after_ns, uint64_t *end_ns, uint32_t *ppm,
                     int capacity)
{
    int count = 0;
    const uint64_t now = sim_card_lock(state, index);
    const sim_sample *samples = samples_of(sim_card_at(state, index), slot);
    const uint64_t last = now / SIM_SAMPLE_NS; /* the bucket under way is not complete */
    for (uint64_t bucket = last > SIM_SAMPLES - 1 ? last - (SIM_SAMPLES - 1) : 0; bucket < last; bucket++) {
        const sim_sample *sample = &samples[bucket % SIM_SAMPLES];
        if ((bucket + 1) * SIM_SAMPLE_NS <= after_ns || count == capacity)
            continue;
        end_ns[count] = (bucket + 1) * SIM_SAMPLE_NS;
        ppm[count++] = sample->bucket == bucket ? (uint32_t)(sample->busy_ns * 1000000 / SIM_SAMPLE_NS) : 0;
    }
    sim_card_unlock(state, index);
    return count;
}

void sim_slow_call(sim_state *state, int index)
{
    const int32_t slow = atomic_load_explicit(&state->shared->cards[index].faults.slow_us, memory_order_relaxed);
    if (slow > 0) {
        const struct timespec span = {slow / 1000000, (long)(slow % 1000000) * 1000};
        nanosleep(&span, NULL);
    }
}
