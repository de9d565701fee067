/* Finding and reading the regions of this container; a claim's container has several. */
#include "mine/look.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "base/clock.h"

static int by_name(const struct dirent **a, const struct dirent **b)
{
    return strcmp((*a)->d_name, (*b)->d_name);
}

static int is_visible(const struct dirent *entry)
{
    return entry->d_name[0] != '.';
}

static int add(const char *folder, struct vc_mine *mine, int count)
{
    char limits[VC_MINE_PATH + 16];
    struct stat status;
    snprintf(limits, sizeof limits, "%s/limits", folder);
    if (count == VC_MINE_MOST || lstat(limits, &status) != 0)
        return count;
    memset(&mine[count], 0, sizeof mine[count]);
    snprintf(mine[count].folder, sizeof mine[count].folder, "%s", folder);
    return count + 1;
}

int vc_mine_find(const char *directory, struct vc_mine *mine)
{
    char claims[VC_MINE_PATH], folder[2 * VC_MINE_PATH];
    struct dirent **names = NULL;
    int count = add(directory, mine, 0);
    snprintf(claims, sizeof claims, "%s/claims", directory);
    int found = scandir(claims, &names, is_visible, by_name);
    for (int at = 0; at < found; at++) {
        if (snprintf(folder, sizeof folder, "%s/%s", claims, names[at]->d_name) < VC_MINE_PATH)
            count = add(folder, mine, count);
        free(names[at]);
    }
    free(names);
    return count;
}

void vc_mine_look(struct vc_mine *mine)
{
    char limits[VC_MINE_PATH + 16], usage[VC_MINE_PATH + 16];
    uint64_t now_ns = vc_now_ns();
    mine->compared = mine->readable;
    mine->passed_ns = now_ns - mine->looked_ns;
    mine->looked_ns = now_ns;
    memcpy(mine->before, mine->now.cards, sizeof mine->before);
    snprintf(limits, sizeof limits, "%s/limits", mine->folder);
    snprintf(usage, sizeof usage, "%s/usage", mine->folder);
    mine->readable = vc_limits_copy(limits, &mine->limits, &mine->why) == 0 && vc_report_read(limits, usage, &mine->now, &mine->why) == 0;
    if (!mine->readable)
        memset(&mine->now, 0, sizeof mine->now);
}

static double part(const struct vc_mine *mine, uint64_t before, uint64_t now)
{
    if (!mine->compared || mine->passed_ns == 0)
        return -1.0;
    return now > before ? 100.0 * (double)(now - before) / (double)mine->passed_ns : 0.0;
}

double vc_mine_cores(const struct vc_mine *mine, uint32_t card)
{
    return part(mine, mine->before[card].gpu_ns, mine->now.cards[card].gpu_ns);
}

double vc_mine_waited(const struct vc_mine *mine, uint32_t card)
{
    return part(mine, mine->before[card].waited_ns, mine->now.cards[card].waited_ns);
}
