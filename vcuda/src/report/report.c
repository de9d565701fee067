/* A tenant's account as bounded figures: the tenant may have written anything into it. */
#include "report/report.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "region/extent.h"
#include "region/share.h"
#include "region/slot.h"
#include "region/witness.h"

/* No card has a PiB, no counter needs the sign bit. */
#define VC__MOST_BYTES (1ull << 50)
#define VC__MOST_COUNT ((uint64_t)INT64_MAX)
#define VC__MOST_PID (1 << 22)
#define VC__QUESTIONS_NS 20000000u

static uint64_t processor_time_ns(void)
{
    struct timespec used = {0};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &used);
    return (uint64_t)used.tv_sec * 1000000000u + (uint64_t)used.tv_nsec;
}

static uint64_t bounded(uint64_t value, uint64_t most)
{
    return value <= most ? value : most;
}

static void report_card(const struct vc_card_usage *card, struct vc_card_report *report)
{
    report->memory_peak_bytes = bounded(card->memory_peak_bytes, VC__MOST_BYTES);
    report->memory_refusals = bounded(card->memory_refusals, VC__MOST_COUNT);
    report->gpu_ns = bounded(card->gpu_ns, VC__MOST_COUNT);
    report->waited_ns = bounded(card->waited_ns, VC__MOST_COUNT);
    report->launches = bounded(card->launches, VC__MOST_COUNT);
    report->unknown_symbols = bounded(card->unknown_symbols, VC__MOST_COUNT);
    report->oversold_allocations = bounded(card->oversold_allocations, VC__MOST_COUNT);
}

static void add_bounded(uint64_t *sum, uint64_t bytes)
{
    *sum = bounded(*sum + bounded(bytes, VC__MOST_BYTES), VC__MOST_BYTES);
}

/* A live slot's part of a card's figures. */
static void report_ledger(const struct vc_slot *slot, uint32_t index, uint32_t card, struct vc_card_report *report)
{
    const struct vc_slot_card *mine = &slot->cards[card];
    add_bounded(&report->memory_used_bytes, mine->committed_bytes);
    add_bounded(&report->ledger_bytes, mine->committed_bytes);
    add_bounded(&report->reserved_bytes, mine->reserved_bytes);
    add_bounded(&report->managed_bytes, mine->managed_bytes);
    add_bounded(&report->oversold_bytes, mine->oversold_bytes);
    report->unsettled |= mine->reserved_bytes != mine->committed_bytes;
    const uint64_t words[] = {index, slot->claimed_ns, mine->generation, mine->committed_bytes};
    for (size_t word = 0; word < sizeof words / sizeof *words; word++)
        report->ledger_mark = (report->ledger_mark ^ words[word]) * 0x100000001b3u;
}

static void report_slot(const struct vc_slot *slot, uint32_t index, bool alive, struct vc_usage_report *report)
{
    struct vc_process_report *process = &report->processes[report->process_count++];
    process->slot = index;
    process->pid = slot->pid > 0 && slot->pid <= VC__MOST_PID ? slot->pid : -1;
    process->pid_namespace = slot->pid_namespace;
    process->alive = alive;
    snprintf(process->comm, sizeof process->comm, "%.*s", (int)sizeof slot->comm - 1, slot->comm);
    for (uint32_t card = 0; card < report->card_count; card++) {
        uint64_t bytes = bounded(slot->cards[card].committed_bytes, VC__MOST_BYTES);
        process->memory_bytes[card] = bytes;
        if (alive)
            report_ledger(slot, index, card, &report->cards[card]);
    }
}

int vc_report_read(const char *limits_path, const char *usage_path, struct vc_usage_report *report, struct vc_error *reason)
{
    struct vc_limits limits;
    struct vc_header header;
    memset(report, 0, sizeof *report);
    if (vc_limits_copy(limits_path, &limits, reason) != 0)
        return -1;
    int descriptor = vc_file_open(usage_path, VC_KIND_USAGE, O_RDONLY | O_NOFOLLOW, &header, reason);
    if (descriptor < 0)
        return -1;
    /* Never through a mapping: a tenant that truncates its file would kill the reader with SIGBUS. */
    struct vc_usage *usage = calloc(1, sizeof *usage);
    ssize_t got = usage ? pread(descriptor, usage, sizeof *usage, 0) : -1;
    if (got != (ssize_t)sizeof *usage || header.instance != limits.header.instance) {
        const char *why = !usage || got < 0 ? strerror(errno) : got != (ssize_t)sizeof *usage ? "it is truncated"
                                                              : "it belongs to other limits";
        vc_fail(reason, "cannot read %s: %s; the container has damaged it and must be started again", usage_path, why);
        close(descriptor);
        free(usage);
        return -1;
    }
    report->card_count = limits.card_count;
    report->refused = (limits.flags & VC_LIMITS_REFUSED) != 0;
    report->limits_unreadable = bounded(usage->limits_unreadable, VC__MOST_COUNT);
    report->slot_shortage = bounded(usage->slot_shortage, VC__MOST_COUNT);
    report->limits_impossible = bounded(usage->limits_impossible, VC__MOST_COUNT);
    report->account_damaged = bounded(usage->account_damaged, VC__MOST_COUNT);
    for (uint32_t card = 0; card < limits.card_count; card++) {
        report_card(&usage->cards[card], &report->cards[card]);
        uint64_t overhead = bounded(limits.cards[card].overhead_bytes, VC__MOST_BYTES);
        report->cards[card].memory_used_bytes = overhead;
        report->cards[card].granted_ppm = vc_share_granted_ppm(&limits, &limits.cards[card], vc_now_ns());
    }
    struct vc_identity self;
    vc_identify_self(&self);
    /* A question about one lock takes longer the more locks a tenant holds on its file: in the end they count as held. */
    uint64_t until = processor_time_ns() + VC__QUESTIONS_NS;
    for (uint32_t index = 0; index < VC_MAX_SLOTS; index++) {
        const struct vc_slot *slot = &usage->slots[index];
        if (slot->state == VC_SLOT_FREE)
            continue;
        bool locked = processor_time_ns() > until || vc_slot_locked(descriptor, index);
        report_slot(slot, index, vc_slot_alive(&self, slot, locked) || vc_extent_any(descriptor, index), report);
        for (uint32_t card = 0; locked && card < limits.card_count && processor_time_ns() <= until; card++) {
            uint64_t said = slot->cards[card].reserved_bytes + VC_WITNESS_SLACK + VC_WITNESS_UNIT;
            uint64_t witnessed = vc_witness_read(descriptor, index, card);
            add_bounded(&report->cards[card].hidden_bytes, witnessed > said ? witnessed - said : 0);
        }
    }
    close(descriptor);
    free(usage);
    return 0;
}
