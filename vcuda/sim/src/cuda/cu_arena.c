/* Where device memory lies: an arena of 2 MiB pages, each one part of a large block or a slab of small ones. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "cu_sharing.h"

enum { CLASSES = 12, DRAWERS = 6, SMALLEST_SHIFT = 9, OUTSIDE_GROWTH = 64 };

typedef struct slab {
    struct slab *next, *previous; /* among those of its kind with a free place */
    size_t page;
    int class, device, charge, drawer, used;
    int hint; /* where to look for a free place first */
    cu_block *blocks[];
} slab;

typedef struct {
    cu_block *large;
    slab *small;
    uint64_t shared; /* the name by which other processes map the block's pages or the slab's; 0: none does */
} page_entry;

static uintptr_t base;
static size_t page_count, pages_used, cursor;
static page_entry *pages;
static slab *roomy[SIM_MAX_CARDS][2][DRAWERS][CLASSES];
static cu_block **outside; /* sorted by address */
static size_t outside_count, outside_room;
static unsigned long long next_id;

static int reserve_arena(void)
{
    for (uint64_t size = 1ull << 41; size >= 1ull << 33; size >>= 1) {
        void *where = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (where == MAP_FAILED)
            continue;
        madvise(where, size, MADV_DONTDUMP);
        madvise(where, size, MADV_NOHUGEPAGE); /* a touched byte costs a page, not 2 MiB */
        base = ((uintptr_t)where + CU_CHUNK - 1) & ~(CU_CHUNK - 1);
        page_count = ((uintptr_t)where + size - base) / CU_CHUNK;
        pages = calloc(page_count, sizeof *pages);
        return pages ? 0 : -1;
    }
    return -1;
}

/* The first of `count` free pages in a row, from the cursor on: addresses come back as late as possible. */
static size_t find_pages(size_t count)
{
    size_t run = 0;
    for (size_t looked = 0, at = cursor; looked < page_count + count; looked++, at++) {
        if (at >= page_count) {
            at = 0;
            run = 0;
        }
        run = pages[at].large || pages[at].small ? 0 : run + 1;
        if (run == count) {
            cursor = at + 1;
            if (at + 1 > pages_used)
                pages_used = at + 1;
            return at + 1 - count;
        }
    }
    return page_count;
}

static int class_of(size_t bytes)
{
    int class = 0;
    while (((size_t)1 << (SMALLEST_SHIFT + class)) < bytes)
        class++;
    return class;
}

static void link_slab(slab *one)
{
    slab **head = &roomy[one->device][one->charge][one->drawer][one->class];
    one->previous = NULL;
    one->next = *head;
    if (*head)
        (*head)->previous = one;
    *head = one;
}

static void unlink_slab(slab *one)
{
    if (one->previous)
        one->previous->next = one->next;
    else
        roomy[one->device][one->charge][one->drawer][one->class] = one->next;
    if (one->next)
        one->next->previous = one->previous;
}

static slab *new_slab(int device, int charge, int drawer, int class, CUresult *why)
{
    const int places = (int)(CU_CHUNK >> (SMALLEST_SHIFT + class));
    slab *made = calloc(1, sizeof *made + (size_t)places * sizeof *made->blocks);
    const size_t page = made ? find_pages(1) : page_count;
    *why = page == page_count ? CUDA_ERROR_OUT_OF_MEMORY : charge ? cu_charge(device, CU_CHUNK) : CUDA_SUCCESS;
    if (*why) {
        free(made);
        return NULL;
    }
    made->page = page;
    made->class = class;
    made->device = device;
    made->charge = charge;
    made->drawer = drawer;
    pages[page].small = made;
    link_slab(made);
    return made;
}

static CUresult place_small(cu_block *block, int charge, int drawer)
{
    const int class = class_of(block->bytes);
    const int places = (int)(CU_CHUNK >> (SMALLEST_SHIFT + class));
    CUresult why;
    slab *home = roomy[block->device][charge][drawer][class];
    if (!home && !(home = new_slab(block->device, charge, drawer, class, &why)))
        return why;
    int place = home->hint;
    while (home->blocks[place])
        place = place + 1 < places ? place + 1 : 0;
    home->blocks[place] = block;
    home->hint = place + 1 < places ? place + 1 : 0;
    if (++home->used == places)
        unlink_slab(home);
    block->start = base + home->page * CU_CHUNK + ((uintptr_t)place << (SMALLEST_SHIFT + class));
    return CUDA_SUCCESS;
}

static CUresult place_large(cu_block *block, int charge)
{
    const size_t count = block->bytes / CU_CHUNK + (block->bytes % CU_CHUNK != 0); /* no sum: it may be all that there is */
    if (count > page_count)
        return CUDA_ERROR_OUT_OF_MEMORY;
    const int managed = block->kind == CU_BLOCK_MANAGED;
    const CUresult bad = charge ? cu_charge_as(block->device, count * CU_CHUNK, managed) : CUDA_SUCCESS;
    if (bad)
        return bad;
    const size_t first = find_pages(count);
    if (first == page_count) {
        if (charge)
            cu_discharge_as(block->device, count * CU_CHUNK, managed);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (size_t i = 0; i < count; i++)
        pages[first + i].large = block;
    block->charged = charge ? count * CU_CHUNK : 0;
    block->start = base + first * CU_CHUNK;
    return CUDA_SUCCESS;
}

CUresult cu_place(CUcontext ctx, int device, size_t bytes, cu_block_kind kind, int charge, cu_block **block)
{
    return cu_place_in(ctx, device, bytes, kind, charge, 0, block);
}

CUresult cu_place_in(CUcontext ctx, int device, size_t bytes, cu_block_kind kind, int charge, int drawer, cu_block **block)
{
    if (!pages && reserve_arena())
        return CUDA_ERROR_OUT_OF_MEMORY;
    cu_block *made = calloc(1, sizeof *made);
    if (!made)
        return CUDA_ERROR_OUT_OF_MEMORY;
    made->bytes = bytes;
    made->kind = kind;
    made->device = device;
    made->ctx = ctx;
    made->id = ++next_id;
    const CUresult bad = bytes <= CU_CHUNK / 2 ? place_small(made, charge, drawer) : place_large(made, charge);
    if (bad) {
        free(made);
        return bad;
    }
    *block = made;
    return CUDA_SUCCESS;
}

uint64_t *cu_arena_part(const cu_block *block, uintptr_t *start, size_t *bytes)
{
    const size_t first = (block->start - base) / CU_CHUNK;
    *start = base + first * CU_CHUNK;
    *bytes = pages[first].small ? CU_CHUNK : (block->bytes + CU_CHUNK - 1) / CU_CHUNK * CU_CHUNK;
    return &pages[first].shared;
}

void cu_arena_shared(const cu_block *block, uint64_t shared)
{
    uintptr_t start;
    size_t bytes;
    uint64_t *first = cu_arena_part(block, &start, &bytes);
    page_entry *page = &pages[(start - base) / CU_CHUNK];
    (void)first;
    for (size_t i = 0; i < bytes / CU_CHUNK; i++)
        page[i].shared = shared;
}

int cu_arena_pays(const cu_block *block)
{
    const slab *small = pages[(block->start - base) / CU_CHUNK].small;
    return small ? small->charge : block->charged > 0;
}

int cu_arena_is_shared(uintptr_t address)
{
    return pages && address >= base && address < base + page_count * CU_CHUNK && pages[(address - base) / CU_CHUNK].shared;
}

/* The pages read as zero again, and the card gets back what it was paid for here: at once, or when the last process that maps
 * them lets go. What a pool pays for (`charged` 0) is the pool's to give back. */
static void end_pages(size_t first, size_t count, int device, uint64_t charged, int managed)
{
    unsigned char *start = (unsigned char *)(base + first * CU_CHUNK);
    const uint64_t shared = pages[first].shared;
    const int card = cu_process.devices[device].card;
    if (!shared) {
        madvise(start, count * CU_CHUNK, MADV_DONTNEED);
        if (charged)
            cu_discharge_as(device, charged, managed);
        return;
    }
    for (size_t i = 0; i < count; i++)
        pages[first + i].shared = 0;
    mmap(start, count * CU_CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    madvise(start, count * CU_CHUNK, MADV_NOHUGEPAGE);
    cu_share_unlink(shared);
    sim_card_lock(cu_process.state, card);
    if (charged)
        sim_object_leave(cu_process.state, sim_card_at(cu_process.state, card), shared);
    else
        sim_object_forget(sim_card_at(cu_process.state, card), shared);
    sim_card_unlock(cu_process.state, card);
}

static void unplace_small(cu_block *block, slab *home)
{
    const int places = (int)(CU_CHUNK >> (SMALLEST_SHIFT + home->class));
    home->hint = (int)((block->start - base - home->page * CU_CHUNK) >> (SMALLEST_SHIFT + home->class));
    home->blocks[home->hint] = NULL;
    if (home->used-- == places)
        link_slab(home);
    if (home->used)
        return;
    unlink_slab(home);
    pages[home->page].small = NULL;
    end_pages(home->page, 1, home->device, home->charge ? CU_CHUNK : 0, 0);
    free(home);
}

void cu_unplace(cu_block *block)
{
    const size_t first = (block->start - base) / CU_CHUNK;
    if (pages[first].small) {
        unplace_small(block, pages[first].small);
    } else {
        const size_t count = (block->bytes + CU_CHUNK - 1) / CU_CHUNK;
        for (size_t i = 0; i < count; i++)
            pages[first + i].large = NULL;
        end_pages(first, count, block->device, block->charged, block->kind == CU_BLOCK_MANAGED);
    }
    free(block);
}

static size_t outside_after(uintptr_t address)
{
    size_t low = 0, high = outside_count;
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (outside[middle]->start <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

cu_block *cu_find(uintptr_t address)
{
    if (pages && address >= base && address < base + page_count * CU_CHUNK) {
        const page_entry *page = &pages[(address - base) / CU_CHUNK];
        cu_block *block = page->large;
        if (page->small)
            block = page->small->blocks[((address - base) % CU_CHUNK) >> (SMALLEST_SHIFT + page->small->class)];
        return block && !block->freed && address < block->start + block->bytes ? block : NULL;
    }
    const size_t after = outside_after(address);
    cu_block *block = after ? outside[after - 1] : NULL;
    return block && !block->freed && address < block->start + block->bytes ? block : NULL;
}

int cu_outside_add(const cu_block *block)
{
    if (outside_count == outside_room) {
        const size_t room = outside_room + outside_room / 2 + OUTSIDE_GROWTH;
        cu_block **more = realloc(outside, room * sizeof *more);
        if (!more)
            return -1;
        outside = more;
        outside_room = room;
    }
    cu_block *made = malloc(sizeof *made);
    if (!made)
        return -1;
    *made = *block;
    made->id = ++next_id;
    const size_t at = outside_after(block->start);
    memmove(outside + at + 1, outside + at, (outside_count - at) * sizeof *outside);
    outside[at] = made;
    outside_count++;
    return 0;
}

void cu_outside_remove(cu_block *block)
{
    const size_t at = outside_after(block->start) - 1;
    memmove(outside + at, outside + at + 1, (outside_count - at - 1) * sizeof *outside);
    outside_count--;
    free(block);
}

cu_block *cu_outside_find(CUmemGenericAllocationHandle handle, CUcontext ctx, unsigned flags)
{
    for (size_t i = 0; i < outside_count; i++)
        if (outside[i]->kind == CU_BLOCK_IMPORTED && outside[i]->handle == handle && outside[i]->ctx == ctx &&
            outside[i]->flags == flags)
            return outside[i];
    return NULL;
}

void cu_each_block(CUcontext ctx, void (*visit)(cu_block *block))
{
    for (size_t p = 0; p < pages_used; p++) {
        cu_block *large = pages[p].large;
        if (large && large->ctx == ctx && large->start == base + p * CU_CHUNK)
            visit(large);
        slab *small = pages[p].small;
        const int places = small ? (int)(CU_CHUNK >> (SMALLEST_SHIFT + small->class)) : 0;
        for (int i = 0; i < places && pages[p].small == small; i++)
            if (small->blocks[i] && small->blocks[i]->ctx == ctx)
                visit(small->blocks[i]);
    }
    for (size_t i = outside_count; i-- > 0;)
        if (i < outside_count && outside[i]->ctx == ctx)
            visit(outside[i]);
}
