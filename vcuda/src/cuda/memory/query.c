/* What the tenant sees of the card's memory: its limit as the total, what is left of it as free. */
#include "cuda/memory/account.h"
#include "region/overhead.h"
#include "region/slot.h"

/* The share's total on a card; `really` if the card is not limited. */
static uint64_t share_total(int number, uint64_t really)
{
    if (number < 0)
        return really;
    const struct vc_card *card = vc_card((uint32_t)number);
    uint64_t limit = vc_quota_limit(card->region, card->index);
    return limit < really || vc_quota_oversells(card->region, card->index) ? limit : really;
}

/* Narrow the driver's answer to the share. Never more free than there really is, except in an oversold share, where the
 * rest lies on the host. */
static void narrow(uint64_t *free_bytes, uint64_t *total_bytes)
{
    int number = vc_card_of_current(NULL);
    if (number == VC_CARD_NONE || number == VC_CARD_LOST)
        *free_bytes = 0; /* every allocation on it is refused */
    if (number < 0)
        return;
    const struct vc_card *card = vc_card((uint32_t)number);
    vc_account_settle();
    uint64_t limit = vc_quota_limit(card->region, card->index);
    if (limit == UINT64_MAX)
        return;
    vc_slots_reap(card->region); /* what the dead held is free */
    vc_overhead_refresh(card->region, card->index, false);
    uint64_t used = vc_quota_used(card->region, card->index);
    uint64_t left = limit > used ? limit - used : 0;
    *free_bytes = left < *free_bytes || vc_quota_oversells(card->region, card->index) ? left : *free_bytes;
    *total_bytes = share_total(number, *total_bytes);
}

CUresult vc_hook_cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes)
{
    size_t really_free, really_total;
    CUresult result = vc_real.cuMemGetInfo_v2(free_bytes ? &really_free : NULL, total_bytes ? &really_total : NULL);
    if (result != CUDA_SUCCESS || !free_bytes || !total_bytes) {
        /* Should a driver answer one figure only, it is the share's all the same. */
        if (result != CUDA_SUCCESS || vc_real.cuMemGetInfo_v2(&really_free, &really_total) != CUDA_SUCCESS)
            return result;
    }
    uint64_t free_now = really_free, total = really_total;
    narrow(&free_now, &total);
    if (free_bytes)
        *free_bytes = free_now;
    if (total_bytes)
        *total_bytes = total;
    return result;
}

CUresult vc_hook_cuMemGetInfo(unsigned int *free_bytes, unsigned int *total_bytes)
{
    unsigned int really_free, really_total;
    CUresult result = vc_real.cuMemGetInfo(free_bytes ? &really_free : NULL, total_bytes ? &really_total : NULL);
    if (result != CUDA_SUCCESS || !free_bytes || !total_bytes) {
        if (result != CUDA_SUCCESS || vc_real.cuMemGetInfo(&really_free, &really_total) != CUDA_SUCCESS)
            return result;
    }
    uint64_t free_now = really_free, total = really_total;
    narrow(&free_now, &total);
    if (free_bytes)
        *free_bytes = (unsigned int)free_now; /* never more than the driver's own 32-bit answer */
    if (total_bytes)
        *total_bytes = (unsigned int)total;
    return result;
}

CUresult vc_hook_cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    CUresult result = vc_real.cuDeviceTotalMem_v2(bytes, device);
    if (result == CUDA_SUCCESS)
        *bytes = share_total(vc_card_of_device(device), *bytes);
    return result;
}

CUresult vc_hook_cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    CUresult result = vc_real.cuDeviceTotalMem(bytes, device);
    if (result == CUDA_SUCCESS)
        *bytes = (unsigned int)share_total(vc_card_of_device(device), *bytes);
    return result;
}
