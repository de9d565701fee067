/* The table of all exports: look-ups by name, and the refusals of what is not simulated. */
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "cu_table.h"

enum { FLAGS_THREAD = 2 };

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

static const cu_api table[] = {
#define SIM_API(symbol, base, since, kind) {#base, since, kind, (void (*)(void))symbol},
#define SIM_REFUSED(symbol, base, since, kind) SIM_API(symbol, base, since, kind)
#define SIM_UNLISTED(symbol)
#include "cu_api.def"
};

static int compare(const void *key, const void *row)
{
    return strcasecmp(key, ((const cu_api *)row)->base);
}

/* The rows of a base name lie together, ordered without regard to case (the names differ by more than case). */
static const cu_api *rows_of(const char *name, size_t *count)
{
    const size_t all = sizeof table / sizeof *table;
    const cu_api *row = bsearch(name, table, all, sizeof *table, compare), *end = row;
    *count = 0;
    if (!row)
        return NULL;
    while (row > table && !strcasecmp(row[-1].base, name))
        row--;
    while (end < table + all && !strcasecmp(end->base, name))
        end++;
    *count = (size_t)(end - row);
    return row;
}

static int kinds(const cu_api *rows, size_t count, const char *name)
{
    int found = SIM_LEGACY;
    for (size_t i = 0; i < count; i++)
        if (!strcmp(rows[i].base, name))
            found |= rows[i].kind;
    return found;
}

/* The newest row that `version` may have; rows of a name come in ascending versions. */
static void choose(const cu_api *rows, size_t count, const char *name, int kind, int version, void **address, int *status)
{
    for (size_t i = 0; i < count; i++) {
        if (strcmp(rows[i].base, name) || rows[i].kind != kind)
            continue;
        if (*status != CU_LOOKUP_FOUND)
            *status = CU_LOOKUP_TOO_NEW;
        if ((unsigned)version >= (unsigned)rows[i].since) {
            memcpy(address, &rows[i].address, sizeof *address);
            *status = CU_LOOKUP_FOUND;
        }
    }
}

CUresult cu_look_up(const char *name, void **address, int version, cuuint64_t flags, int *status)
{
    if (!name || !address || flags > (FLAGS_THREAD | 1))
        return CUDA_ERROR_INVALID_VALUE;
    *address = NULL;
    *status = CU_LOOKUP_NOT_FOUND;
    size_t count;
    const cu_api *rows = rows_of(name, &count);
    const size_t newer = &cu_newer_count ? cu_newer_count : 0;
    const int kind = flags & FLAGS_THREAD ? kinds(rows, count, name) | kinds(cu_newer_table, newer, name) : SIM_LEGACY;
    choose(rows, count, name, kind, version, address, status);
    choose(cu_newer_table, newer, name, kind, version, address, status);
    return CUDA_SUCCESS;
}
