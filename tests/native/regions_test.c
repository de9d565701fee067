/* Several regions in one process: in the order of their names, each card once, slots and quotas of their own, whatever is wrong with another. */
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>

#include "check.h"

#define LIMIT 1000u
#define MANY 10
#define TOO_MANY (VC_MAX_PROCESS_CARDS + 1)

static char *base;

static void path_of(char *path, const char *name, const char *file)
{
    snprintf(path, 300, "%s/claims/%s%s%s", base, name, *file ? "/" : "", file);
}

/* A claim's region, with cards "GPU-<letter>". */
static void fill_claim(const char *name, const char *cards, uint64_t memory_bytes)
{
    char limits[300], usage[300];
    struct vc_card_limit limit[VC_MAX_CARDS] = {0};
    struct vc_error error;
    uint32_t count = 0;
    path_of(limits, name, "limits");
    path_of(usage, name, "usage");
    for (; cards[count]; count++) {
        limit[count] = (struct vc_card_limit){.memory_bytes = memory_bytes, .cores = 50, .core_limit = 50};
        snprintf(limit[count].uuid, sizeof limit[count].uuid, "GPU-%c", cards[count]);
    }
    CHECK(vc_files_create(limits, usage, limit, count, &error) == 0);
}

static void make_claim(const char *name, const char *cards, uint64_t memory_bytes)
{
    char folder[300];
    path_of(folder, name, "");
    CHECK(mkdir(folder, 0755) == 0);
    fill_claim(name, cards, memory_bytes);
}

static void remove_claim(const char *name)
{
    char path[300];
    for (const char *const *file = (const char *const[]){"limits", "usage", "", NULL}; *file; file++) {
        path_of(path, name, *file);
        remove(path);
    }
}

/* In the order of their numbers. */
static const char *name_of(int number)
{
    static char name[16];
    snprintf(name, sizeof name, "n%02d", number);
    return name;
}

static void make_one_of_many(int number)
{
    make_claim(name_of(number), (char[]){(char)('a' + number), '\0'}, LIMIT);
}

static int open_files(void)
{
    int count = 0;
    DIR *list = opendir("/proc/self/fd");
    while (list && readdir(list))
        count++;
    if (list)
        closedir(list);
    return count;
}

/* In a process of its own, because a process looks for its regions once. */
static void in_a_process(void (*body)(void))
{
    pid_t child = fork();
    if (child == 0) {
        body();
        _exit(broken != 0);
    }
    join(child);
}

static bool takes(char card, uint64_t bytes)
{
    char uuid[] = {'G', 'P', 'U', '-', card, '\0'};
    struct vc_regions *regions = vc_regions_get_at(base);
    int number = vc_regions_card(regions, uuid);
    return number >= 0 && vc_quota_reserve(vc_card((uint32_t)number)->region, vc_card((uint32_t)number)->index, bytes);
}

static void many_in_the_order_of_their_names(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(regions->any && !regions->lost && regions->count == MANY && regions->card_count == MANY);
    for (uint32_t number = 0; number < MANY; number++) {
        CHECK(vc_card(number)->limit->uuid[4] == (char)('a' + number) && vc_card(number)->region == &regions->all[number]);
        CHECK(takes((char)('a' + number), LIMIT) && !takes((char)('a' + number), 1));
    }
}

/* The last one's limits are as if they could not be read. */
static void more_than_a_process_can_have(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(regions->lost && regions->count == VC_MAX_PROCESS_CARDS && regions->card_count == VC_MAX_PROCESS_CARDS);
    CHECK(takes('a', LIMIT) && takes('a' + VC_MAX_PROCESS_CARDS - 1, LIMIT) && !takes('a' + VC_MAX_PROCESS_CARDS, 1));
}

static void each_card_once(void)
{
    int before = open_files();
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(regions->count == 2 && regions->card_count == 3);
    CHECK(open_files() == before + 2); /* of one whose cards all are another's nothing is kept */
    CHECK(takes('a', LIMIT) && takes('b', LIMIT) && !takes('b', 1)); /* the first claim's */
    CHECK(takes('c', 2 * LIMIT) && !takes('c', 1));
    CHECK(regions->all[1].slot && regions->all[1].usage->slots[0].cards[1].reserved_bytes == 2 * LIMIT);
}

/* The parent has a slot in the first region alone: what it opened of the other goes from its child, what holds its lock stays. */
static void a_forked_child_begins_anew_in_each(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(takes('a', 100));
    int before = open_files();
    pid_t child = fork();
    if (child == 0) {
        CHECK(open_files() == before - 1);
        CHECK(takes('a', 100) && takes('c', 100));
        CHECK(regions->all[0].slot - regions->all[0].usage->slots == 1 && regions->all[1].slot == regions->all[1].usage->slots);
        CHECK(regions->all[0].slot->pid == getpid() && regions->all[1].slot->pid == getpid());
        _exit(broken != 0);
    }
    join(child);
    CHECK(regions->all[0].slot == regions->all[0].usage->slots && regions->all[0].slot->pid == getpid() && !regions->all[1].slot);
    CHECK(reaped(&regions->all[0], 1) && takes('a', LIMIT - 100) && takes('c', 2 * LIMIT));
}

static void the_dead_and_their_slots_are_of_each_region_alone(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    int ready[2], go[2];
    char byte = 0;
    CHECK(pipe(ready) == 0 && pipe(go) == 0);
    CHECK(takes('a', 100) && takes('c', 100));
    for (int process = 0; process < VC_MAX_SLOTS - 1; process++) {
        if (fork() != 0)
            continue;
        close(go[1]); /* or nobody would see its end */
        CHECK(vc_region_slot(&vc_regions_get_at(base)->all[1]) != NULL);
        CHECK(vc_regions_get_at(base)->all[0].slot == NULL);
        CHECK(write(ready[1], &byte, 1) == 1);
        CHECK(read(go[0], &byte, 1) == 0);
        _exit(broken != 0);
    }
    for (int process = 0; process < VC_MAX_SLOTS - 1; process++)
        CHECK(read(ready[0], &byte, 1) == 1);
    pid_t last = fork(); /* the 129th of that region */
    if (last == 0) {
        close(go[1]);
        CHECK(!takes('c', 1) && takes('a', 100));
        _exit(broken != 0);
    }
    join(last);
    CHECK(regions->all[1].usage->slot_shortage > 0 && regions->all[0].usage->slot_shortage == 0);
    CHECK(takes('c', 100)); /* who has a slot keeps it */
    close(go[1]);
    for (int process = 0; process < VC_MAX_SLOTS - 1; process++) {
        int status;
        CHECK(wait(&status) > 0 && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    CHECK(reaped(&regions->all[0], 1) && reaped(&regions->all[1], VC_MAX_SLOTS - 1));
}

static void what_can_not_be_read_or_counted_refuses_its_own_cards(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(regions->any && regions->lost && regions->count == 2);
    CHECK(!takes('a', 1));                /* its limits can't be read */
    CHECK(!takes('c', 1));                /* it can't be counted */
    CHECK(takes('d', LIMIT) && !takes('d', 1));
    CHECK(vc_regions_only_limit() == NULL);
}

static void cut(const char *name, const char *file)
{
    char path[300];
    path_of(path, name, file);
    CHECK(chmod(path, 0600) == 0 && truncate(path, 100) == 0);
}

static bool put(const char *path, const char *text)
{
    int file = open(path, O_WRONLY | O_CLOEXEC);
    bool done = file >= 0 && write(file, text, strlen(text)) == (ssize_t)strlen(text);
    if (file >= 0)
        close(file);
    return done;
}

/* A user who is not root is in a namespace of his own, where he is. */
static bool become_root(void)
{
    char users[32], groups[32];
    snprintf(users, sizeof users, "0 %d 1", (int)getuid());
    snprintf(groups, sizeof groups, "0 %d 1", (int)getgid());
    return unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0 && put("/proc/self/uid_map", users) && put("/proc/self/setgroups", "deny") &&
           put("/proc/self/gid_map", groups);
}

static bool may_mount(void)
{
    if ((unshare(CLONE_NEWNS) == 0 || become_root()) && mount("none", "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0)
        return true;
    fprintf(stderr, "mounts are not tested: this user may make none (%s)\n", strerror(errno));
    return false;
}

/* A container's root makes folders, and links; only who starts containers mounts. */
static void expect_what_is_mounted(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(regions->count == 1 && regions->card_count == 1);
    CHECK(takes('a', LIMIT) && !takes('a', 1)); /* of z: the others would give more */
}

static void what_is_mounted_comes_first(void)
{
    char path[300];
    path_of(path, "z", "");
    if (!may_mount())
        return;
    CHECK(mount("none", path, "tmpfs", 0, NULL) == 0);
    fill_claim("z", "a", LIMIT);
    expect_what_is_mounted();
}

static void of_the_same_file_system_too(void)
{
    struct statx told;
    char path[300];
    path_of(path, "z", "");
    if (!may_mount())
        return;
    CHECK(mount(path, path, NULL, MS_BIND, NULL) == 0);
    if (syscall(SYS_statx, AT_FDCWD, path, AT_SYMLINK_NOFOLLOW, 0, &told) == 0 && (told.stx_attributes_mask & 0x2000)) /* Linux 5.8 */
        expect_what_is_mounted();
}

static void not_all_folders_are_regions(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(regions->count == 1 && !regions->lost && takes('a', LIMIT));
}

static void what_may_not_be_listed_is_lost(void)
{
    struct vc_regions *regions = vc_regions_get_at(base);
    CHECK(regions->any && regions->lost && regions->count == 0);
}

int main(void)
{
    char folder[300], link[300];
    base = make_region(LIMIT);
    remove_region(base);
    snprintf(folder, sizeof folder, "%s/claims", base);
    CHECK(mkdir(base, 0755) == 0 && mkdir(folder, 0755) == 0);

    for (int number = MANY - 1; number >= 0; number--)
        make_one_of_many(number);
    in_a_process(many_in_the_order_of_their_names);
    for (int number = MANY; number < TOO_MANY; number++)
        make_one_of_many(number);
    in_a_process(more_than_a_process_can_have);
    for (int number = 0; number < TOO_MANY; number++)
        remove_claim(name_of(number));

    make_claim("one", "ab", LIMIT);
    make_claim("two", "bc", 2 * LIMIT);
    make_claim("twofold", "ac", 3 * LIMIT);
    in_a_process(each_card_once);
    in_a_process(a_forked_child_begins_anew_in_each);
    in_a_process(the_dead_and_their_slots_are_of_each_region_alone);
    remove_claim("twofold");
    make_claim("zero", "d", LIMIT);
    cut("one", "limits");
    cut("two", "usage");
    in_a_process(what_can_not_be_read_or_counted_refuses_its_own_cards);
    remove_claim("one");
    remove_claim("two");
    remove_claim("zero");

    make_claim("a", "a", 3 * LIMIT);
    make_claim("z", "a", LIMIT);
    path_of(link, "l", "");
    CHECK(symlink("z", link) == 0);
    in_a_process(of_the_same_file_system_too);
    in_a_process(what_is_mounted_comes_first);
    CHECK(unlink(link) == 0);
    remove_claim("a");
    path_of(link, "empty", "");
    CHECK(mkdir(link, 0755) == 0);
    path_of(link, ".hidden", "");
    CHECK(mkdir(link, 0755) == 0);
    in_a_process(not_all_folders_are_regions);
    remove_claim("z");
    remove_claim("empty");
    remove_claim(".hidden");
    CHECK(rmdir(folder) == 0 && symlink("claims", folder) == 0); /* a loop */
    in_a_process(what_may_not_be_listed_is_lost);
    CHECK(unlink(folder) == 0 && rmdir(base) == 0);
    return broken != 0;
}
