/* Descriptors of the usage file that survive an application which closes them. */
#include "region/descriptor.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#define VC__OVERLAYFS_MAGIC 0x794c7630 /* <linux/magic.h> */
#define VC__LEAST_NUMBER 900

int vc_descriptor_move_high(int descriptor)
{
    int high = fcntl(descriptor, F_DUPFD_CLOEXEC, VC__LEAST_NUMBER);
    if (high < 0)
        return descriptor;
    close(descriptor);
    return high;
}

bool vc_descriptor_is_usage(const struct vc_usage_file *file, int descriptor)
{
    struct stat status;
    return descriptor >= 0 && fstat(descriptor, &status) == 0 && status.st_dev == file->device &&
           status.st_ino == file->inode;
}

static int open_checked(const struct vc_usage_file *file, const char *path)
{
    int descriptor = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
    if (descriptor < 0)
        return -1;
    if (vc_descriptor_is_usage(file, descriptor))
        return vc_descriptor_move_high(descriptor);
    close(descriptor);
    return -1;
}

int vc_descriptor_open(const struct vc_usage_file *file)
{
    if (vc_descriptor_is_usage(file, file->descriptor)) {
        char link[32]; /* leads to the file under whatever name it has now */
        snprintf(link, sizeof link, "/proc/self/fd/%d", file->descriptor);
        int descriptor = open_checked(file, link);
        if (descriptor >= 0)
            return descriptor;
    }
    return open_checked(file, file->path);
}

void *vc_descriptor_pin(int descriptor)
{
    size_t bytes = (size_t)sysconf(_SC_PAGESIZE);
    void *page = mmap(NULL, bytes, PROT_NONE, MAP_SHARED, descriptor, 0);
    if (page == MAP_FAILED)
        return NULL;
    if (madvise(page, bytes, MADV_DONTFORK) == 0)
        return page;
    munmap(page, bytes);
    return NULL;
}

void vc_descriptor_unpin(void *page)
{
    if (page)
        munmap(page, (size_t)sysconf(_SC_PAGESIZE));
}

bool vc_descriptor_pins(int descriptor)
{
    struct statfs filesystem;
    return fstatfs(descriptor, &filesystem) == 0 && filesystem.f_type != VC__OVERLAYFS_MAGIC;
}
