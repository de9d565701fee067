/* Virtual memory management: reserved addresses, physical allocations, mappings of one into the other. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "cu_capture.h"
#include "cu_memory.h"
#include "cu_sharing.h"

/* A physical allocation: a memory file; it is paid for until neither handle nor mapping is left. */
typedef struct physical {
    struct physical *next;
    CUmemGenericAllocationHandle handle;
    CUmemAllocationProp prop;
    size_t bytes;
    int fd, references, mappings;
    int unpaid;      /* on no card: host memory, a multicast object */
    int exported;    /* by descriptors that may still be open somewhere: they keep it, too (as on an H100) */
    int left;        /* only those descriptors keep it */
    uint64_t shared; /* by this name other processes may hold it too; 0: none can */
} physical;

typedef struct reservation {
    struct reservation *next;
    uintptr_t start;
    size_t bytes;
} reservation;

static physical *physicals; /* under cu_lock, as all of this */
static int left_count;
static reservation *reservations;
static CUmemGenericAllocationHandle next_handle = 0x5110000001ull;

static physical *find_physical(CUmemGenericAllocationHandle handle)
{
    physical *one = physicals;
    while (one && one->handle != handle)
        one = one->next;
    return one;
}

static physical *find_shared(uint64_t shared)
{
    physical *one = physicals;
    while (one && one->shared != shared)
        one = one->next;
    return one;
}

/* The card's memory goes with the last handle and mapping of the last process. */
static void let_go(const physical *one)
{
    const int card = cu_process.devices[one->prop.location.id].card;
    if (one->unpaid)
        return;
    if (!one->shared) {
        cu_discharge(one->prop.location.id, one->bytes);
    } else if (!find_shared(one->shared)) {
        sim_card_lock(cu_process.state, card);
        sim_object_leave(cu_process.state, sim_card_at(cu_process.state, card), one->shared);
        sim_card_unlock(cu_process.state, card);
    }
}

/* Exported descriptors hold a lock of their own description of the file, which ends with the last of their copies. */
static int is_open(const physical *one)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_len = 1};
    return !fcntl(one->fd, F_OFD_GETLK, &lock) && lock.l_type != F_UNLCK;
}

static void release_if_unused(physical *one)
{
    physical **link = &physicals;
    if (one->references > 0 || one->mappings > 0)
        return;
    if (one->exported && is_open(one)) {
        left_count += !one->left;
        one->left = 1;
        return;
    }
    left_count -= one->left;
    while (*link != one)
        link = &(*link)->next;
    *link = one->next;
    close(one->fd);
    let_go(one);
    const CUmemGenericAllocationHandle handle = one->handle;
    free(one);
    cu_multicast_ended(handle);
    cu_physical_sweep(); /* its file may have been the last to keep what this process exported and imported again */
}

/* The driver frees it "when all outstanding references to the handle (including its shareable counterparts)" are released: at once,
 * whoever closes the last descriptor. Nobody tells us, so it is looked at before anything is taken. */
void cu_physical_sweep(void)
{
    physical *one = left_count ? physicals : NULL;
    while (one) {
        const int gone = one->left && !is_open(one);
        if (gone)
            release_if_unused(one);
        one = gone ? physicals : one->next; /* others may have gone with it */
    }
}

int cu_physical_keep(CUmemGenericAllocationHandle handle, int by)
{
    physical *one = find_physical(handle);
    if (!one)
        return -1;
    one->mappings += by;
    release_if_unused(one);
    return 0;
}

int cu_physical_device(CUmemGenericAllocationHandle handle)
{
    const physical *one = find_physical(handle);
    return one ? one->prop.location.id : -1;
}

static const reservation *find_reservation(uintptr_t start, size_t bytes)
{
    const reservation *one = reservations;
    while (one && !(start >= one->start && start + bytes <= one->start + one->bytes))
        one = one->next;
    return one;
}

static int whole(uint64_t value)
{
    return value % CU_CHUNK == 0;
}

/* `known` is what the memory is told of as: a locality domain is its card, which has one only. */
static CUresult check_prop(const CUmemAllocationProp *prop, CUmemAllocationProp *known)
{
    cu_device *found;
    if (!prop || (int)prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    *known = *prop;
    switch ((int)prop->location.type) {
    case CU_MEM_LOCATION_TYPE_HOST:
        return prop->requestedHandleTypes ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        break;
    case CU_MEM_LOCATION_TYPE_DEVICE_LOCALITY_DOMAIN:
        if (prop->location.id >> 8)
            return CUDA_ERROR_INVALID_VALUE;
        known->location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, prop->location.id & 0xff};
        break;
    case CU_MEM_LOCATION_TYPE_DEVICE:
        break;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    if ((int)prop->requestedHandleTypes > 1)
        return CUDA_ERROR_NOT_SUPPORTED;
    return (int)known->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? cu_device_of(known->location.id, &found) : CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                                 CUmemAllocationGranularity_flags option)
{
    CUmemAllocationProp known;
    CUresult bad = cu_initialised();
    if (!bad)
        bad = check_prop(prop, &known);
    if (bad || !granularity || (int)option < 0 || (int)option > 1)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    *granularity = CU_CHUNK;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemAddressReserve(CUdeviceptr *pointer, size_t bytes, size_t alignment, CUdeviceptr wanted,
                                       unsigned long long flags)
{
    (void)wanted; /* a hint only */
    CUresult bad = cu_initialised();
    if (bad || !pointer || !bytes || flags || bytes % 4096 || (alignment & (alignment - 1)))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const size_t align = alignment > CU_CHUNK ? alignment : CU_CHUNK;
    reservation *made = calloc(1, sizeof *made);
    void *where = made ? mmap(NULL, bytes + align, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
                       : MAP_FAILED;
    if (where == MAP_FAILED) {
        free(made);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    const uintptr_t start = ((uintptr_t)where + align - 1) & ~(uintptr_t)(align - 1);
    const uintptr_t end = (start + bytes + 4095) & ~(uintptr_t)4095;
    if (start > (uintptr_t)where)
        munmap(where, start - (uintptr_t)where);
    if ((uintptr_t)where + bytes + align > end)
        munmap((void *)end, (uintptr_t)where + bytes + align - end);
    pthread_mutex_lock(&cu_lock);
    *made = (reservation){reservations, start, bytes};
    reservations = made;
    pthread_mutex_unlock(&cu_lock);
    *pointer = start;
    return CUDA_SUCCESS;
}

CU_EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes)
{
    CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    reservation **link = &reservations;
    while (*link && ((*link)->start != (uintptr_t)pointer || (*link)->bytes != bytes))
        link = &(*link)->next;
    reservation *one = *link;
    for (size_t at = 0; one && !bad && at < bytes; at += CU_CHUNK)
        if (cu_find((uintptr_t)pointer + at))
            bad = CUDA_ERROR_INVALID_VALUE; /* still mapped */
    if (one && !bad) {
        *link = one->next;
        munmap((void *)one->start, one->bytes);
        free(one);
    }
    pthread_mutex_unlock(&cu_lock);
    return bad ? bad : one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult add_physical(const CUmemAllocationProp *prop, size_t bytes, int fd, int unpaid, uint64_t shared,
                             CUmemGenericAllocationHandle *handle)
{
    physical *made = fd < 0 ? NULL : calloc(1, sizeof *made);
    if (!made) {
        if (fd >= 0)
            close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *made = (physical){.next = physicals, .handle = next_handle++, .prop = *prop, .bytes = bytes, .fd = fd,
                       .references = 1, .unpaid = unpaid, .shared = shared};
    physicals = made;
    *handle = made->handle;
    return CUDA_SUCCESS;
}

CUresult cu_physical_add_free(int device, size_t bytes, CUmemGenericAllocationHandle *handle)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    const int fd = memfd_create("cuda-multicast", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, (off_t)bytes)) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return add_physical(&prop, bytes, fd, 1, 0, handle);
}

/* A memory file for physical memory; its name tells the card to a process that imports it when nobody has it any more. */
static int memory_file(int card, size_t bytes)
{
    char name[64];
    snprintf(name, sizeof name, "%s%d", CU_PHYSICAL_NAME, card);
    const int fd = memfd_create(name, MFD_CLOEXEC);
    if (fd < 0 || !ftruncate(fd, (off_t)bytes))
        return fd;
    close(fd);
    return -1;
}

CU_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t bytes, const CUmemAllocationProp *prop,
                               unsigned long long flags)
{
    CUmemAllocationProp known;
    CUresult bad = cu_initialised();
    if (!bad)
        bad = check_prop(prop, &known);
    if (bad || !handle || !bytes || !whole(bytes) || flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    const int on_card = (int)known.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (!on_card)
        known.location.id = 0;
    bad = on_card ? cu_alloc_fault_on(known.location.id) : CUDA_SUCCESS;
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    bad = on_card ? cu_charge(known.location.id, bytes) : CUDA_SUCCESS;
    if (!bad) {
        bad = add_physical(&known, bytes, memory_file(cu_process.devices[known.location.id].card, bytes), !on_card, 0, handle);
        if (bad && on_card)
            cu_discharge(known.location.id, bytes);
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle)
{
    const CUresult bad = cu_initialised();
    if (bad)
        return bad;
    pthread_mutex_lock(&cu_lock);
    cu_physical_sweep();
    physical *one = find_physical(handle);
    const int held = one && one->references > 0;
    if (held) {
        one->references--;
        release_if_unused(one);
    }
    pthread_mutex_unlock(&cu_lock);
    return held ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    const CUresult bad = cu_initialised();
    if (bad || !handle)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)address);
    physical *one = block && block->kind == CU_BLOCK_VMM ? find_physical(block->handle) : NULL;
    if (one) {
        one->references++;
        *handle = one->handle;
    }
    pthread_mutex_unlock(&cu_lock);
    return one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    const CUresult bad = cu_initialised();
    if (bad || !prop)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    const physical *one = find_physical(handle);
    if (one)
        *prop = one->prop;
    pthread_mutex_unlock(&cu_lock);
    return one ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CU_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset, CUmemGenericAllocationHandle handle,
                            unsigned long long flags)
{
    CUresult bad = cu_initialised();
    if (bad || !pointer || !bytes || !whole(pointer) || !whole(bytes) || offset || flags)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    physical *one = find_physical(handle);
    int taken = 0;
    for (size_t at = 0; at < bytes && !taken; at += CU_CHUNK)
        taken = cu_find((uintptr_t)pointer + at) != NULL;
    if (!one || taken || bytes != one->bytes || !find_reservation((uintptr_t)pointer, bytes)) {
        bad = CUDA_ERROR_INVALID_VALUE;
    } else {
        const cu_block block = {.start = (uintptr_t)pointer, .bytes = bytes, .kind = CU_BLOCK_VMM, .handle = handle,
                                .device = one->prop.location.id};
        void *where = mmap((void *)(uintptr_t)pointer, bytes, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, one->fd, 0);
        if (where == MAP_FAILED || cu_outside_add(&block))
            bad = CUDA_ERROR_OUT_OF_MEMORY;
        else
            one->mappings++;
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

/* Unmaps whole mappings that lie in the range. */
CU_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes)
{
    CUresult bad = cu_initialised();
    if (bad || !bytes || !whole(pointer) || !whole(bytes))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    for (uintptr_t at = (uintptr_t)pointer; !bad && at < (uintptr_t)pointer + bytes;) {
        cu_block *block = cu_find(at);
        if (!block || block->kind != CU_BLOCK_VMM || block->start != at || at + block->bytes > (uintptr_t)pointer + bytes) {
            bad = CUDA_ERROR_INVALID_VALUE;
            break;
        }
        at += block->bytes;
    }
    for (uintptr_t at = (uintptr_t)pointer; !bad && at < (uintptr_t)pointer + bytes;) { /* all of it, or nothing */
        cu_block *block = cu_find(at);
        at += block->bytes;
        physical *one = find_physical(block->handle);
        mmap((void *)block->start, block->bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
        cu_outside_remove(block);
        one->mappings--;
        release_if_unused(one);
    }
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc *access, size_t count)
{
    CUresult bad = cu_initialised();
    if (bad || !access || !count || !bytes || !whole(pointer) || !whole(bytes))
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    /* All cards share the host's address space: what any of them may do is what the mapping allows. */
    int protection = PROT_NONE;
    for (size_t i = 0; i < count; i++)
        protection |= ((int)access[i].flags & 1 ? PROT_READ : 0) | ((int)access[i].flags & 2 ? PROT_WRITE : 0);
    pthread_mutex_lock(&cu_lock);
    for (size_t at = 0; at < bytes && !bad; at += CU_CHUNK) {
        cu_block *block = cu_find((uintptr_t)pointer + at);
        if (!block || block->kind != CU_BLOCK_VMM)
            bad = CUDA_ERROR_INVALID_VALUE;
        else
            block->flags = (unsigned)protection;
    }
    if (!bad && mprotect((void *)(uintptr_t)pointer, bytes, protection))
        bad = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&cu_lock);
    return bad;
}

CU_EXPORT CUresult cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer)
{
    const CUresult bad = cu_initialised();
    if (bad || !flags || !location)
        return bad ? bad : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&cu_lock);
    const cu_block *block = cu_find((uintptr_t)pointer);
    const int found = block && block->kind == CU_BLOCK_VMM;
    if (found)
        *flags = (block->flags & PROT_READ ? 1u : 0u) | (block->flags & PROT_WRITE ? 2u : 0u);
    pthread_mutex_unlock(&cu_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- what other processes hold too; the API is in cu_sharing.c, cu_ipc.c and cu_external.c ---- */

int cu_physical_export(CUmemGenericAllocationHandle handle, uint64_t *shared)
{
    physical *one = find_physical(handle);
    if (!one || one->unpaid || (int)one->prop.requestedHandleTypes != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return -1;
    const int card = cu_process.devices[one->prop.location.id].card;
    const uint64_t name = cu_file_id(one->fd);
    sim_card_lock(cu_process.state, card);
    const int bad = sim_object_share(cu_process.state, sim_card_at(cu_process.state, card), name, one->bytes);
    sim_card_unlock(cu_process.state, card);
    if (bad)
        return -1;
    one->shared = *shared = name;
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", one->fd);
    const int made = open(link, O_RDWR | O_CLOEXEC);
    struct flock lock = {.l_type = F_RDLCK, .l_whence = SEEK_SET, .l_len = 1};
    one->exported |= made >= 0 && !fcntl(made, F_OFD_SETLK, &lock);
    return made;
}

CUresult cu_physical_import(int fd, uint64_t shared, int device, size_t bytes, CUmemGenericAllocationHandle *handle)
{
    const CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                      .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                      .location = {CU_MEM_LOCATION_TYPE_DEVICE, device}};
    const int card = cu_process.devices[device].card;
    cu_physical_sweep();
    sim_card_lock(cu_process.state, card);
    const int full = sim_object_join(cu_process.state, sim_card_at(cu_process.state, card), shared, bytes);
    sim_card_unlock(cu_process.state, card);
    if (full) {
        close(fd);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return add_physical(&prop, bytes, fd, 0, shared, handle);
}

CUresult cu_physical_map(CUmemGenericAllocationHandle handle, CUcontext ctx, size_t offset, size_t bytes, cu_block **made)
{
    physical *one = find_physical(handle);
    const size_t span = (bytes + CU_CHUNK - 1) / CU_CHUNK * CU_CHUNK;
    unsigned char *place = mmap(NULL, span + CU_CHUNK, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    unsigned char *start = (unsigned char *)(((uintptr_t)place + CU_CHUNK - 1) & ~(uintptr_t)(CU_CHUNK - 1));
    if (start > place)
        munmap(place, (size_t)(start - place));
    munmap(start + span, CU_CHUNK - (size_t)(start - place));
    const cu_block block = {.start = (uintptr_t)start, .bytes = bytes, .kind = CU_BLOCK_IMPORTED, .ctx = ctx,
                            .device = one->prop.location.id, .handle = handle};
    if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, one->fd, (off_t)offset) ==
            MAP_FAILED ||
        cu_outside_add(&block)) {
        munmap(start, span);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    one->mappings++;
    *made = cu_find((uintptr_t)start);
    return CUDA_SUCCESS;
}

void cu_physical_unmap(cu_block *block)
{
    physical *one = find_physical(block->handle);
    munmap((void *)block->start, (block->bytes + CU_CHUNK - 1) / CU_CHUNK * CU_CHUNK);
    cu_outside_remove(block);
    one->mappings--;
    release_if_unused(one);
}

CUmemGenericAllocationHandle cu_physical_shared(uint64_t shared)
{
    const physical *one = find_shared(shared);
    return one ? one->handle : 0;
}

void cu_physical_release(CUmemGenericAllocationHandle handle)
{
    physical *one = find_physical(handle);
    one->references--;
    release_if_unused(one);
}
