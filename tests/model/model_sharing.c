/* Steps: memory that one process gives and another takes, by IPC handle, descriptor or pool; and memory of other interfaces. */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include "model.h"

enum { BY_IPC, BY_HANDLE, BY_POOL, BY_POOL_POINTER, WAYS };

/* What waits to be taken lies in a socket that all processes have: in the order of the steps, so the same in every run. */
struct parcel {
    int way, device;
    size_t bytes;
    char data[64];
};

static bool send_parcel(const struct parcel *parcel, int descriptor)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {(void *)(uintptr_t)parcel, sizeof *parcel};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1};
    if (descriptor >= 0) {
        message.msg_control = control.room;
        message.msg_controllen = sizeof control.room;
        control.header = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
        memcpy(CMSG_DATA(&control.header), &descriptor, sizeof descriptor);
    }
    const bool sent = sendmsg(PARCELS_IN, &message, MSG_DONTWAIT) == sizeof *parcel;
    if (descriptor >= 0)
        close(descriptor);
    return sent;
}

static bool take_parcel(struct parcel *parcel, int *descriptor)
{
    union {
        struct cmsghdr header;
        char room[CMSG_SPACE(sizeof(int))];
    } control = {0};
    struct iovec part = {parcel, sizeof *parcel};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = control.room, .msg_controllen = sizeof control.room};
    if (recvmsg(PARCELS_OUT, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != sizeof *parcel)
        return false;
    *descriptor = NONE;
    if (CMSG_FIRSTHDR(&message))
        memcpy(descriptor, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof *descriptor);
    return true;
}

static void given(struct dice *dice)
{
    const struct pointer *pointer = &world.pointers[roll(dice, POINTERS)];
    const struct physical *memory = &world.physicals[roll(dice, HANDLES)];
    const unsigned which = roll(dice, POOLS), way = roll(dice, WAYS);
    struct parcel parcel = {.way = (int)way, .bytes = pointer->bytes};
    int descriptor = NONE, result = NONE;
    switch (way) {
    case BY_IPC:
        if (!pointer->kind)
            return;
        result = cuIpcGetMemHandle(parcel.data, pointer->at);
        say(" cuIpcGetMemHandle kind %d = %d", pointer->kind, result);
        break;
    case BY_HANDLE:
        if (!memory->held)
            return;
        parcel.bytes = memory->bytes;
        parcel.device = memory->device;
        result = cuMemExportToShareableHandle(&descriptor, memory->handle, 1, 0);
        say(" cuMemExportToShareableHandle = %d", result);
        break;
    case BY_POOL:
        if (!world.pools[which])
            return;
        parcel.device = world.pool_device[which];
        result = cuMemPoolExportToShareableHandle(&descriptor, world.pools[which], 1, 0);
        say(" cuMemPoolExportToShareableHandle = %d", result);
        break;
    default:
        if (pointer->kind != POOLED)
            return;
        result = cuMemPoolExportPointer(parcel.data, pointer->at);
        say(" cuMemPoolExportPointer = %d", result);
    }
    if (!result)
        say(", sent %d", send_parcel(&parcel, descriptor));
}

static void take_pointer(struct dice *dice, const struct parcel *parcel)
{
    struct pointer *one = &world.pointers[roll(dice, POINTERS)];
    CUmemoryPool pool = world.imports[roll(dice, IMPORTS)];
    CUdeviceptr at = 0;
    if (one->kind || (parcel->way == BY_POOL_POINTER && !pool))
        return;
    struct model_ipc_handle handle;
    memcpy(&handle, parcel->data, sizeof handle);
    const int result = parcel->way == BY_IPC ? cuIpcOpenMemHandle_v2(&at, handle, 1)
                                             : cuMemPoolImportPointer(&at, pool, &handle);
    say(" %s = %d", parcel->way == BY_IPC ? "cuIpcOpenMemHandle" : "cuMemPoolImportPointer", result);
    if (!result)
        *one = (struct pointer){at, parcel->bytes, parcel->way == BY_IPC ? OPENED : IMPORTED, world.current, NONE};
}

static void taken(struct dice *dice)
{
    struct physical *memory = &world.physicals[roll(dice, HANDLES)];
    CUmemoryPool *pool = &world.imports[roll(dice, IMPORTS)];
    struct parcel parcel;
    int descriptor, result;
    if (!take_parcel(&parcel, &descriptor))
        return;
    void *by = (void *)(intptr_t)descriptor;
    if (parcel.way == BY_HANDLE && !memory->held) {
        result = cuMemImportFromShareableHandle(&memory->handle, by, 1);
        say(" cuMemImportFromShareableHandle = %d", result);
        *memory = (struct physical){memory->handle, parcel.bytes, parcel.device, !result};
    } else if (parcel.way == BY_POOL) {
        if (*pool)
            say(" cuMemPoolDestroy = %d,", cuMemPoolDestroy(*pool));
        *pool = NULL;
        result = cuMemPoolImportFromShareableHandle(pool, by, 1, 0);
        say(" cuMemPoolImportFromShareableHandle = %d", result);
        *pool = result ? NULL : *pool;
    } else if (parcel.way != BY_HANDLE) {
        take_pointer(dice, &parcel);
    }
    if (descriptor >= 0)
        close(descriptor);
}

/* Memory that Vulkan, say, has made: here a file, as no such interface is simulated. */
static void external(struct dice *dice)
{
    struct external *one = &world.externals[roll(dice, EXTERNALS)];
    struct pointer *pointer = &world.pointers[roll(dice, POINTERS)];
    CUdeviceptr at = 0;
    if (!one->memory) {
        const size_t bytes = 4096 * (1 + roll(dice, 2000));
        const int file = memfd_create("external", MFD_CLOEXEC);
        const model_external_memory given = {.type = 1, .fd = file, .size = bytes};
        if (file < 0 || ftruncate(file, (off_t)bytes))
            return;
        const int result = cuImportExternalMemory(&one->memory, &given);
        say(" cuImportExternalMemory %zu = %d", bytes, result);
        *one = (struct external){result ? NULL : one->memory, bytes, world.current};
        if (result)
            close(file);
    } else if (!pointer->kind && roll(dice, 2)) {
        const model_external_buffer given = {.size = one->bytes};
        const int result = cuExternalMemoryGetMappedBuffer(&at, one->memory, &given);
        say(" cuExternalMemoryGetMappedBuffer = %d", result);
        if (!result)
            *pointer = (struct pointer){at, one->bytes, PLAIN, one->context, NONE};
    } else {
        say(" cuDestroyExternalMemory = %d", cuDestroyExternalMemory(one->memory));
        *one = (struct external){0};
    }
}

static void end_sharing(void)
{
    for (int i = 0; i < EXTERNALS; i++)
        if (world.externals[i].memory)
            say(" %d", cuDestroyExternalMemory(world.externals[i].memory));
    for (int i = 0; i < IMPORTS; i++)
        if (world.imports[i])
            say(" %d", cuMemPoolDestroy(world.imports[i]));
    memset(world.externals, 0, sizeof world.externals);
    memset(world.imports, 0, sizeof world.imports);
}

const struct kind sharing_kinds[] = {
    {"given", 8, true, given, end_sharing},
    {"taken", 7, true, taken, NULL},
    {"external", 3, true, external, NULL},
    {0},
};
