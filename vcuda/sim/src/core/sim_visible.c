/* Which cards this process may use: decided by the device nodes it can open, as on a real machine. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#include "sim_state.h"

const char *sim_device_folder(const sim_state *state)
{
    static _Thread_local char folder[3136];
    struct stat status;
    const char *named = secure_getenv("VCUDA_SIM_DEV");
    if (named && *named)
        return named;
    snprintf(folder, sizeof folder, "%s/root/dev", state->root);
    return stat(folder, &status) == 0 && S_ISDIR(status.st_mode) ? folder : "/dev";
}

int sim_node_usable(const sim_state *state, const char *name)
{
    char path[3200];
    snprintf(path, sizeof path, "%s/%s", sim_device_folder(state), name);
    const int fd = open(path, O_RDWR | O_CLOEXEC | O_NONBLOCK);
    if (fd >= 0)
        close(fd);
    /* A character device without a driver behind it can't be opened, but the permission checks have been passed. */
    return fd >= 0 || errno == ENXIO || errno == ENODEV;
}

int sim_card_visible(const sim_state *state, int index)
{
    const sim_card_config *card = &state->config.cards[index];
    char name[64];
    snprintf(name, sizeof name, "nvidia%d", card->minor);
    if (!sim_node_usable(state, name))
        return 0;
    for (int i = 0; i < card->cap_count; i++) {
        snprintf(name, sizeof name, "nvidia-caps/nvidia-cap%d", card->caps[i]);
        if (!sim_node_usable(state, name))
            return 0;
    }
    return 1;
}
