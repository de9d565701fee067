/* Ground truth as JSON, and faults by text: what tests ask of the machine. */
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sim_engine.h"

#define EXPORTED __attribute__((visibility("default")))

typedef struct {
    char *buffer;
    size_t size, used;
} writer;

__attribute__((format(printf, 2, 3))) static void put(writer *out, const char *format, ...)
{
    va_list arguments;
    const size_t room = out->used < out->size ? out->size - out->used : 0;
    va_start(arguments, format);
    const int length = vsnprintf(room ? out->buffer + out->used : NULL, room, format, arguments);
    va_end(arguments);
    out->used += length > 0 ? (size_t)length : 0;
}

static void put_text(writer *out, const char *key, const char *text)
{
    put(out, "\"%s\": \"", key);
    for (; *text; text++) {
        const unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\' || c < 0x20 || c > 0x7e)
            put(out, "\\u%04x", c);
        else
            put(out, "%c", c);
    }
    put(out, "\"");
}

static void put_processes(writer *out, sim_state *state, int index)
{
    sim_process_view *views = calloc(SIM_MAX_PROCESSES, sizeof *views);
    const int count = views ? sim_view_processes(state, index, views, SIM_MAX_PROCESSES) : 0;
    put(out, "\"processes\": [");
    for (int i = 0; i < count; i++) {
        const sim_process_view *view = &views[i];
        put(out, "%s{\"pid\": %d, \"slot\": %d, ", i ? ", " : "", view->pid, view->slot);
        put_text(out, "name", view->name);
        put(out, ", \"contexts\": %d, \"context_bytes\": %llu, \"memory_bytes\": %llu, \"peak_bytes\": %llu, ",
            view->contexts, (unsigned long long)view->context_bytes, (unsigned long long)view->memory_bytes,
            (unsigned long long)view->peak_bytes);
        put(out, "\"busy_ns\": %llu, \"launches\": %llu}", (unsigned long long)view->busy_ns,
            (unsigned long long)view->launches);
    }
    put(out, "]");
    free(views);
}

int sim_report(sim_state *state, char *buffer, size_t size)
{
    writer out = {buffer, size, 0};
    put(&out, "{");
    put_text(&out, "driver_version", state->config.driver_version);
    put(&out, ", \"now_ns\": %llu, \"cards\": [", (unsigned long long)sim_now());
    for (int i = 0; i < state->config.card_count; i++) {
        const sim_card_config *config = &state->config.cards[i];
        sim_card_view view;
        sim_view_card(state, i, &view);
        put(&out, "%s{\"index\": %d, \"minor\": %d, ", i ? ", " : "", i, config->minor);
        put_text(&out, "uuid", config->uuid);
        put(&out, ", \"memory_bytes\": %llu, \"used_bytes\": %llu, \"busy_ns\": %llu, \"switches\": %llu, ",
            (unsigned long long)config->memory_bytes, (unsigned long long)view.used_bytes,
            (unsigned long long)view.busy_ns, (unsigned long long)view.switches);
        put(&out, "\"lost\": %s, \"xids\": %llu, ", view.lost ? "true" : "false", (unsigned long long)view.xid_count);
        put_processes(&out, state, i);
        put(&out, "}");
    }
    put(&out, "]}");
    return (int)out.used;
}

static int inject_card(sim_faults *faults, const char *verb, int count, const long *numbers)
{
    if (!strcmp(verb, "lost") && count == 1) {
        faults->lost = numbers[0] != 0;
    } else if (!strcmp(verb, "xid") && count == 1) {
        const uint64_t number = faults->xid_count;
        faults->xids[number % SIM_XIDS].code = (uint64_t)numbers[0];
        faults->xids[number % SIM_XIDS].time_ns = sim_now();
        faults->xid_count = number + 1;
    } else if (!strcmp(verb, "fail_alloc") && (count == 1 || count == 2)) {
        faults->fail_code = count == 2 ? (int32_t)numbers[1] : 2;
        faults->fail_next = (int32_t)numbers[0];
    } else if (!strcmp(verb, "slow") && count == 1) {
        faults->slow_us = (int32_t)numbers[0];
    } else if (!strcmp(verb, "fault_launch") && count == 0) {
        faults->fault_launch = 1;
    } else if (!strcmp(verb, "clear") && count == 0) {
        faults->lost = faults->fail_next = faults->slow_us = faults->fault_launch = 0;
    } else {
        return -1;
    }
    return 0;
}

int sim_inject(sim_state *state, const char *text, char *why, size_t why_size)
{
    char verb[32];
    int card;
    long numbers[2];
    const int found = sscanf(text, "%31s %d %ld %ld", verb, &card, &numbers[0], &numbers[1]);
    if (found < 2 || card < 0 || card >= state->config.card_count) {
        snprintf(why, why_size, "fault `%s`: expected VERB CARD [NUMBER…] with a card below %d", text,
                 state->config.card_count);
        return -1;
    }
    sim_card_lock(state, card);
    const int result = inject_card(&sim_card_at(state, card)->faults, verb, found - 2, numbers);
    sim_card_unlock(state, card);
    atomic_fetch_add(&state->shared->injections, 1);
    syscall(SYS_futex, &state->shared->injections, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    if (result)
        snprintf(why, why_size, "fault `%s`: unknown verb or wrong number of arguments; see sim_state.h", text);
    return result;
}

EXPORTED int simReport(const char *directory, char *buffer, size_t size)
{
    sim_state *state = sim_attach(directory, buffer, size);
    if (!state)
        return -1;
    const int used = sim_report(state, buffer, size);
    sim_detach(state);
    return used;
}

EXPORTED int simInject(const char *directory, const char *text, char *buffer, size_t size)
{
    sim_state *state = sim_attach(directory, buffer, size);
    if (!state)
        return -1;
    const int result = sim_inject(state, text, buffer, size);
    sim_detach(state);
    return result;
}

EXPORTED int simWatch(const char *directory, uint64_t for_ns, char *buffer, size_t size)
{
    sim_state *state = sim_attach(directory, buffer, size);
    if (!state)
        return -1;
    sim_watch(state, for_ns);
    sim_detach(state);
    return 0;
}
