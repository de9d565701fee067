/* Shares as lines of at most 80 columns, and as JSON. */
#ifndef VC_MINE_TEXT_H
#define VC_MINE_TEXT_H

#include "mine/look.h"

/* Each returns the text, for free; NULL without memory. `blocks`: the terminal shows block characters. */
char *vc_text_table(const struct vc_mine *mine, int count, bool blocks);
char *vc_text_details(const struct vc_mine *mine, int count, bool blocks);
char *vc_text_json(const struct vc_mine *mine, int count);

#endif
