/* Making, changing and checking the two files of a region. */
#include "region/file.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/atomic.h"
#include "base/clock.h"

#define VC__WRITER_NS 50000000u

int vc_fail(struct vc_error *error, const char *format, ...)
{
    if (error) {
        va_list arguments;
        va_start(arguments, format);
        vsnprintf(error->text, sizeof error->text, format, arguments);
        va_end(arguments);
    }
    return -1;
}

static uint64_t file_bytes_of(uint32_t kind)
{
    return kind == VC_KIND_LIMITS ? VC_LIMITS_FILE_BYTES : VC_USAGE_FILE_BYTES;
}

static struct vc_header make_header(uint32_t kind, uint64_t instance)
{
    struct vc_header header = {
        .abi_major = VC_ABI_MAJOR,
        .abi_minor = VC_ABI_MINOR,
        .kind = kind,
        .header_bytes = sizeof(struct vc_header),
        .file_bytes = file_bytes_of(kind),
        .instance = instance,
        .created_ns = vc_now_ns(),
    };
    memcpy(header.magic, VC_MAGIC, sizeof header.magic);
    return header;
}

static int write_all(int descriptor, const void *data, size_t bytes)
{
    const char *position = data;
    size_t offset = 0;
    while (offset < bytes) {
        ssize_t written = pwrite(descriptor, position + offset, bytes - offset, (off_t)offset);
        if (written < 0 && errno != EINTR)
            return -1;
        if (written > 0)
            offset += (size_t)written;
    }
    return 0;
}

static int read_all(int descriptor, void *data, size_t bytes)
{
    char *position = data;
    size_t offset = 0;
    while (offset < bytes) {
        ssize_t got = pread(descriptor, position + offset, bytes - offset, (off_t)offset);
        if (got == 0)
            errno = EILSEQ; /* shorter than it was a moment ago */
        if (got == 0 || (got < 0 && errno != EINTR))
            return -1;
        if (got > 0)
            offset += (size_t)got;
    }
    return 0;
}

/* Write one complete file beside its final name; the caller renames it. */
static int write_new(const char *temporary, const void *data, size_t bytes, uint64_t file_bytes, mode_t mode)
{
    int descriptor = open(temporary, O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC | O_NOFOLLOW, 0600);
    if (descriptor < 0)
        return -1;
    /* All blocks now: a full disk must be our error here, not the tenant's SIGBUS later. */
    int reason = posix_fallocate(descriptor, 0, (off_t)file_bytes);
    if (reason == 0 && (write_all(descriptor, data, bytes) != 0 || fchmod(descriptor, mode) != 0))
        reason = errno;
    close(descriptor);
    if (reason == 0)
        return 0;
    unlink(temporary);
    errno = reason;
    return -1;
}

static bool cores_valid(const struct vc_card_limit *cards, uint32_t count, struct vc_error *error)
{
    for (const struct vc_card_limit *card = cards; card < cards + count; card++) {
        if (card->cores < 1 || card->cores > 100 || card->core_limit < card->cores || card->core_limit > 100) {
            vc_fail(error, "card %.47s of a region has cores %u and core limit %u; needed: 1 <= cores <= core limit <= 100",
                    card->uuid, card->cores, card->core_limit);
            return false;
        }
    }
    return true;
}

int vc_files_create(const char *limits_path, const char *usage_path, const struct vc_card_limit *cards, uint32_t count,
                    struct vc_error *error)
{
    uint64_t instance = 0;
    if (getrandom(&instance, sizeof instance, 0) != (ssize_t)sizeof instance)
        return vc_fail(error, "cannot get random bytes for a region: %s", strerror(errno));
    struct vc_limits limits = {.header = make_header(VC_KIND_LIMITS, instance), .card_count = count};
    if (count <= VC_MAX_CARDS)
        memcpy(limits.cards, cards, count * sizeof *cards);
    if (!vc_limits_valid(&limits, error) || !cores_valid(cards, count, error))
        return -1;
    struct vc_header usage = make_header(VC_KIND_USAGE, instance);

    char new_limits[4096], new_usage[4096];
    if (snprintf(new_limits, sizeof new_limits, "%s.new", limits_path) >= (int)sizeof new_limits ||
        snprintf(new_usage, sizeof new_usage, "%s.new", usage_path) >= (int)sizeof new_usage)
        return vc_fail(error, "cannot create %s: the path is too long", limits_path);
    if (access(limits_path, F_OK) == 0)
        return vc_fail(error, "cannot create %s: a region exists there already; update it or remove it first", limits_path);
    unlink(new_limits); /* left over from a creation that was killed, as a usage without limits is */
    unlink(new_usage);

    if (write_new(new_usage, &usage, sizeof usage, VC_USAGE_FILE_BYTES, 0666) != 0)
        return vc_fail(error, "cannot create %s: %s", usage_path, strerror(errno));
    /* Who opens the usage file sees whether it is this one, and not a copy that was put in its place. */
    struct stat made;
    limits.usage_inode = stat(new_usage, &made) == 0 ? made.st_ino : 0;
    if (write_new(new_limits, &limits, sizeof limits, VC_LIMITS_FILE_BYTES, 0444) != 0) {
        int reason = errno;
        unlink(new_usage);
        return vc_fail(error, "cannot create %s: %s", limits_path, strerror(reason));
    }
    /* limits last: a region without limits does not exist. */
    if (rename(new_usage, usage_path) != 0 || rename(new_limits, limits_path) != 0) {
        int reason = errno;
        unlink(new_usage);
        unlink(new_limits);
        unlink(usage_path);
        return vc_fail(error, "cannot create %s: %s", limits_path, strerror(reason));
    }
    return 0;
}

int vc_file_open(const char *path, uint32_t kind, int flags, struct vc_header *header, struct vc_error *error)
{
    /* O_NONBLOCK: a FIFO in the file's place must not hang us; it is refused below. */
    int descriptor = open(path, flags | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor < 0)
        return vc_fail(error, "cannot open %s: %s", path,
                       errno == ELOOP && flags & O_NOFOLLOW ? "it is a link" : strerror(errno));
    struct stat status;
    const char *wrong = NULL;
    if (fstat(descriptor, &status) != 0 || !S_ISREG(status.st_mode))
        wrong = "it is not a regular file";
    else if ((uint64_t)status.st_size < file_bytes_of(kind))
        wrong = "it is truncated";
    else if (read_all(descriptor, header, sizeof *header) != 0)
        wrong = "its header can't be read";
    else if (memcmp(header->magic, VC_MAGIC, sizeof header->magic) != 0 || header->kind != kind)
        wrong = "it is not a region file of this kind";
    else if (header->abi_major != VC_ABI_MAJOR)
        wrong = "it was made for another major version of the region";
    else if (header->header_bytes != sizeof *header || header->file_bytes != file_bytes_of(kind))
        wrong = "its header is damaged";
    if (!wrong)
        return descriptor;
    close(descriptor);
    vc_fail(error, "cannot use %s: %s; the container must be started again to get a new one", path, wrong);
    errno = EILSEQ;
    return -1;
}

bool vc_limits_valid(const struct vc_limits *limits, struct vc_error *error)
{
    if (limits->card_count == 0 || limits->card_count > VC_MAX_CARDS) {
        vc_fail(error, "a region has %u cards; it must have 1 to %d", limits->card_count, VC_MAX_CARDS);
        return false;
    }
    for (uint32_t card = 0; card < limits->card_count; card++) {
        const struct vc_card_limit *limit = &limits->cards[card];
        size_t length = strnlen(limit->uuid, sizeof limit->uuid);
        if (length == 0 || length == sizeof limit->uuid) {
            vc_fail(error, "card %u of a region has no valid UUID", card);
            return false;
        }
        for (uint32_t other = 0; other < card; other++) {
            if (strncmp(limit->uuid, limits->cards[other].uuid, sizeof limit->uuid) == 0) {
                vc_fail(error, "card %s appears twice in a region", limit->uuid);
                return false;
            }
        }
    }
    return true;
}

int vc_limits_copy(const char *limits_path, struct vc_limits *copy, struct vc_error *error)
{
    struct vc_header header;
    int descriptor = vc_file_open(limits_path, VC_KIND_LIMITS, O_RDONLY, &header, error);
    if (descriptor < 0)
        return -1;
    int result = 0;
    for (int attempt = 0;; attempt++) {
        if (read_all(descriptor, copy, sizeof *copy) != 0) {
            result = vc_fail(error, "cannot read %s: %s", limits_path, strerror(errno));
            break;
        }
        uint64_t sequence = copy->sequence, after = 0;
        if (pread(descriptor, &after, sizeof after, offsetof(struct vc_limits, sequence)) == (ssize_t)sizeof after &&
            after == sequence && sequence % 2 == 0)
            break;
        if (attempt == 100)
            break; /* its writer died half-way: every field is an old or a new value */
        vc_sleep_ns(10000);
    }
    close(descriptor);
    if (result == 0 && !vc_limits_valid(copy, error))
        return -1;
    return result;
}

/* 0444 also keeps a non-root owner (`vcuda run`) from opening its own file for writing; the mode is restored at once. */
static int open_writable(const char *path, struct vc_header *header, struct vc_error *error)
{
    int descriptor = vc_file_open(path, VC_KIND_LIMITS, O_RDWR, header, error);
    if (descriptor >= 0 || errno != EACCES)
        return descriptor;
    if (chmod(path, 0644) != 0)
        return vc_fail(error, "cannot change %s: %s; only its owner and root may", path, strerror(errno));
    descriptor = vc_file_open(path, VC_KIND_LIMITS, O_RDWR, header, error);
    chmod(path, 0444);
    return descriptor;
}

struct vc_limits *vc_limits_map_writable(const char *limits_path, struct vc_error *error)
{
    struct vc_header header;
    int descriptor = open_writable(limits_path, &header, error);
    if (descriptor < 0)
        return NULL;
    void *mapping = mmap(NULL, VC_LIMITS_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    int reason = errno;
    close(descriptor);
    if (mapping == MAP_FAILED) {
        vc_fail(error, "cannot map %s: %s", limits_path, strerror(reason));
        return NULL;
    }
    return mapping;
}

static pthread_mutex_t own_writers = PTHREAD_MUTEX_INITIALIZER; /* of this process, whatever a tenant locks */

/* Keep other writers out. A tenant may hold a lock on this file for ever, because it may read it: whoever has it for so long is
 * no writer, and we go ahead. */
void vc_limits_lock(int descriptor)
{
    pthread_mutex_lock(&own_writers);
    uint64_t deadline = vc_now_ns() + VC__WRITER_NS;
    while (flock(descriptor, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK && vc_now_ns() < deadline)
        vc_sleep_ns(500000);
}

void vc_limits_unlock(void)
{
    pthread_mutex_unlock(&own_writers);
}

int vc_limits_update(const char *limits_path, const struct vc_card_limit *cards, uint32_t count, struct vc_error *error)
{
    struct vc_limits wanted = {.card_count = count};
    if (count <= VC_MAX_CARDS)
        memcpy(wanted.cards, cards, count * sizeof *cards);
    if (!vc_limits_valid(&wanted, error) || !cores_valid(cards, count, error))
        return -1;
    struct vc_header header;
    int descriptor = open_writable(limits_path, &header, error);
    if (descriptor < 0)
        return -1;
    struct vc_limits *limits = mmap(NULL, VC_LIMITS_FILE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
    if (limits == MAP_FAILED) {
        vc_fail(error, "cannot map %s: %s", limits_path, strerror(errno));
        close(descriptor);
        return -1;
    }
    vc_limits_lock(descriptor);
    int result = 0;
    if (limits->card_count != count)
        result = vc_fail(error, "cannot update %s: it has %u cards, not %u; a running share keeps its cards", limits_path,
                         limits->card_count, count);
    for (uint32_t card = 0; result == 0 && card < count; card++) {
        if (strncmp(limits->cards[card].uuid, cards[card].uuid, VC_UUID_BYTES) != 0)
            result = vc_fail(error, "cannot update %s: card %u is %.47s, not %.47s; a running share keeps its cards",
                             limits_path, card, limits->cards[card].uuid, cards[card].uuid);
    }
    if (result == 0) {
        /* An odd sequence here was left by a writer that died; this update completes it. */
        uint64_t odd = vc_load(&limits->sequence) | 1;
        vc_store(&limits->sequence, odd);
        for (uint32_t card = 0; card < count; card++) {
            struct vc_card_limit *limit = &limits->cards[card];
            vc_store(&limit->memory_bytes, cards[card].memory_bytes);
            vc_store(&limit->context_bytes, cards[card].context_bytes);
            vc_store(&limit->physical_bytes, cards[card].physical_bytes);
            vc_store(&limit->cores, cards[card].cores);
            vc_store(&limit->core_limit, cards[card].core_limit);
            vc_store(&limit->flags, cards[card].flags);
            vc_store(&limit->priority, cards[card].priority);
            vc_store(&limit->minor, cards[card].minor);
        }
        vc_store(&limits->sequence, odd + 1);
    }
    vc_limits_unlock();
    munmap(limits, VC_LIMITS_FILE_BYTES);
    close(descriptor);
    return result;
}

int vc_limits_refuse(const char *limits_path, bool refused, struct vc_error *error)
{
    struct vc_limits *limits = vc_limits_map_writable(limits_path, error);
    if (!limits)
        return -1;
    vc_store(&limits->flags, refused ? VC_LIMITS_REFUSED : 0);
    munmap(limits, VC_LIMITS_FILE_BYTES);
    return 0;
}
