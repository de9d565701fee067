/* The shares of this container, and what was used of them between two looks. */
#ifndef VC_MINE_LOOK_H
#define VC_MINE_LOOK_H

#include <stdbool.h>

#include "report/report.h"

enum { VC_MINE_MOST = 31 /* as many as a process can use */, VC_MINE_PATH = 512 };

struct vc_mine {
    char folder[VC_MINE_PATH];
    bool readable; /* false: `why` says what is wrong, the rest is empty */
    struct vc_error why;
    struct vc_limits limits;
    struct vc_usage_report now;
    bool compared; /* there was an earlier look */
    uint64_t passed_ns;
    struct vc_card_report before[16];
    uint64_t looked_ns;
};

/* Find the shares in `directory` and in each folder of its `claims`; returns how many. */
int vc_mine_find(const char *directory, struct vc_mine *mine);

/* Read a share anew; what was read before becomes the earlier look. */
void vc_mine_look(struct vc_mine *mine);

/* GPU time between the looks in hundredths of the card, and time waited in hundredths of that between them; negative: not known. */
double vc_mine_cores(const struct vc_mine *mine, uint32_t card);
double vc_mine_waited(const struct vc_mine *mine, uint32_t card);

#endif
