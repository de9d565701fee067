/* Very many short-lived processes, one after the other and a few at a time: no slot, lock, descriptor or byte stays behind. */
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>

#include "check.h"
#include "region/witness.h"

#define LIMIT 1000u
#define AT_ONCE 8
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__) || defined(VC_COVERAGE)
#define PROCESSES 1000
#else
#define PROCESSES 3000 /* each slot 20 times */
#endif

static char *folder;

static int descriptors(void)
{
    int count = 0;
    DIR *list = opendir("/proc/self/fd");
    while (list && readdir(list))
        count++;
    if (list)
        closedir(list);
    return count;
}

static void live_shortly(int number)
{
    struct vc_region *region = region_at(folder);
    uint64_t bytes = 1 + (uint64_t)(number % (LIMIT / AT_ONCE));
    CHECK(vc_quota_reserve(region, 0, bytes)); /* all that run at once fit */
    if (number % 4 == 0)
        kill(getpid(), SIGKILL); /* before it told */
    vc_quota_commit(region, 0, bytes, VC_QUOTA_PLAIN);
    if (number % 4 == 1)
        kill(getpid(), SIGKILL);
    if (number % 4 == 2)
        vc_quota_release(region, 0, bytes, VC_QUOTA_PLAIN);
    if (number % 256 == 3)
        execl("/bin/true", "true", (char *)NULL);
    _exit(broken != 0);
}

int main(void)
{
    folder = make_region(LIMIT);
    struct vc_region *region = region_at(folder);
    struct stat before, after;
    fstat(region->file.descriptor, &before);
    CHECK(vc_quota_reserve(region, 0, 1)); /* opens what it needs */
    vc_quota_rollback(region, 0, 1);
    int open_before = descriptors();
    for (int number = 0, running = 0; number < PROCESSES || running > 0;) {
        if (number < PROCESSES && running < AT_ONCE) {
            if (fork() == 0)
                live_shortly(number);
            number++;
            running++;
            continue;
        }
        int status;
        CHECK(wait(&status) > 0);
        CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0) || (WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL));
        running--;
    }
    CHECK(vc_region_slots(region) <= 2 * AT_ONCE); /* the slots are used again */
    CHECK(vc_quota_reserve(region, 0, LIMIT));
    vc_quota_rollback(region, 0, LIMIT);
    vc_slots_reap(region);
    CHECK(vc_quota_used(region, 0) == 0);
    CHECK(region->usage->slot_shortage == 0 && region->usage->cards[0].memory_peak_bytes <= LIMIT);
    fstat(region->file.descriptor, &after);
    CHECK(before.st_size == after.st_size && before.st_blocks == after.st_blocks);
    CHECK(descriptors() == open_before);
    /* One lock is left, our own: asked through another description, as it is in nobody's own way. */
    int other = open(region->file.path, O_RDONLY | O_CLOEXEC);
    struct flock lock = {.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)VC_USAGE_FILE_BYTES + 1, .l_len = VC_MAX_SLOTS};
    CHECK(fcntl(other, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK);
    lock = (struct flock){.l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = (off_t)VC_USAGE_FILE_BYTES, .l_len = 1};
    CHECK(fcntl(other, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_WRLCK);
    for (uint32_t slot = 1; slot < VC_MAX_SLOTS; slot++)
        CHECK(vc_witness_read(other, slot, 0) == 0);
    close(other);
    remove_region(folder);
    return broken != 0;
}
