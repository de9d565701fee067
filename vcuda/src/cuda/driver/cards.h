/* Which card of the share a CUDA device or the current context is. */
#ifndef VC_CARDS_H
#define VC_CARDS_H

#include "cuda/driver/hooks.h"

#define VC_CARD_NONE (-1)    /* the device is not part of the share */
#define VC_CARD_UNKNOWN (-2) /* no current context, or an invalid device: the driver's own error will say so */
#define VC_CARD_LOST (-3)    /* limits that can't be read may name it: it has neither memory nor work */

/* A set of cards of the process: bit i is its card i. */
typedef uint32_t vc_cards;
#define VC_LOST_CARDS ((vc_cards)1 << VC_MAX_PROCESS_CARDS) /* and all that are lost: nothing is ever reserved on a set with them */

/* For each card of a set, by its number. */
#define VC_EACH_CARD(card, cards) for (uint32_t card = 0; ((cards) & ~VC_LOST_CARDS) >> card; card++) \
    if ((cards) >> card & 1)

/* Where memory may lie that lies on no certain card. */
static inline vc_cards vc_cards_all(void)
{
    const struct vc_regions *regions = vc_regions_get();
    return ((vc_cards)1 << regions->card_count) - 1 + (regions->lost ? VC_LOST_CARDS : 0);
}

/* The region that all cards of a set are of, and the set by its numbers; NULL: they are of several, or there are none. */
struct vc_region *vc_cards_region(vc_cards cards, uint32_t *within);

/* Card of a device, by its UUID; asked of the driver once per device. Pre: vc_real is loaded. */
int vc_card_of_device(CUdevice device);

/* Where memory lies that the driver has put on a device, or at an address: none that can be had of a card that is lost or not part of the
 * share; all, where the driver can't say. */
vc_cards vc_cards_of_device(CUdevice device);
vc_cards vc_cards_at(CUdeviceptr pointer);

/* Whether the tenant may see this device: not if it is another one's card. A card that is lost is seen. */
bool vc_card_is_visible(CUdevice device);

/* Card and handle of the calling thread's current context; *context may be NULL to ask for the card only. Remembered per
 * thread. */
int vc_card_of_current(CUcontext *context);

/* … of a stream (an explicit handle), whichever context is current; where the driver can't say whose it is, of the current one or the only one. */
int vc_card_of_stream(CUstream stream, CUcontext *context);

bool vc_context_is_current(CUcontext context);

/* Make the context current, unless it is; true: it was not, and vc_context_leave has to be called. */
bool vc_context_enter(CUcontext context);
void vc_context_leave(bool entered);

/* The process's only context, with its card, or NULL: none, or there were several. What it asks for while none is current the driver
 * refuses. Spares a call of the driver for each allocation. */
CUcontext vc_only_context(int *card);

/* A context came into being. */
void vc_context_made(CUcontext context, CUdevice device);
bool vc_several_contexts(void); /* ever */

/* The device of a stream (an explicit handle) and its context. False: the driver will say what is
 * wrong with the stream. */
bool vc_stream_device(CUstream stream, CUdevice *device, CUcontext *context);

/* Streams that are another one in each context. */
static inline bool vc_stream_of_context(CUstream stream)
{
    return stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

/* An explicit handle for the default stream that a call means. */
static inline CUstream vc_stream_handle(CUstream stream, bool per_thread)
{
    return stream ? stream : per_thread ? CU_STREAM_PER_THREAD : CU_STREAM_LEGACY;
}

/* Whether work on a stream (an explicit handle) is recorded into a graph. The legacy stream never is; and asking about it while another
 * one captures would break that capture. */
bool vc_stream_captures(CUstream stream);

/* A context was destroyed: its handle may come back for another device. */
void vc_cards_forget_contexts(void);

#endif
