/* What the card's own books say and what the share's ledger says, read without any call that a shim could change. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "model.h"
#include "region/abi.h"
#include "sim_shared.h"

static const sim_shared *machine;
static const struct vc_usage *usage_file;
static int usage_descriptor = -1;
static uint64_t limit_bytes[DEVICES];

static const void *map(const char *path)
{
    struct stat about;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0 || fstat(file, &about)) {
        perror(path);
        exit(2);
    }
    const void *mapping = mmap(NULL, (size_t)about.st_size, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapping == MAP_FAILED) {
        perror(path);
        exit(2);
    }
    return mapping;
}

void books_open(const char *state, const char *usage, const uint64_t *limits)
{
    machine = map(state);
    usage_file = usage ? map(usage) : NULL;
    usage_descriptor = usage ? open(usage, O_RDWR | O_CLOEXEC) : -1;
    for (int card = 0; card < DEVICES; card++)
        limit_bytes[card] = limits[card];
}

uint64_t books_of(int card)
{
    return __atomic_load_n(&machine->cards[card].used_bytes, __ATOMIC_SEQ_CST);
}

/* Chunks within these places of the usage file that anybody locks: what is held of others' memory (region/shared.h). */
static uint64_t locked(off_t from, off_t to)
{
    struct flock lock = {.l_type = F_WRLCK, .l_start = from, .l_len = to - from};
    if (from >= to || fcntl(usage_descriptor, F_OFD_GETLK, &lock) || lock.l_type == F_UNLCK)
        return 0;
    const off_t start = lock.l_start > from ? lock.l_start : from, end = lock.l_start + lock.l_len < to ? lock.l_start + lock.l_len : to;
    return (uint64_t)(end - start) + locked(from, start) + locked(end, to);
}

static uint64_t held_of(int slot, int card)
{
    const off_t from = ((off_t)1 << 56) + ((off_t)(slot * VC_MAX_CARDS + card) << 40);
    return locked(from, from + ((off_t)1 << 40)) * CHUNK;
}

/* Of the living, and what others hold of the dead: the dead ones' slots are freed by whoever needs one. */
uint64_t ledger_of(int card)
{
    uint64_t sum = 0;
    for (int slot = 0; usage_file && slot < VC_MAX_SLOTS; slot++) {
        const struct vc_slot_card *one = &usage_file->slots[slot].cards[card];
        const int pid = usage_file->slots[slot].pid;
        const uint64_t committed = __atomic_load_n(&one->committed_bytes, __ATOMIC_SEQ_CST);
        const uint64_t exported = __atomic_load_n(&one->exported_bytes, __ATOMIC_SEQ_CST);
        if (pid > 0 && (!kill(pid, 0) || errno != ESRCH))
            sum += committed;
        else if (pid > 0 && exported > 0) {
            const uint64_t held = held_of(slot, card);
            sum += held < committed ? held : committed;
        }
    }
    return sum;
}

int64_t books_room(int card)
{
    return (int64_t)(limit_bytes[card] - ledger_of(card));
}

/* A small allocation needs room for a chunk, even if it would have found room in one (docs/memory.md). */
void books_judge(int result, int card, size_t bytes)
{
    const uint64_t limit = limit_bytes[card], ledger = ledger_of(card);
    if (usage_file && result == CUDA_ERROR_OUT_OF_MEMORY && bytes < limit && ledger + bytes + 2 * CHUNK <= limit)
        say(" !refused-with-room card %d ledger %llu KiB limit %llu KiB wanted %zu KiB", card, (unsigned long long)ledger >> 10,
            (unsigned long long)limit >> 10, bytes >> 10);
}

/* The ledger is read first: between steps both only fall, and the books before the ledger does. */
bool books_check(void)
{
    bool broken = false;
    for (int card = 0; usage_file && card < world.devices; card++) {
        const uint64_t ledger = ledger_of(card), books = books_of(card);
        if (books > ledger)
            say(" !ledger-below-books card %d ledger %lld KiB books %llu KiB", card, (long long)ledger >> 10,
                (unsigned long long)books >> 10);
        if (limit_bytes[card] && books > limit_bytes[card])
            say(" !books-over-limit card %d books %llu KiB limit %llu KiB", card, (unsigned long long)books >> 10,
                (unsigned long long)limit_bytes[card] >> 10);
        broken |= books > ledger || (limit_bytes[card] && books > limit_bytes[card]);
    }
    return broken;
}
