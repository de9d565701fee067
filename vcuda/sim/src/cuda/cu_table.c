/* The table of all exports: look-ups by name, and the refusals of what is not simulated. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cu_table.h"

enum { SIM_LEGACY, SIM_THREAD, FLAGS_THREAD = 2 };

static CUresult refuse(void)
{
    const CUresult bad = cu_initialised();
    return bad ? bad : CUDA_ERROR_NOT_SUPPORTED;
}

/* Only the addresses matter here: the signatures are where the functions are. What the driver exports but we have
 * nothing behind (textures, graphics and the like) each gets a function, so that no two exports share an address. */
#define SIM_API(symbol, base, since, kind) void symbol(void);
#define SIM_REFUSED(symbol, base, since, kind) \
    CU_EXPORT CUresult symbol(void)            \
    {                                          \
        return refuse();                       \
    }
#define SIM_UNLISTED(symbol) SIM_REFUSED(symbol, , , )
#include "cu_api.def"
#undef SIM_API
#undef SIM_REFUSED
#undef SIM_UNLISTED

typedef struct {
    const char *base;
    int since, kind;
    void (*address)(void);
} api;

static const api table[] = {
#define SIM_API(symbol, base, since, kind) {#base, since, kind, (void (*)(void))symbol},
#define SIM_REFUSED(symbol, base, since, kind) SIM_API(symbol, base, since, kind)
#define SIM_UNLISTED(symbol)
#include "cu_api.def"
};

static int compare(const void *key, const void *row)
{
    return strcasecmp(key, ((const api *)row)->base);
}

/* The rows of a base name lie together, ordered without regard to case (the names differ by more than case). */
CUresult cu_look_up(const char *name, void **address, int version, cuuint64_t flags, int *status)
{
    const size_t count = sizeof table / sizeof *table;
    if (!name || !address || flags > (FLAGS_THREAD | 1))
        return CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    *status = CU_LOOKUP_NOT_FOUND;
    const api *row = bsearch(name, table, count, sizeof *table, compare);
    if (!row)
        return CUDA_SUCCESS;
    while (row > table && !strcasecmp(row[-1].base, name))
        row--;
    int kind = SIM_LEGACY;
    const api *first = row;
    for (; (flags & FLAGS_THREAD) && row < table + count && !strcmp(row->base, name); row++)
        kind |= row->kind;
    for (row = first; row < table + count && !strcasecmp(row->base, name); row++) {
        if (strcmp(row->base, name) || row->kind != kind)
            continue;
        if (*status != CU_LOOKUP_FOUND)
            *status = CU_LOOKUP_TOO_NEW;
        if ((unsigned)version >= (unsigned)row->since) { /* rows of a name come in ascending versions */
            memcpy(address, &row->address, sizeof *address);
            *status = CU_LOOKUP_FOUND;
        }
    }
    return CUDA_SUCCESS;
}
