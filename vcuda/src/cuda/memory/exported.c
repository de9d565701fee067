/* Physical memory that was exported to a file descriptor: it stays on the card as long as the descriptor is open anywhere, in any
 * process, and comes back by an import; the driver's figure of the process no longer shows it (H100, driver 580).
 *
 * So its charge stays as long. The open file itself tells: bytes of it are locked (of its open file description, beyond all data), and
 * another description of the same file sees the lock until the last copy of the descriptor is closed. An imported descriptor through which
 * the lock is not seen is the very one that holds it: then the handle stands for our object.
 *
 * The lock is a signature: the slot of who pays for the object and its tag, and the object's extent (region/shared.h), a byte for each
 * chunk. Who imports it holds the extent: as long the one who made it pays, or his slot does when he is dead. Who exports again what he has
 * imported signs for him. An exporter who is gone already, of another container,
 * or not known (the file was opened anew, its lock taken away, no descriptor was free) does not: then the importer pays, by the
 * signature's size before the driver is called, without one by what the driver lets him map of it. What is exported, of a dead exporter, and imported by nobody is not charged: the descriptor may lie in a socket that
 * nobody reads. */
#include "cuda/memory/exported.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/memory/refusal.h"
#include "region/descriptor.h"
#include "region/slot.h"

/* Places of locks: above all data, then slot, tag, which of several signatures, chunk. */
#define VC__FIRST_PLACE ((off_t)1 << 61)
#define VC__COPY_BITS 4
#define VC__NOTHING ((1u << VC__COPY_BITS) - 1) /* for what is no memory */
#define VC__COPY_SHIFT VC_EXTENT_BITS
#define VC__TAG_SHIFT (VC__COPY_SHIFT + VC__COPY_BITS)
#define VC__SLOT_SHIFT (VC__TAG_SHIFT + VC_TAG_BITS)
_Static_assert(VC__SLOT_SHIFT + 7 == 61 && VC_MAX_SLOTS <= 1 << 7, "a signature fits into a file offset");

struct probe { /* a description of our own of a file in which exports lie */
    struct probe *next;
    dev_t device;
    ino_t inode;
    int descriptor;
    uint64_t exports;
};

struct export {
    struct export *next;
    struct vc_object *object;
    struct probe *probe;
    off_t place;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* guards the lists; no call of the driver under it */
static struct export *exports;
static struct probe *probes;

/* The descriptors are shared with the parent: the child lets go of its copies, whoever's locks they see. */
static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
    exports = NULL;
    probes = NULL;
}
VC_AT_FORK(forget);

static bool sees_lock(int descriptor, off_t place)
{
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = place, .l_len = 1};
    return fcntl(descriptor, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

/* Pre: locked. */
static struct probe *probe_for(int descriptor)
{
    char link[32];
    struct stat status;
    if (fstat(descriptor, &status) != 0)
        return NULL;
    for (struct probe *probe = probes; probe; probe = probe->next)
        if (probe->device == status.st_dev && probe->inode == status.st_ino)
            return probe;
    struct probe *probe = calloc(1, sizeof *probe);
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int own = probe ? open(link, O_RDWR | O_CLOEXEC | O_NONBLOCK) : -1;
    if (own < 0) {
        free(probe);
        return NULL;
    }
    *probe = (struct probe){.next = probes, .device = status.st_dev, .inode = status.st_ino, .descriptor = vc_descriptor_move_high(own)};
    probes = probe;
    return probe;
}

/* Pre: locked. */
static void leave_probe(struct probe *probe)
{
    struct probe **link = &probes;
    if (--probe->exports > 0)
        return;
    while (*link != probe)
        link = &(*link)->next;
    *link = probe->next;
    close(probe->descriptor);
    free(probe);
}

/* Whether a descriptor is open that says this of itself, or of another export of the same object: its maker's, though the one who exported
 * it again is dead. */
static bool is_open(const struct export *one)
{
    const off_t copies = (off_t)VC__NOTHING << VC__COPY_SHIFT;
    bool open = sees_lock(one->probe->descriptor, one->place);
    for (off_t copy = 0; !open && copy < copies; copy += (off_t)1 << VC__COPY_SHIFT)
        open = sees_lock(one->probe->descriptor, (one->place & ~copies) | copy);
    return open;
}

/* Whether another process holds what we have made. */
static bool is_held(struct vc_object *object)
{
    return vc_object_is_ours(object) && vc_shared_is_held(vc_object_extent(object));
}

/* Let go of what is open nowhere any more. */
static void sweep(void)
{
    struct export *gone = NULL;
    if (VC_LIKELY(!vc_load_relaxed(&exports)))
        return;
    pthread_mutex_lock(&mutex);
    for (struct export **link = &exports; *link;) {
        struct export *one = *link;
        if (is_open(one) || is_held(one->object)) {
            link = &one->next;
            continue;
        }
        *link = one->next;
        leave_probe(one->probe);
        one->next = gone;
        gone = one;
    }
    pthread_mutex_unlock(&mutex);
    while (gone) {
        struct export *next = gone->next;
        vc_object_drop(gone->object);
        free(gone);
        gone = next;
    }
}

static void make_room(uint32_t card)
{
    (void)card;
    sweep();
}

static const struct vc_source exported = {.make_room = make_room, .settle = sweep};
VC_SOURCE(exported);

/* Lock the descriptor's file where it says whose it is and how much. One file may hold several exports, also of one object. */
static bool sign(int descriptor, const struct vc_extent *extent, uint32_t copy, uint32_t copies, off_t *place)
{
    uint64_t tag = vc_slot_tag(extent->region, extent->slot);
    for (; copy < copies; copy++) {
        *place = VC__FIRST_PLACE | (off_t)((uint64_t)extent->slot << VC__SLOT_SHIFT | tag << VC__TAG_SHIFT |
                                           (uint64_t)copy << VC__COPY_SHIFT | extent->first);
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = *place, .l_len = (off_t)extent->chunks};
        if (!sees_lock(descriptor, *place) && fcntl(descriptor, F_OFD_SETLK, &lock) == 0)
            return true;
    }
    return false;
}

/* False: nobody can tell how long the descriptor lives. */
static bool track(int descriptor, struct vc_object *object)
{
    const struct vc_extent *extent = vc_object_extent(object);
    struct export *one = extent ? malloc(sizeof *one) : NULL;
    if (!one)
        return false;
    pthread_mutex_lock(&mutex);
    struct probe *probe = probe_for(descriptor);
    *one = (struct export){exports, object, probe, 0};
    bool signed_by_us = sign(descriptor, extent, 0, VC__NOTHING, &one->place); /* even if we can't see then when it is closed */
    bool tracked = probe && signed_by_us;
    if (probe) {
        probe->exports++;
        if (tracked)
            vc_store_release(&exports, one);
        else
            leave_probe(probe);
    }
    pthread_mutex_unlock(&mutex);
    if (!tracked)
        free(one);
    return tracked;
}

static void sign_as_nothing(int descriptor)
{
    struct vc_extent extent;
    off_t place;
    struct vc_regions *regions = vc_regions_get();
    uint32_t number = 0;
    while (number < regions->count && !vc_shared_new(&regions->all[number], 0, 1, &extent))
        number++;
    if (number < regions->count)
        sign(descriptor, &extent, VC__NOTHING, VC__NOTHING + 1, &place);
}

CUresult vc_hook_cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    struct vc_object *object = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? vc_object_hold(handle) : NULL;
    CUresult result = vc_real.cuMemExportToShareableHandle(shareable, handle, type, flags);
    if (!object)
        return result;
    if (result == CUDA_SUCCESS && track(*(int *)shareable, object))
        return result;
    if (result == CUDA_SUCCESS && vc_object_is_nothing(object))
        sign_as_nothing(*(int *)shareable);
    if (result != CUDA_SUCCESS || !vc_object_is_ours(object))
        vc_object_drop(object); /* else it stays charged until the process ends */
    return result;
}

struct vc_object *vc_exported_find(int descriptor)
{
    struct vc_object *object = NULL;
    struct stat status;
    sweep(); /* a lock that is not seen below is not gone, then */
    if (!vc_load_relaxed(&exports) || fstat(descriptor, &status) != 0)
        return NULL;
    pthread_mutex_lock(&mutex);
    for (struct export *one = exports; one && !object; one = one->next)
        if (one->probe->device == status.st_dev && one->probe->inode == status.st_ino && !sees_lock(descriptor, one->place))
            object = vc_object_held(one->object);
    pthread_mutex_unlock(&mutex);
    return object;
}

/* The lock that the descriptor itself holds, among all that others see. */
static bool find_signature(int other, int descriptor, off_t from, off_t to, struct flock *found)
{
    while (from < to) {
        *found = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = from, .l_len = to - from};
        if (fcntl(other, F_OFD_GETLK, found) != 0 || found->l_type == F_UNLCK)
            return false;
        if (found->l_len > 0 && !sees_lock(descriptor, found->l_start))
            return true;
        struct flock here = *found;
        if (here.l_len == 0 || find_signature(other, descriptor, from, here.l_start, found))
            return here.l_len != 0;
        from = here.l_start + here.l_len;
    }
    return false;
}

bool vc_signature_read(int descriptor, struct vc_signature *signature)
{
    char link[32];
    struct flock lock;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int other = open(link, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    bool found = other >= 0 && find_signature(other, descriptor, VC__FIRST_PLACE, VC__FIRST_PLACE | (VC__FIRST_PLACE - 1), &lock);
    if (other >= 0)
        close(other);
    if (!found)
        return false;
    uint64_t place = (uint64_t)lock.l_start;
    signature->extent = (struct vc_extent){.slot = place >> VC__SLOT_SHIFT & (VC_MAX_SLOTS - 1),
                                           .first = place & ((UINT64_C(1) << VC_EXTENT_BITS) - 1), .chunks = (uint64_t)lock.l_len};
    signature->tag = place >> VC__TAG_SHIFT & ((1u << VC_TAG_BITS) - 1);
    signature->is_nothing = (place >> VC__COPY_SHIFT & VC__NOTHING) == VC__NOTHING;
    return true;
}

/* None: on the host. */
static vc_cards cards_of(CUmemGenericAllocationHandle handle, CUdevice *device)
{
    CUmemAllocationProp properties = {0};
    if (!vc_real.cuMemGetAllocationPropertiesFromHandle ||
        vc_real.cuMemGetAllocationPropertiesFromHandle(&properties, handle) != CUDA_SUCCESS)
        return vc_cards_all();
    if (properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return vc_is_pinned_on_host(&properties) ? 0 : vc_cards_all();
    *device = properties.location.id;
    return vc_cards_of_device(*device);
}

/* The largest that can be mapped of it, whether a driver maps parts or only the whole; 0: nothing can. */
static uint64_t size_of(CUmemGenericAllocationHandle handle, uint64_t limit)
{
    CUdeviceptr place;
    uint64_t most = limit / VC_CHUNK * VC_CHUNK + VC_CHUNK, bytes = most;
    if (!vc_real.cuMemAddressReserve || !vc_real.cuMemAddressFree || vc_real.cuMemAddressReserve(&place, most, 0, 0, 0) != CUDA_SUCCESS)
        return 0;
    while (bytes > 0 && vc_real.cuMemMap(place, bytes, 0, handle, 0) != CUDA_SUCCESS)
        bytes -= VC_CHUNK;
    if (bytes > 0)
        vc_real.cuMemUnmap(place, bytes);
    vc_real.cuMemAddressFree(place, most);
    return bytes;
}

/* Which of our regions the exporter's slot is of, his tag tells; where that is met by chance, the card does (end_import). */
bool vc_signature_hold(const struct vc_signature *signature, struct vc_extent *extent)
{
    struct vc_regions *regions = vc_regions_get();
    bool held = false;
    *extent = signature->extent;
    for (uint32_t number = 0; number < regions->count && !held; number++) {
        extent->region = &regions->all[number];
        extent->cards = (1u << regions->all[number].card_count) - 1;
        held = vc_shared_hold(extent, signature->tag);
    }
    return held;
}

vc_cards vc_reserve_anywhere(uint64_t bytes)
{
    struct vc_charge charge;
    vc_cards all = vc_cards_all(), reserved = 0;
    VC_EACH_CARD(card, all)
        if (vc_charge_cards(&charge, 1u << card, bytes) == CUDA_SUCCESS)
            reserved |= 1u << card;
    return reserved;
}

static void let_go(struct vc_import *import)
{
    if (import->held)
        vc_shared_let(&import->extent);
    import->held = false;
}

/* Before the driver: the exporter pays, or we do. On which card it lies is not known yet, so wherever there is room. */
static CUresult begin_import(const struct vc_signature *signature, struct vc_import *import)
{
    import->bytes = signature->extent.chunks * VC_CHUNK;
    import->held = vc_signature_hold(signature, &import->extent);
    if (import->held)
        return CUDA_SUCCESS;
    import->reserved = vc_reserve_anywhere(import->bytes);
    return import->reserved ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static void undo_import(struct vc_import *import)
{
    vc_cards_rollback(import->reserved, import->bytes);
    let_go(import);
}

static CUresult end_import(CUmemGenericAllocationHandle handle, struct vc_import *import)
{
    uint64_t limit = UINT64_MAX;
    uint32_t within;
    import->cards = cards_of(handle, &import->device);
    if (import->cards & VC_LOST_CARDS) {
        undo_import(import);
        vc_refused(import->cards, import->bytes);
        vc_real.cuMemRelease(handle);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    VC_EACH_CARD(card, import->cards) {
        uint64_t its = vc_quota_limit(vc_card(card)->region, vc_card(card)->index);
        limit = its < limit ? its : limit;
    }
    if (limit == UINT64_MAX) { /* nothing is limited */
        undo_import(import);
        vc_object_add_uncharged(handle, false);
        return CUDA_SUCCESS;
    }
    if (import->held && vc_cards_region(import->cards, &within) != import->extent.region)
        let_go(import);
    if (import->held) {
        import->extent.cards = within;
        vc_shared_narrow(&import->extent);
    } else if (import->bytes == 0) {
        import->bytes = size_of(handle, limit);
    }
    if (import->bytes > 0)
        return vc_object_add_import(handle, import);
    vc_refused(import->cards, 0); /* what can't be measured is larger than the limit, or may be */
    vc_real.cuMemRelease(handle);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

/* An imported multicast object may get memory of ours. */
CUresult vc_hook_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    struct vc_signature signature = {0};
    struct vc_import import = {0};
    int descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? (int)(intptr_t)shareable : -1;
    struct vc_object *object = descriptor >= 0 ? vc_exported_find(descriptor) : NULL;
    bool is_signed = !object && descriptor >= 0 && vc_signature_read(descriptor, &signature);
    CUresult result = is_signed && !signature.is_nothing ? begin_import(&signature, &import) : CUDA_SUCCESS;
    if (result != CUDA_SUCCESS)
        return result;
    CUmemGenericAllocationHandle before = handle ? *handle : 0;
    result = vc_real.cuMemImportFromShareableHandle(handle, shareable, type);
    if (result != CUDA_SUCCESS) {
        if (object)
            vc_object_drop(object);
        undo_import(&import);
        return result;
    }
    if (object)
        vc_object_add_handle(*handle, object);
    else if (signature.is_nothing)
        vc_object_add_uncharged(*handle, true);
    else
        result = end_import(*handle, &import);
    if (result != CUDA_SUCCESS)
        *handle = before;
    return result;
}
