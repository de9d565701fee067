/* What the eye and what programs get; the columns, names and units are those of `vcuda top`, `show` and their JSON in Python. */
#include "mine/text.h"

#include <inttypes.h>
#include <stdio.h>
#include <string.h>

enum { VC__BAR = 8 };

static void put_bar(FILE *out, double part, double guarantee, bool blocks)
{
    static const char *const blocks_of[] = {"\u2588", "\u2593", "\u00b7"}, *const ascii_of[] = {"#", "+", "."};
    const char *const *glyphs = blocks ? blocks_of : ascii_of;
    part = part > 1.0 ? 1.0 : part;
    int filled = (int)(part * VC__BAR + 0.5), own = (int)((guarantee > 1.0 ? 1.0 : guarantee) * VC__BAR + 0.5);
    for (int at = 0; at < VC__BAR; at++)
        fputs(part < 0 ? "?" : at >= filled ? glyphs[2] : at >= own ? glyphs[1] : glyphs[0], out);
}

/* At most five characters: 512M, 4.1G. */
static const char *short_bytes(uint64_t bytes, char text[16])
{
    static const char units[] = "BKMGTP";
    double number = (double)bytes;
    size_t unit = 0;
    while (number >= 1024.0 && unit + 2 < sizeof units) {
        number /= 1024.0;
        unit++;
    }
    snprintf(text, 16, number < 1000.0 ? "%.3g%c" : "%.0f%c", number, units[unit]);
    return text;
}

static uint32_t processes_alive(const struct vc_mine *mine)
{
    uint32_t alive = 0;
    for (uint32_t at = 0; at < mine->now.process_count; at++)
        alive += mine->now.processes[at].alive != 0;
    return alive;
}

static uint64_t physical_bytes(const struct vc_card_limit *limit)
{
    return limit->flags & VC_CARD_OVERSELL ? limit->physical_bytes : limit->memory_bytes;
}

static void put_card(FILE *out, const struct vc_mine *mine, uint32_t index, bool blocks)
{
    const struct vc_card_limit *limit = &mine->limits.cards[index];
    const struct vc_card_report *card = &mine->now.cards[index];
    double cores = vc_mine_cores(mine, index), waited = vc_mine_waited(mine, index);
    char used[16], most[16], figures[40], memory[40];
    int length = cores < 0 ? snprintf(figures, sizeof figures, "?/%u", limit->cores) : snprintf(figures, sizeof figures, "%.0f/%u", cores, limit->cores);
    if (limit->core_limit > limit->cores)
        snprintf(figures + length, sizeof figures - (size_t)length, "-%u", limit->core_limit);
    snprintf(memory, sizeof memory, "%s/%s", short_bytes(card->memory_used_bytes, used), short_bytes(limit->memory_bytes, most));
    fprintf(out, "%-8.8s ", limit->uuid);
    put_bar(out, cores < 0 ? -1.0 : cores / (limit->core_limit ? limit->core_limit : 1u), (double)limit->cores / (limit->core_limit ? limit->core_limit : 1u), blocks);
    fprintf(out, " %-10s ", figures);
    double total = limit->memory_bytes ? (double)limit->memory_bytes : 1.0;
    put_bar(out, (double)card->memory_used_bytes / total, (double)physical_bytes(limit) / total, blocks);
    fprintf(out, " %-11s ", memory);
    if (waited < 0)
        fprintf(out, "    ?");
    else
        fprintf(out, "%4.0f%%", waited > 999.0 ? 999.0 : waited);
    fprintf(out, " %4u\n", processes_alive(mine));
}

/* A process's name is the tenant's: nothing that a terminal would obey. */
static void put_plain(FILE *out, const char *text)
{
    for (; *text; text++)
        fputc(*text >= ' ' && *text <= '~' ? *text : '?', out);
}

static void put_table(FILE *out, const struct vc_mine *mine, int count, bool blocks)
{
    fprintf(out, "%-8s %-19s %-20s %5s %4s\n", "CARD", "GPU TIME", "MEMORY", "WAIT", "PIDS");
    for (int at = 0; at < count; at++) {
        if (!mine[at].readable)
            fprintf(out, "%s\n", mine[at].why.text);
        for (uint32_t card = 0; mine[at].readable && card < mine[at].limits.card_count; card++)
            put_card(out, &mine[at], card, blocks);
    }
}

char *vc_text_table(const struct vc_mine *mine, int count, bool blocks)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out)
        return NULL;
    put_table(out, mine, count, blocks);
    fclose(out);
    return text;
}

static void put_details(FILE *out, const struct vc_mine *mine)
{
    char used[16], peak[16];
    for (uint32_t index = 0; index < mine->limits.card_count; index++) {
        const struct vc_card_report *card = &mine->now.cards[index];
        fprintf(out, "\n%.47s\n", mine->limits.cards[index].uuid);
        fprintf(out, "  cores in force %.0f, GPU time %.3f s, waited %.3f s, launches %" PRIu64 "\n", card->granted_ppm / 1e4, (double)card->gpu_ns / 1e9,
                (double)card->waited_ns / 1e9, card->launches);
        fprintf(out, "  peak memory %s, allocations refused %" PRIu64 "\n", short_bytes(card->memory_peak_bytes, peak), card->memory_refusals);
    }
    if (mine->now.refused)
        fprintf(out, "\nall memory is refused to this container; the node's operator knows why\n");
    if (processes_alive(mine))
        fprintf(out, "\n%8s %-15s %s\n", "PROCESS", "PROGRAM", "MEMORY");
    for (uint32_t at = 0; at < mine->now.process_count; at++) {
        const struct vc_process_report *process = &mine->now.processes[at];
        uint64_t bytes = 0;
        for (uint32_t card = 0; card < mine->limits.card_count; card++)
            bytes += process->memory_bytes[card];
        if (!process->alive)
            continue;
        fprintf(out, "%8d ", process->pid);
        put_plain(out, process->comm);
        fprintf(out, "%*s %s\n", (int)(15 - strnlen(process->comm, 15)), "", short_bytes(bytes, used));
    }
}

char *vc_text_details(const struct vc_mine *mine, int count, bool blocks)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out)
        return NULL;
    put_table(out, mine, count, blocks);
    for (int at = 0; at < count; at++) {
        if (mine[at].readable)
            put_details(out, &mine[at]);
    }
    fclose(out);
    return text;
}

static void put_string(FILE *out, const char *text)
{
    fputc('"', out);
    for (; *text; text++) {
        if (*text == '"' || *text == '\\' || *text < ' ' || *text > '~')
            fprintf(out, "\\u%04x", (unsigned char)*text);
        else
            fputc(*text, out);
    }
    fputc('"', out);
}

static void put_known(FILE *out, const char *name, double figure)
{
    if (figure < 0)
        fprintf(out, ", \"%s\": null", name);
    else
        fprintf(out, ", \"%s\": %.3f", name, figure);
}

static void put_json_card(FILE *out, const struct vc_mine *mine, uint32_t index)
{
    const struct vc_card_limit *limit = &mine->limits.cards[index];
    const struct vc_card_report *card = &mine->now.cards[index];
    bool oversold = limit->flags & VC_CARD_OVERSELL;
    fputs("{\"uuid\": ", out);
    put_string(out, limit->uuid);
    fprintf(out, ", \"minor\": %d, \"cores\": %u, \"core_limit\": %u", limit->minor, limit->cores, limit->core_limit);
    fprintf(out, ", \"memory_bytes\": %" PRIu64 ", \"whole\": %s", physical_bytes(limit), limit->flags & VC_CARD_WHOLE ? "true" : "false");
    fprintf(out, ", \"oversell_bytes\": %" PRIu64, oversold ? limit->memory_bytes : 0);
    fprintf(out, ", \"memory_used_bytes\": %" PRIu64 ", \"memory_peak_bytes\": %" PRIu64, card->memory_used_bytes, card->memory_peak_bytes);
    put_known(out, "achieved_cores", vc_mine_cores(mine, index));
    put_known(out, "waited_percent", vc_mine_waited(mine, index));
    put_known(out, "granted_cores", card->granted_ppm / 1e4);
    fprintf(out, ", \"gpu_time_ns\": %" PRIu64 ", \"waited_ns\": %" PRIu64, card->gpu_ns, card->waited_ns);
    fprintf(out, ", \"launches\": %" PRIu64 ", \"refusals\": %" PRIu64 "}", card->launches, card->memory_refusals);
}

static void put_json_process(FILE *out, const struct vc_mine *mine, const struct vc_process_report *process)
{
    fprintf(out, "{\"pid\": %d, \"command\": ", process->pid);
    put_string(out, process->comm);
    fputs(", \"memory_bytes\": {", out);
    for (uint32_t card = 0; card < mine->limits.card_count; card++) {
        fputs(card ? ", " : "", out);
        put_string(out, mine->limits.cards[card].uuid);
        fprintf(out, ": %" PRIu64, process->memory_bytes[card]);
    }
    fputs("}}", out);
}

static void put_json(FILE *out, const struct vc_mine *mine)
{
    fputs("{\"name\": ", out);
    put_string(out, mine->folder);
    fputs(", \"error\": ", out);
    if (mine->readable)
        fputs("null", out);
    else
        put_string(out, mine->why.text);
    fprintf(out, ", \"limits_impossible\": %" PRIu64 ", \"shares\": [", mine->now.limits_impossible);
    for (uint32_t card = 0; mine->readable && card < mine->limits.card_count; card++) {
        fputs(card ? ", " : "", out);
        put_json_card(out, mine, card);
    }
    fputs("], \"processes\": [", out);
    const char *comma = "";
    for (uint32_t at = 0; at < mine->now.process_count; at++) {
        if (!mine->now.processes[at].alive)
            continue;
        fputs(comma, out);
        put_json_process(out, mine, &mine->now.processes[at]);
        comma = ", ";
    }
    fputs("]}", out);
}

char *vc_text_json(const struct vc_mine *mine, int count)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out)
        return NULL;
    fputc('[', out);
    for (int at = 0; at < count; at++) {
        fputs(at ? ", " : "", out);
        put_json(out, &mine[at]);
    }
    fputs("]\n", out);
    fclose(out);
    return text;
}
