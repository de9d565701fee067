/* The end of every allocation that the share does not allow: it is counted, and the first one in a process is explained. */
#ifndef VC_REFUSAL_H
#define VC_REFUSAL_H

#include "cuda/driver/cards.h"

/* Count one refusal on each of the cards, and say why, once in a process. `bytes`: what was asked for, 0 if nobody can tell. A caller
 * that may trim and try again calls it when it gives up. Any thread, no lock held. */
void vc_refused(vc_cards cards, uint64_t bytes);

#endif
