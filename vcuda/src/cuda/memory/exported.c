/* Physical memory that was exported to a file descriptor: it stays on the card as long as the descriptor is open anywhere, in any
 * process, and comes back by an import; the driver's figure of the process no longer shows it (H100, driver 580).
 *
 * So its charge stays as long. The open file itself tells: bytes of it are locked (of its open file description, at a random place
 * beyond all data), and another description of the same file sees the lock until the last copy of the descriptor is closed. An
 * imported descriptor through which the lock is not seen is the very one that holds it: then the handle stands for our object.
 *
 * The lock also tells who imports it how much it is (a byte for each chunk) and whose (slot and tag). As long as the exporter lives he
 * pays, because the importer holds a copy of the descriptor; when he dies his slot does, because the importer keeps it (region/slot.h). An
 * exporter who is gone already, or of another container, does not: then the importer pays. What is exported, of a dead exporter, and
 * imported by nobody is not charged: the descriptor may lie in a socket that nobody reads. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/memory/object.h"
#include "region/descriptor.h"
#include "region/slot.h"

/* Places of locks: above all data, then slot, tag, a random number. */
#define VC__FIRST_PLACE ((off_t)1 << 61)
#define VC__SLOT_SHIFT 54
#define VC__TAG_SHIFT 30
#define VC__TAG_MASK UINT64_C(0xffffff)
#define VC__TRIES 8 /* for a place that no other export overlaps */

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

/* What a dead process's slot goes on paying, if somebody keeps it. */
static void count_exported(const struct vc_object *object, uint64_t bytes)
{
    struct vc_slot *own = vc_region_slot(vc_region_get());
    vc_cards cards = vc_object_cards(object);
    for (uint32_t card = 0; own && cards >> card; card++)
        if (cards >> card & 1)
            vc_add(&own->cards[card].exported_bytes, bytes);
}

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

/* Let go of what is open nowhere any more. */
static void sweep(void)
{
    struct export *gone = NULL;
    if (VC_LIKELY(!vc_load_relaxed(&exports)))
        return;
    pthread_mutex_lock(&mutex);
    for (struct export **link = &exports; *link;) {
        struct export *one = *link;
        if (sees_lock(one->probe->descriptor, one->place)) {
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
        count_exported(gone->object, -vc_object_bytes(gone->object));
        vc_object_drop(gone->object);
        free(gone);
        gone = next;
    }
}

static void make_room(struct vc_region *region, uint32_t card)
{
    (void)region, (void)card;
    sweep();
}

static const struct vc_source exported = {.make_room = make_room, .settle = sweep};
VC_SOURCE(exported);

/* Lock the descriptor's file where it says whose it is and how much. */
static bool sign(int descriptor, uint64_t bytes, off_t *place)
{
    static uint64_t made;
    struct vc_region *region = vc_region_get();
    const struct vc_slot *own = vc_region_slot(region);
    uint64_t slot = own ? (uint64_t)(own - region->usage->slots) : 0, tag = own ? vc_slot_tag(region, (uint32_t)slot) : 0;
    for (int attempt = 0; attempt < VC__TRIES; attempt++) {
        uint64_t mixed = (vc_now_ns() ^ (uint64_t)getpid() << 40 ^ vc_add_relaxed(&made, 1)) * 0x9e3779b97f4a7c15u;
        *place = VC__FIRST_PLACE | (off_t)(slot << VC__SLOT_SHIFT | tag << VC__TAG_SHIFT | mixed >> (64 - VC__TAG_SHIFT));
        struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = *place, .l_len = (off_t)(vc_round_up(bytes, VC_CHUNK) / VC_CHUNK)};
        if (!sees_lock(descriptor, *place) && fcntl(descriptor, F_OFD_SETLK, &lock) == 0)
            return true;
    }
    return false;
}

/* False: nobody can tell how long the descriptor lives. */
static bool track(int descriptor, struct vc_object *object)
{
    struct export *one = malloc(sizeof *one);
    if (!one)
        return false;
    pthread_mutex_lock(&mutex);
    struct probe *probe = probe_for(descriptor);
    *one = (struct export){exports, object, probe, 0};
    bool tracked = probe && sign(descriptor, vc_object_bytes(object), &one->place);
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

CUresult vc_hook_cuMemExportToShareableHandle(void *shareable, CUmemGenericAllocationHandle handle, int type, unsigned long long flags)
{
    struct vc_object *object = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? vc_object_hold(handle) : NULL;
    if (object && !vc_object_pay(object)) { /* who gives on what he imported answers for it */
        vc_object_drop(object);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = vc_real.cuMemExportToShareableHandle(shareable, handle, type, flags);
    if (!object)
        return result;
    if (result != CUDA_SUCCESS || !vc_object_is_ours(object)) {
        vc_object_drop(object);
        return result;
    }
    count_exported(object, vc_object_bytes(object));
    track(*(int *)shareable, object); /* where that can't be done it stays charged until the process ends */
    return result;
}

/* Our object behind a descriptor, held; NULL: another process's. */
static struct vc_object *find(int descriptor)
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

/* What another process's shim says of its descriptor. */
static bool read_signature(int descriptor, struct flock *signature)
{
    char link[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    int other = open(link, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    bool found = other >= 0 && find_signature(other, descriptor, VC__FIRST_PLACE, VC__FIRST_PLACE | (VC__FIRST_PLACE - 1), signature);
    if (other >= 0)
        close(other);
    return found;
}

static vc_cards cards_of(CUmemGenericAllocationHandle handle, CUdevice *device)
{
    CUmemAllocationProp properties = {0};
    struct vc_region *region = vc_region_get();
    if (!vc_real.cuMemGetAllocationPropertiesFromHandle ||
        vc_real.cuMemGetAllocationPropertiesFromHandle(&properties, handle) != CUDA_SUCCESS ||
        properties.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return vc_cards_all(region);
    *device = properties.location.id;
    int card = vc_card_of_device(region, *device);
    return card < 0 ? 0 : 1u << card;
}

static CUresult add_signed(CUmemGenericAllocationHandle handle, int descriptor, const struct flock *signature)
{
    uint64_t place = (uint64_t)signature->l_start;
    uint32_t slot = place >> VC__SLOT_SHIFT & (VC_MAX_SLOTS - 1), tag = (uint32_t)(place >> VC__TAG_SHIFT & VC__TAG_MASK);
    struct vc_import import = {.bytes = (uint64_t)signature->l_len * VC_CHUNK, .payer = VC_NO_PAYER};
    import.cards = cards_of(handle, &import.device);
    import.copy = vc_descriptor_move_high(fcntl(descriptor, F_DUPFD_CLOEXEC, 0));
    if (vc_slot_keep(vc_region_get(), slot, tag))
        import.payer = (int)slot;
    return vc_object_add_import(handle, &import);
}

/* An imported multicast object may get memory of ours. */
CUresult vc_hook_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    struct flock signature;
    int descriptor = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? (int)(intptr_t)shareable : -1;
    struct vc_object *object = descriptor >= 0 ? find(descriptor) : NULL;
    CUresult result = vc_real.cuMemImportFromShareableHandle(handle, shareable, type);
    if (result != CUDA_SUCCESS && object)
        vc_object_drop(object);
    else if (result == CUDA_SUCCESS && object)
        vc_object_add_handle(*handle, object);
    else if (result == CUDA_SUCCESS && descriptor >= 0 && read_signature(descriptor, &signature))
        result = add_signed(*handle, descriptor, &signature);
    else if (result == CUDA_SUCCESS)
        vc_object_add_foreign(*handle);
    return result;
}
