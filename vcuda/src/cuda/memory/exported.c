/* Physical memory that was exported to a file descriptor: it stays on the card as long as the descriptor is open anywhere, in any
 * process, and comes back by an import; the driver's figure of the process no longer shows it (H100, driver 580).
 *
 * So its charge stays as long. The open file itself tells: a byte of it is locked (of its open file description, at a random place
 * beyond all data), and another description of the same file sees the lock until the last copy of the descriptor is closed. An
 * imported descriptor through which the lock is not seen is the very one that holds it: then the handle stands for our object. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/memory/object.h"
#include "region/descriptor.h"

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

/* False: nobody can tell how long the descriptor lives. */
static bool track(int descriptor, struct vc_object *object)
{
    static uint64_t made;
    struct export *one = malloc(sizeof *one);
    if (!one)
        return false;
    uint64_t mixed = (vc_now_ns() ^ (uint64_t)getpid() << 40 ^ vc_add_relaxed(&made, 1)) * 0x9e3779b97f4a7c15u;
    off_t place = (off_t)(((uint64_t)1 << 61) | mixed >> 3);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = place, .l_len = 1};
    pthread_mutex_lock(&mutex);
    struct probe *probe = probe_for(descriptor);
    bool tracked = probe && fcntl(descriptor, F_OFD_SETLK, &lock) == 0;
    if (probe) {
        probe->exports++;
        *one = (struct export){exports, object, probe, place};
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
    CUresult result = vc_real.cuMemExportToShareableHandle(shareable, handle, type, flags);
    if (!object)
        return result;
    if (result != CUDA_SUCCESS)
        vc_object_drop(object);
    else if (vc_object_is_ours(object))
        track(*(int *)shareable, object); /* where that can't be done it stays charged until the process ends */
    else
        vc_object_drop(object);
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

/* Imported memory is its exporter's, but an imported multicast object may get memory of ours. */
CUresult vc_hook_cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *shareable, int type)
{
    struct vc_object *object = type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? find((int)(intptr_t)shareable) : NULL;
    CUresult result = vc_real.cuMemImportFromShareableHandle(handle, shareable, type);
    if (result != CUDA_SUCCESS && object)
        vc_object_drop(object);
    else if (result == CUDA_SUCCESS && object)
        vc_object_add_handle(*handle, object);
    else if (result == CUDA_SUCCESS)
        vc_object_add_foreign(*handle);
    return result;
}
