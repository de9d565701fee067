/* CUDA devices → cards of the process, by UUID. */
#include "cuda/driver/cards.h"

#include <stdio.h>
#include <string.h>

#include "base/fork.h"
#include "base/log.h"

#define VC__MAX_DEVICES 64
#define VC__NOT_ASKED 0
#define VC__STORED(card) ((card) + 4) /* so that zeroed memory means "not asked" */

static int32_t cards[VC__MAX_DEVICES];
static uint32_t context_epoch = 1;
/* 16 bytes of the static TLS that is scarce in libraries loaded late: read at every launch, without a call. */
static __thread struct {
    CUcontext context;
    int card;
    uint32_t epoch; /* 0: nothing remembered */
} current __attribute__((tls_model("initial-exec")));

/* NVIDIA's text form; the driver gives 16 bytes, and says not whether they name a card or a MIG instance. */
static void format_uuid(const CUuuid *uuid, const char *prefix, char *text, size_t bytes)
{
    const unsigned char *b = (const unsigned char *)uuid->bytes;
    snprintf(text, bytes, "%s-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", prefix, b[0], b[1], b[2],
             b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
}

static int ask_card(CUdevice device)
{
    const struct vc_regions *regions = vc_regions_get();
    CUuuid uuid;
    CUresult result = CUDA_ERROR_NOT_FOUND;
    if (vc_real.cuDeviceGetUuid_v2) /* names MIG instances, the older one their parent */
        result = vc_real.cuDeviceGetUuid_v2(&uuid, device);
    else if (vc_real.cuDeviceGetUuid)
        result = vc_real.cuDeviceGetUuid(&uuid, device);
    if (result != CUDA_SUCCESS)
        return VC_CARD_UNKNOWN;
    char text[VC_UUID_BYTES];
    format_uuid(&uuid, "GPU", text, sizeof text);
    int card = vc_regions_card(regions, text);
    if (card < 0) {
        format_uuid(&uuid, "MIG", text, sizeof text);
        card = vc_regions_card(regions, text);
    }
    return card >= 0 ? card : regions->lost ? VC_CARD_LOST : VC_CARD_NONE;
}

static int find_card(CUdevice device)
{
    if (vc_regions_get()->card_count == 0)
        return VC_CARD_LOST;
    if (device < 0 || device >= VC__MAX_DEVICES)
        return VC_CARD_UNKNOWN;
    int32_t stored = vc_load_relaxed(&cards[device]);
    if (stored == VC__NOT_ASKED) {
        int card = ask_card(device);
        if (card == VC_CARD_UNKNOWN)
            return card; /* not initialised yet, perhaps: ask again next time */
        stored = VC__STORED(card);
        vc_store_relaxed(&cards[device], stored);
    }
    return stored - VC__STORED(0);
}

int vc_card_of_device(CUdevice device)
{
    int card = find_card(device);
    if (VC_UNLIKELY(card == VC_CARD_NONE))
        vc_log_once(VC_NOTICE_UNKNOWN_CARD, "device %d is not a card of this share: its memory is refused", device);
    return card;
}

vc_cards vc_cards_of_device(CUdevice device)
{
    int card = vc_card_of_device(device);
    return card >= 0 ? 1u << card : card == VC_CARD_UNKNOWN ? vc_cards_all() : VC_LOST_CARDS;
}

vc_cards vc_cards_at(CUdeviceptr pointer)
{
    int device;
    if (!vc_real.cuPointerGetAttribute ||
        vc_real.cuPointerGetAttribute(&device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, pointer) != CUDA_SUCCESS)
        return vc_cards_all();
    return vc_cards_of_device(device);
}

bool vc_card_is_visible(CUdevice device)
{
    return find_card(device) != VC_CARD_NONE;
}

struct vc_region *vc_cards_region(vc_cards cards, uint32_t *within)
{
    struct vc_region *region = NULL;
    *within = 0;
    if (cards & VC_LOST_CARDS)
        return NULL;
    VC_EACH_CARD(number, cards) {
        const struct vc_card *card = vc_card(number);
        if (region && card->region != region)
            return NULL;
        region = card->region;
        *within |= 1u << card->index;
    }
    return region;
}

int vc_card_of_current(CUcontext *context)
{
    CUcontext now = NULL;
    if (vc_real.cuCtxGetCurrent(&now) != CUDA_SUCCESS || !now)
        return VC_CARD_UNKNOWN;
    if (context)
        *context = now;
    uint32_t epoch = vc_load_acquire(&context_epoch);
    if (VC_LIKELY(current.context == now && current.epoch == epoch))
        return current.card;
    CUdevice device;
    if (vc_real.cuCtxGetDevice(&device) != CUDA_SUCCESS)
        return VC_CARD_UNKNOWN;
    int card = vc_card_of_device(device);
    if (card != VC_CARD_UNKNOWN) {
        current.context = now;
        current.card = card;
        current.epoch = epoch;
    }
    return card;
}

static CUcontext only;
static int32_t only_card;
static uint32_t contexts_made;

CUcontext vc_only_context(int *card)
{
    CUcontext context = vc_load_acquire(&only);
    *card = vc_load_relaxed(&only_card);
    return context;
}

void vc_context_made(CUcontext context, CUdevice device)
{
    int card = vc_card_of_device(device);
    vc_store_release(&only, NULL); /* before anybody can use this one */
    vc_store_relaxed(&only_card, card);
    if (vc_add(&contexts_made, 1) == 1 && card >= 0)
        vc_store_release(&only, context);
}

bool vc_several_contexts(void)
{
    return vc_load_relaxed(&contexts_made) > 1;
}

bool vc_context_is_current(CUcontext context)
{
    CUcontext now = NULL;
    return vc_real.cuCtxGetCurrent(&now) == CUDA_SUCCESS && now == context;
}

bool vc_context_enter(CUcontext context)
{
    return !vc_context_is_current(context) && vc_real.cuCtxPushCurrent_v2 && vc_real.cuCtxPopCurrent_v2 &&
           vc_real.cuCtxPushCurrent_v2(context) == CUDA_SUCCESS;
}

void vc_context_leave(bool entered)
{
    CUcontext left;
    if (entered)
        vc_real.cuCtxPopCurrent_v2(&left);
}

/* The device of a context that need not be current. */
static bool device_of(CUcontext context, CUdevice *device)
{
    bool entered = vc_context_enter(context);
    bool known = (entered || vc_context_is_current(context)) && vc_real.cuCtxGetDevice(device) == CUDA_SUCCESS;
    vc_context_leave(entered);
    return known;
}

int vc_card_of_stream(CUstream stream, CUcontext *context)
{
    CUdevice device;
    CUcontext own = NULL;
    int card = vc_card_of_current(context);
    bool known = vc_real.cuStreamGetCtx && vc_real.cuStreamGetCtx(stream, &own) == CUDA_SUCCESS && own;
    if (card != VC_CARD_UNKNOWN && (!known || *context == own))
        return card;
    if (!known)
        own = vc_only_context(&card);
    else if (!device_of(own, &device) || (card = vc_card_of_device(device)) == VC_CARD_UNKNOWN)
        own = NULL;
    *context = own;
    return own ? card : VC_CARD_UNKNOWN;
}

bool vc_stream_device(CUstream stream, CUdevice *device, CUcontext *context)
{
    *context = NULL;
    bool of_current = vc_stream_of_context(stream) || !vc_real.cuStreamGetCtx;
    if (of_current)
        return vc_real.cuCtxGetCurrent(context) == CUDA_SUCCESS && *context && vc_real.cuCtxGetDevice(device) == CUDA_SUCCESS;
    return vc_real.cuStreamGetCtx(stream, context) == CUDA_SUCCESS && device_of(*context, device);
}

bool vc_stream_captures(CUstream stream)
{
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    return stream != CU_STREAM_LEGACY && vc_real.cuStreamIsCapturing &&
           vc_real.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS && status != CU_STREAM_CAPTURE_STATUS_NONE;
}

void vc_cards_forget_contexts(void)
{
    vc_store_release(&only, NULL);
    if (vc_add(&context_epoch, 1) == 0)
        vc_add(&context_epoch, 1); /* 0 means: nothing remembered */
}

static void forget(void)
{
    memset(cards, 0, sizeof cards);
    contexts_made = 0;
    vc_cards_forget_contexts();
}
VC_AT_FORK(forget);
