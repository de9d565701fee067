/* Sharing of memory between processes: physical memory by descriptor, parts of the arena by a file in the machine's folder. */
#include "cu_sharing.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define SHARE_MAGIC 0x6572616853764d53ull
#define OF_ARENA (1ull << 63) /* in names: a file of our own, not a memory file's inode */

uint64_t cu_file_id(int fd)
{
    struct stat status;
    return fstat(fd, &status) ? 0 : (uint64_t)status.st_ino & ~OF_ARENA;
}

int cu_ordinal_of(int card)
{
    for (int i = 0; i < cu_process.device_count; i++)
        if (cu_process.devices[i].card == card)
            return i;
    return -1;
}

static uint64_t known_on(int card, uint64_t shared)
{
    sim_card_lock(cu_process.state, card);
    const uint64_t bytes = sim_object_known(sim_card_at(cu_process.state, card), shared);
    sim_card_unlock(cu_process.state, card);
    return bytes;
}

int cu_find_shared(int fd, uint64_t *shared, uint64_t *bytes)
{
    char link[64], name[256];
    *shared = cu_file_id(fd);
    for (int i = 0; *shared && i < cu_process.device_count; i++)
        if ((*bytes = known_on(cu_process.devices[i].card, *shared)))
            return i;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    const ssize_t length = readlink(link, name, sizeof name - 1);
    name[length > 0 ? length : 0] = 0;
    const char *found = strstr(name, CU_PHYSICAL_NAME);
    return found ? cu_ordinal_of(atoi(found + strlen(CU_PHYSICAL_NAME))) : -1;
}

CU_EXPORT CUresult cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle,
                                                CUmemAllocationHandleType type, unsigned long long flags)
{
    uint64_t shared;
    const CUresult bad = cu_initialised();
    if (bad || !shareable || flags || (int)type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    const int fd = cu_physical_export(handle, &shared);
    pthread_mutex_unlock(&cu_lock);
    if (fd < 0)
        return CUDA_ERROR_INVALID_VALUE;
    *(int *)shareable = fd;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable,
                                                  CUmemAllocationHandleType type)
{
    uint64_t shared, bytes;
    CUresult bad = cu_initialised();
    if (bad || !handle || (int)type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int given = (int)(intptr_t)shareable;
    const off_t length = lseek(given, 0, SEEK_END);
    pthread_mutex_lock(&cu_lock);
    const int device = cu_find_shared(given, &shared, &bytes);
    bad = device < 0 || length <= 0 || (uint64_t)length % CU_CHUNK
              ? CUDA_ERROR_INVALID_VALUE
              : cu_physical_import(dup(given), shared, device, (size_t)length, handle);
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

/* ---- parts of the arena ---- */

static void path_of(uint64_t shared, char *path, size_t size)
{
    snprintf(path, size, "%s/ipc-%016llx", cu_process.state->directory, (unsigned long long)shared);
}

void cu_share_unlink(uint64_t shared)
{
    char path[3200];
    path_of(shared, path, sizeof path);
    unlink(path);
}

/* Names begin with the process slot: what a process that had it before left behind when it was killed goes with the first. */
static uint64_t new_name(void)
{
    static uint32_t count;
    const int32_t slot = cu_process.state->slot;
    const uint64_t generation = cu_process.state->shared->processes[slot].generation & 0xffffu;
    if (!count) {
        char prefix[32];
        snprintf(prefix, sizeof prefix, "ipc-80%02x", (unsigned)slot);
        DIR *folder = opendir(cu_process.state->directory);
        for (struct dirent *entry; folder && (entry = readdir(folder));)
            if (!strncmp(entry->d_name, prefix, strlen(prefix)))
                unlinkat(dirfd(folder), entry->d_name, 0);
        if (folder)
            closedir(folder);
    }
    return OF_ARENA | (uint64_t)slot << 48 | generation << 32 | ++count;
}

/* Pages that were never touched stay without backing. */
static int copy_touched(int fd, const unsigned char *start, size_t bytes)
{
    enum { PAGE = 4096 };
    unsigned char *resident = malloc(bytes / PAGE);
    int bad = !resident || mincore((void *)(uintptr_t)start, bytes, resident);
    for (size_t page = 0; !bad && page < bytes / PAGE; page++)
        if (resident[page] & 1)
            bad = pwrite(fd, start + page * PAGE, PAGE, (off_t)(page * PAGE)) != PAGE;
    free(resident);
    return bad;
}

static int make_file(uint64_t shared, unsigned char *start, size_t bytes)
{
    char path[3200];
    path_of(shared, path, sizeof path);
    const int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    int bad = fd < 0 || fchmod(fd, 0666) || ftruncate(fd, (off_t)bytes) || copy_touched(fd, start, bytes);
    if (!bad)
        bad = mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, fd, 0) == MAP_FAILED;
    if (fd >= 0)
        close(fd);
    if (bad)
        unlink(path);
    return bad;
}

int cu_share_block(cu_block *block, uint32_t kind, cu_share *share)
{
    uintptr_t start;
    size_t span;
    uint64_t *name = cu_arena_part(block, &start, &span);
    const int card = cu_process.devices[block->device].card;
    if (!*name) {
        const uint64_t made = new_name();
        if (make_file(made, (unsigned char *)start, span))
            return -1;
        sim_card_lock(cu_process.state, card);
        const int bad = sim_object_share(cu_process.state, sim_card_at(cu_process.state, card), made, span);
        sim_card_unlock(cu_process.state, card);
        cu_arena_shared(block, made);
        if (bad)
            return -1;
    }
    const int32_t slot = cu_process.state->slot;
    *share = (cu_share){.magic = SHARE_MAGIC, .shared = *name, .offset = block->start - start, .bytes = block->bytes,
                        .span = span, .card = card, .slot = slot, .kind = kind,
                        .generation = cu_process.state->shared->processes[slot].generation};
    return 0;
}

CUresult cu_share_open(const cu_share *share, uint32_t kind, CUcontext ctx, cu_block **made)
{
    char path[3200];
    CUmemGenericAllocationHandle handle;
    const int device = share->magic == SHARE_MAGIC && share->kind == kind ? cu_ordinal_of(share->card) : -1;
    if (device < 0)
        return CUDA_ERROR_INVALID_HANDLE;
    if (share->slot == cu_process.state->slot)
        return CUDA_ERROR_INVALID_CONTEXT; /* not in the process that it is of */
    path_of(share->shared, path, sizeof path);
    const int fd = known_on(share->card, share->shared) ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (fd < 0)
        return CUDA_ERROR_INVALID_HANDLE; /* its process is gone, or has freed it */
    CUresult bad = cu_physical_import(fd, share->shared, device, share->span, &handle);
    if (bad)
        return bad;
    bad = cu_physical_map(handle, ctx, 0, share->span, made);
    cu_physical_release(handle); /* the mapping keeps it */
    if (!bad)
        (*made)->flags = kind;
    return bad;
}
