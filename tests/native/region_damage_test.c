/* Damaged files: whatever stands in them, a process neither crashes nor hangs, closes rather than opens, and says one line. */
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include "check.h"

#define LIMIT 1000u
#define ROUNDS 60 /* of random bytes */

static char *folder;
static char paths[2][300]; /* limits, usage */
static uint8_t whole[2][VC_USAGE_FILE_BYTES];
static const size_t sizes[2] = {VC_LIMITS_FILE_BYTES, VC_USAGE_FILE_BYTES};
enum { LIMITS, USAGE };

static void put(int file, const void *bytes, size_t count, off_t at)
{
    int descriptor = open(paths[file], O_WRONLY | O_CLOEXEC);
    CHECK(descriptor >= 0 && pwrite(descriptor, bytes, count, at) == (ssize_t)count);
    close(descriptor);
}

static void restore(void)
{
    for (int file = LIMITS; file <= USAGE; file++) {
        CHECK(truncate(paths[file], (off_t)sizes[file]) == 0);
        put(file, whole[file], sizes[file], 0);
    }
}

/* Run `body` in a process of its own; returns how many lines it said. */
static int lines_of(void (*body)(void))
{
    int said[2];
    CHECK(pipe(said) == 0);
    pid_t child = fork();
    if (child == 0) {
        dup2(said[1], STDERR_FILENO);
        close(said[0]);
        alarm(60); /* if it hangs */
        body();
        _exit(broken != 0);
    }
    close(said[1]);
    char text[8192];
    size_t length = 0;
    ssize_t got;
    while ((got = read(said[0], text + length, sizeof text - 1 - length)) > 0)
        length += (size_t)got;
    text[length] = '\0';
    close(said[0]);
    int status, lines = 0;
    waitpid(child, &status, 0);
    for (const char *end = text; (end = strchr(end, '\n')); end++)
        lines++;
    bool fine = WIFEXITED(status) && WEXITSTATUS(status) == 0;
    CHECK(fine);
    if (!fine)
        fprintf(stderr, "status %x, said: %s", (unsigned)status, text);
    return lines;
}

static void expect_damaged(void)
{
    struct vc_region *region = region_at(folder);
    CHECK(region->state == VC_REGION_DAMAGED);
    CHECK(region->card_count == 0 && !region->limits && !region->usage && !vc_region_slot(region));
}

static void expect_uncounted(void)
{
    struct vc_region *region = region_at(folder);
    CHECK(region->state == VC_REGION_UNCOUNTED);
    CHECK(!vc_quota_reserve(region, 0, 1));
    CHECK(vc_quota_used(region, 0) == LIMIT);
}

/* Header and limits may be believed here; everything that tenants write may not. */
static void use_it(void)
{
    struct vc_region *region = region_at(folder);
    CHECK(region->state == VC_REGION_ENFORCED);
    uint64_t taken = 0;
    for (int round = 0; round < 20; round++) {
        uint64_t bytes = 1 + (uint64_t)round * 37 % 400;
        if (vc_quota_reserve(region, 0, bytes)) {
            taken += bytes;
            vc_quota_commit(region, 0, bytes, VC_QUOTA_PLAIN);
        }
        CHECK(taken <= LIMIT);
        vc_quota_used(region, 0);
    }
    vc_quota_refused(region, 0);
    vc_slots_reap(region);
    if (taken)
        vc_quota_release(region, 0, taken, VC_QUOTA_PLAIN);
}

static void use_what_it_can(void)
{
    struct vc_region *region = region_at(folder);
    struct vc_card_view view;
    CHECK(region->card_count <= VC_MAX_CARDS);
    for (uint32_t card = 0; card < region->card_count; card++) {
        vc_limits_read(region->limits, card, &view);
        if (vc_quota_reserve(region, card, 100))
            vc_quota_rollback(region, card, 100);
        vc_quota_used(region, card);
    }
}

static const struct field {
    int file;
    size_t offset, bytes;
} fields[] = {
    {LIMITS, offsetof(struct vc_header, magic), 8},        {LIMITS, offsetof(struct vc_header, abi_major), 4},
    {LIMITS, offsetof(struct vc_header, kind), 4},         {LIMITS, offsetof(struct vc_header, header_bytes), 4},
    {LIMITS, offsetof(struct vc_header, file_bytes), 8},   {LIMITS, offsetof(struct vc_limits, card_count), 4},
    {LIMITS, offsetof(struct vc_limits, cards), VC_UUID_BYTES},
    {USAGE, offsetof(struct vc_header, magic), 8},         {USAGE, offsetof(struct vc_header, abi_major), 4},
    {USAGE, offsetof(struct vc_header, kind), 4},          {USAGE, offsetof(struct vc_header, header_bytes), 4},
    {USAGE, offsetof(struct vc_header, file_bytes), 8},    {USAGE, offsetof(struct vc_header, instance), 8},
};

static void every_field_of_the_headers(void)
{
    for (const struct field *field = fields; field < fields + sizeof fields / sizeof *fields; field++) {
        for (int pattern = 0; pattern < 3 && !broken; pattern++) {
            uint8_t bytes[VC_UUID_BYTES];
            for (size_t byte = 0; byte < field->bytes; byte++)
                bytes[byte] = pattern == 0 ? 0 : pattern == 1 ? 0xff : (uint8_t)(whole[field->file][field->offset + byte] ^ 0x80);
            if (field->bytes == VC_UUID_BYTES && pattern == 2)
                continue; /* another name is a name */
            put(field->file, bytes, field->bytes, (off_t)field->offset);
            CHECK(lines_of(field->file == LIMITS ? expect_damaged : expect_uncounted) == 1);
            if (broken)
                fprintf(stderr, "with file %d, offset %zu, pattern %d\n", field->file, field->offset, pattern);
            restore();
        }
    }
}

static void every_shorter_length(void)
{
    for (int file = LIMITS; file <= USAGE; file++) {
        for (size_t length = sizes[file] - 1; !broken; length /= 3) {
            CHECK(truncate(paths[file], (off_t)length) == 0);
            CHECK(lines_of(file == LIMITS ? expect_damaged : expect_uncounted) == 1);
            restore();
            if (length == 0)
                break;
        }
    }
}

/* What tenants write: of one card and of the first slots every word, all ones and one. */
static void every_word_of_the_usage(void)
{
    static const struct {
        size_t from, bytes;
    } parts[] = {
        {sizeof(struct vc_header), offsetof(struct vc_usage, cards) - sizeof(struct vc_header)},
        {offsetof(struct vc_usage, cards), sizeof(struct vc_card_usage)},
        {offsetof(struct vc_usage, slots), offsetof(struct vc_slot, cards) + sizeof(struct vc_slot_card)},
        {offsetof(struct vc_usage, slots) + sizeof(struct vc_slot), offsetof(struct vc_slot, cards) + sizeof(struct vc_slot_card)},
    };
    for (size_t part = 0; part < sizeof parts / sizeof *parts; part++) {
        for (size_t at = parts[part].from; at < parts[part].from + parts[part].bytes && !broken; at += 4) {
            for (int pattern = 0; pattern < 2; pattern++) {
                put(USAGE, pattern ? (uint8_t[4]){1} : (uint8_t[4]){255, 255, 255, 255}, 4, (off_t)at);
                CHECK(lines_of(use_it) == 0);
                put(USAGE, whole[USAGE] + at, 4, (off_t)at);
                if (broken)
                    fprintf(stderr, "with word %zu, pattern %d\n", at, pattern);
            }
        }
        restore();
    }
}

static void random_bytes(int file, size_t from, size_t to, void (*body)(void), unsigned seed)
{
    for (int round = 0; round < ROUNDS && !broken; round++) {
        size_t at = from + (size_t)rand_r(&seed) % (to - from), count = 1 + (size_t)rand_r(&seed) % (to - at);
        static uint8_t bytes[VC_USAGE_FILE_BYTES];
        int style = rand_r(&seed) % 4; /* 0xff and 1 make the counters extreme and the states and PIDs plausible */
        for (size_t byte = 0; byte < count; byte++)
            bytes[byte] = style == 0 ? 0xff : style == 1 ? byte % 4 == 0 : (uint8_t)rand_r(&seed);
        put(file, bytes, count, (off_t)at);
        CHECK(lines_of(body) <= 1);
        if (broken)
            fprintf(stderr, "with file %d, %zu bytes at %zu, style %d\n", file, count, at, style);
        restore();
    }
}

int main(void)
{
    folder = make_region(LIMIT);
    for (int file = LIMITS; file <= USAGE; file++) {
        snprintf(paths[file], sizeof paths[file], "%s/%s", folder, file == LIMITS ? "limits" : "usage");
        CHECK(chmod(paths[file], 0600) == 0);
        int descriptor = open(paths[file], O_RDONLY | O_CLOEXEC);
        CHECK(read(descriptor, whole[file], sizes[file]) == (ssize_t)sizes[file]);
        close(descriptor);
    }
    every_field_of_the_headers();
    every_shorter_length();
    every_word_of_the_usage();
    random_bytes(USAGE, sizeof(struct vc_header), sizeof(struct vc_usage), use_it, 1);
    random_bytes(USAGE, offsetof(struct vc_usage, slots), offsetof(struct vc_usage, slots) + 4 * sizeof(struct vc_slot), use_it, 2);
    random_bytes(LIMITS, 0, sizeof(struct vc_limits), use_what_it_can, 3);
    remove_region(folder);
    return broken != 0;
}
