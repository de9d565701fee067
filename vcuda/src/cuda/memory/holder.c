/* Bindings, found by the cells of a grid: what lies within a place begins in one of the cells that the place covers.
 *
 * A holder's cells are about as large as the smallest place that it was ever bound at, so few bindings begin in one. */
#include "cuda/memory/holder.h"

#include <pthread.h>
#include <stdlib.h>

#include "base/table.h"

#define VC__KINDS (VC_PLACE_TAIL + 1)
#define VC__FEW_CELLS 64u /* looked at one by one, however little is bound */

struct holder {
    uint64_t key;
    CUcontext context;           /* that it ends with; NULL: with none */
    uint64_t count;              /* of its bindings */
    uint64_t cell[VC__KINDS][3]; /* 0: nothing was bound so far */
};
VC_TABLE(holders, struct holder);

struct binding {
    uint64_t key; /* of the cell where its place begins, or the next free one */
    const void *holder;
    struct vc_place place;
    struct vc_object *memory;
};
VC_TABLE(bindings, struct binding);

/* Guards holders and bindings: one change is several of their tables. */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void forget(void)
{
    pthread_mutex_init(&mutex, NULL);
}
VC_AT_FORK(forget);

/* The cells that a place covers. */
struct cells {
    uint64_t first[3], last[3];
};

static struct cells cells_of(const struct holder *holder, const struct vc_place *place)
{
    struct cells cells;
    for (int axis = 0; axis < 3; axis++) {
        uint64_t from = place->from[axis], to = place->to[axis], size = holder->cell[place->kind][axis];
        cells.first[axis] = size ? from / size : 0;
        cells.last[axis] = size && to > from ? (to - 1) / size : cells.first[axis];
    }
    return cells;
}

/* Two cells of one name would be taken for one: names are 64 bits (FNV-1a). */
static uint64_t name_of(const void *holder, const struct vc_place *place, const uint64_t cell[3])
{
    const uint64_t parts[] = {(uint64_t)(uintptr_t)holder, (uint64_t)place->kind << 32 | place->level, place->layer,
                              cell[0], cell[1], cell[2]};
    uint64_t name = 0xcbf29ce484222325u;
    for (size_t part = 0; part < sizeof parts / sizeof parts[0]; part++) {
        for (int shift = 0; shift < 64; shift += 8)
            name = (name ^ (parts[part] >> shift & 0xff)) * 0x100000001b3u;
    }
    return name ? name : 1;
}

/* A record that is free for the binding; else the binding's key is the next one. */
static enum vc_table_edit occupy(void *record, void *argument)
{
    struct binding *there = record, *made = argument;
    if (there->memory)
        made->key++;
    else
        *there = *made;
    return VC_TABLE_KEEP;
}

static bool add(const struct holder *holder, struct binding made)
{
    uint64_t key;
    made.key = name_of(made.holder, &made.place, cells_of(holder, &made.place).first);
    do {
        key = made.key;
        if (!vc_table_edit(&bindings, key, true, occupy, &made))
            return false;
    } while (made.key != key);
    return true;
}

static bool is_of(const void *record, const void *holder)
{
    return ((const struct binding *)record)->holder == holder;
}

static bool is_within(const struct binding *one, const struct vc_place *place)
{
    if (!place)
        return true;
    if (one->place.kind != place->kind || one->place.level != place->level || one->place.layer != place->layer)
        return false;
    for (int axis = 0; axis < 3; axis++) {
        if (one->place.from[axis] < place->from[axis] || one->place.to[axis] > place->to[axis])
            return false;
    }
    return true;
}

/* Bindings on their way out of the table. Without host memory for them they stay charged until the process ends. */
struct pile {
    struct binding *all;
    size_t count, room;
};

static void put_on(struct pile *pile, const struct binding *one)
{
    if (pile->count == pile->room) {
        size_t room = pile->room ? pile->room * 2 : 4;
        struct binding *larger = realloc(pile->all, room * sizeof *larger);
        if (!larger)
            return;
        pile->all = larger;
        pile->room = room;
    }
    pile->all[pile->count++] = *one;
}

/* Those of the holder that are within the place (NULL: anywhere) go to `taken`, if that is asked for; the others are added
 * again. */
static void sort(const struct holder *holder, const struct pile *found, const struct vc_place *place,
                 struct pile *taken)
{
    for (size_t index = 0; index < found->count; index++) {
        struct binding *one = &found->all[index];
        if (taken && is_of(one, (const void *)(uintptr_t)holder->key) && is_within(one, place))
            put_on(taken, one);
        else
            add(holder, *one);
    }
}

/* All of a holder are looked at. */
static void sort_all(const struct holder *holder, const struct vc_place *place, struct pile *taken)
{
    struct pile found = {0};
    found.all = vc_table_take_all(&bindings, is_of, (const void *)(uintptr_t)holder->key, &found.count);
    sort(holder, &found, place, taken);
    free(found.all);
}

static void sort_cell(const struct holder *holder, const uint64_t cell[3], const struct vc_place *place,
                      struct pile *taken)
{
    struct pile found = {0};
    struct binding one;
    uint64_t key = name_of((const void *)(uintptr_t)holder->key, place, cell);
    while (vc_table_take(&bindings, key++, &one))
        put_on(&found, &one);
    sort(holder, &found, place, taken);
    free(found.all);
}

static void take_within(const struct holder *holder, const struct vc_place *place, struct pile *taken)
{
    struct cells cells = cells_of(holder, place);
    uint64_t at[3], number = 1;
    for (int axis = 0; axis < 3; axis++) {
        if (__builtin_mul_overflow(number, cells.last[axis] - cells.first[axis] + 1, &number))
            number = UINT64_MAX;
    }
    if (number > VC__FEW_CELLS && number > holder->count) {
        sort_all(holder, place, taken);
        return;
    }
    for (at[2] = cells.first[2]; at[2] <= cells.last[2]; at[2]++) {
        for (at[1] = cells.first[1]; at[1] <= cells.last[1]; at[1]++) {
            for (at[0] = cells.first[0]; at[0] <= cells.last[0]; at[0]++)
                sort_cell(holder, at, place, taken);
        }
    }
}

/* Whether the holder's cells have become smaller for this place. */
static bool fit_cells(struct holder *holder, const struct vc_place *place)
{
    bool smaller = false;
    for (int axis = 0; axis < 3; axis++) {
        uint64_t *cell = &holder->cell[place->kind][axis], extent = place->to[axis] - place->from[axis];
        if (extent == 0)
            extent = 1;
        if (*cell != 0 && extent > *cell / 2) /* halved at least: how often that happens is the logarithm of a size */
            continue;
        smaller |= *cell != 0;
        *cell = extent;
    }
    return smaller;
}

bool vc_holder_bind(const void *holder, const struct vc_place *place, struct vc_object *memory)
{
    struct holder known = {.key = (uint64_t)(uintptr_t)holder};
    pthread_mutex_lock(&mutex);
    vc_table_get(&holders, known.key, &known);
    if (fit_cells(&known, place) && known.count > 0)
        sort_all(&known, NULL, NULL);
    known.count++;
    bool bound = vc_table_put(&holders, &known) &&
                 add(&known, (struct binding){.holder = holder, .place = *place, .memory = memory});
    pthread_mutex_unlock(&mutex);
    return bound;
}

struct vc_object **vc_holder_let_go(const void *holder, const struct vc_place *place, size_t *count)
{
    struct holder known;
    struct pile taken = {0};
    *count = 0;
    pthread_mutex_lock(&mutex);
    if (vc_table_take(&holders, (uint64_t)(uintptr_t)holder, &known)) {
        if (known.count > 0 && place)
            take_within(&known, place, &taken);
        else if (known.count > 0)
            sort_all(&known, NULL, &taken);
        known.count -= taken.count;
        if (place)
            vc_table_put(&holders, &known); /* it was just taken out */
    }
    pthread_mutex_unlock(&mutex);
    struct vc_object **objects = taken.count ? calloc(taken.count, sizeof(struct vc_object *)) : NULL;
    for (size_t index = 0; objects && index < taken.count; index++)
        objects[index] = taken.all[index].memory;
    *count = objects ? taken.count : 0; /* without host memory what it kept stays charged until the process ends */
    free(taken.all);
    return objects;
}

void vc_holder_made(const void *holder, CUcontext context)
{
    struct holder made = {.key = (uint64_t)(uintptr_t)holder, .context = context};
    pthread_mutex_lock(&mutex);
    vc_table_put(&holders, &made); /* without host memory it is taken for one that ends with no context */
    pthread_mutex_unlock(&mutex);
}

static bool ends_with(const void *record, const void *context)
{
    return ((const struct holder *)record)->context == context;
}

const void **vc_holders_of(CUcontext context, size_t *count)
{
    *count = 0;
    pthread_mutex_lock(&mutex);
    struct holder *found = context ? vc_table_take_all(&holders, ends_with, context, count) : NULL;
    for (size_t index = 0; found && index < *count; index++)
        vc_table_put(&holders, &found[index]); /* it was just taken out */
    pthread_mutex_unlock(&mutex);
    const void **names = found ? calloc(*count, sizeof *names) : NULL;
    for (size_t index = 0; names && index < *count; index++)
        names[index] = (const void *)(uintptr_t)found[index].key;
    free(found);
    *count = names ? *count : 0;
    return names;
}
