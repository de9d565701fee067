/* Whether several containers fit on one node's cards together: a bounded search, for nodes that greed refused.
 *
 * Greed takes the containers in their order: a share on the emptiest card can leave no untouched card for the next one, though
 * both fit. Here whole cards and large shares are placed first, the fullest cards are tried first, of cards that are alike now
 * only how many are taken, and what can't work any more is left early. Under limits on the peaks of some cards, as a quota for one
 * model is, init containers are tried on all cards, too: elsewhere a place of theirs takes no room from anybody.
 */
#include <stdlib.h>
#include <string.h>

#include "scheduler/policy.h"

#define ROOM(columns) (5 * (columns) + 1) /* of one level, and the peaks before its init container */

/* The cards that one step may take, in groups of those that are alike, and how many it takes of each now. */
struct level {
    int64_t *columns; /* group by group */
    int64_t *first;   /* of each group its first place there; one more for the end */
    int64_t *taken;
    int64_t groups;
};

struct search {
    const struct vc_step *steps;
    const struct vc_free *cards;
    const struct vc_rooms *limits;
    int64_t count, columns, standing, left;
    int64_t *order;          /* of the steps that keep running: who is placed first; then the init containers */
    int64_t *at;             /* where each step's picks begin */
    int64_t *cores, *blocks; /* free now */
    int64_t *then_cores, *then_blocks; /* free while an init container runs; behind these are the cards that it may have */
    int64_t *peaks;          /* of init containers: cores of all cards, then blocks; under limits */
    int64_t *room;           /* of all levels */
    int64_t *picks;
};

static int64_t blocks_of(const struct vc_step *step, const struct vc_free *card)
{
    return step->whole ? card->total_blocks : step->blocks;
}

static int fits(const struct vc_step *step, const struct vc_free *card, int64_t cores, int64_t blocks)
{
    return card->total_blocks > 0 && cores >= step->cores && blocks >= blocks_of(step, card);
}

/* Whether nothing as simple as a sum stands against it. */
static int possible(const struct search *search)
{
    int64_t whole = 0, untouched = 0, asked_cores = 0, asked_blocks = 0, free_cores = 0, free_blocks = 0;

    for (int64_t number = 0; number < search->count; number++) {
        const struct vc_step *step = &search->steps[number];
        int64_t fitting = 0;

        for (int64_t column = 0; column < search->columns; column++) {
            const struct vc_free *card = &search->cards[column];

            fitting += fits(step, card, card->cores, card->blocks);
        }
        if (fitting < step->cards)
            return 0;
        if (step->init)
            continue;
        if (step->whole) {
            whole += step->cards;
        } else {
            asked_cores += step->cores * step->cards;
            asked_blocks += step->blocks * step->cards;
        }
    }
    for (int64_t column = 0; column < search->columns; column++) {
        const struct vc_free *card = &search->cards[column];

        free_cores += card->cores;
        free_blocks += card->blocks;
        untouched += card->cores >= VC_CARD_CORES && card->total_blocks > 0 && card->blocks >= card->total_blocks;
    }
    return whole <= untouched && asked_cores + VC_CARD_CORES * whole <= free_cores && asked_blocks <= free_blocks;
}

/* Whether a step is harder to place than another one. */
static int harder(const struct vc_step *one, const struct vc_step *other, int64_t total)
{
    int64_t size[2][3];
    const struct vc_step *both[] = {one, other};

    for (int each = 0; each < 2; each++) {
        int64_t part = VC_CARD_CORES * both[each]->blocks / total;

        size[each][0] = both[each]->whole != 0;
        size[each][1] = both[each]->cores > part ? both[each]->cores : part;
        size[each][2] = both[each]->cards;
    }
    for (int part = 0; part < 3; part++)
        if (size[0][part] != size[1][part])
            return size[0][part] > size[1][part];
    return 0;
}

/* Who keeps running, the hardest to place first. */
static void sort_steps(struct search *search)
{
    int64_t total = 1;

    for (int64_t column = 0; column < search->columns; column++)
        if (search->cards[column].total_blocks > total)
            total = search->cards[column].total_blocks;
    for (int64_t number = 0; number < search->count; number++) {
        if (search->steps[number].init)
            continue;
        int64_t place = search->standing++;

        for (; place > 0 && harder(&search->steps[number], &search->steps[search->order[place - 1]], total); place--)
            search->order[place] = search->order[place - 1];
        search->order[place] = number;
    }
    for (int64_t number = 0, place = search->standing; number < search->count; number++)
        if (search->steps[number].init)
            search->order[place++] = number;
}

/* Whether what is picked so far is within all limits; what comes only adds to it. */
static int within(const struct search *search)
{
    const struct vc_rooms *limits = search->limits;

    for (int64_t number = 0; limits != NULL && number < limits->count; number++) {
        int64_t sums[3] = {0};

        for (int64_t column = 0; column < search->columns; column++) {
            int64_t cores = search->cards[column].cores - search->cores[column];
            int64_t blocks = search->cards[column].blocks - search->blocks[column];

            if (!(limits->counted[column] >> number & 1))
                continue;
            if (cores < search->peaks[column])
                cores = search->peaks[column];
            if (blocks < search->peaks[search->columns + column])
                blocks = search->peaks[search->columns + column];
            sums[0] += cores;
            sums[1] += blocks;
            sums[2] += cores >= VC_CARD_CORES;
        }
        for (int amount = 0; amount < 3; amount++)
            if (sums[amount] > 0 && sums[amount] > limits->rooms[3 * number + amount])
                return 0;
    }
    return 1;
}

/* By what is free of two cards, their memory and what limits count: below 0, 0 or above, as of `strcmp`. `init`: for a container
 * beside which less stands. */
static int64_t compare(const struct search *search, int init, int64_t one, int64_t other)
{
    int64_t columns = search->columns;

    if (search->cores[one] != search->cores[other])
        return search->cores[one] - search->cores[other];
    if (search->blocks[one] != search->blocks[other])
        return search->blocks[one] - search->blocks[other];
    if (search->limits == NULL || search->cards[one].total_blocks != search->cards[other].total_blocks)
        return search->cards[one].total_blocks - search->cards[other].total_blocks;
    if (search->limits->counted[one] != search->limits->counted[other])
        return search->limits->counted[one] - search->limits->counted[other];
    if (!init)
        return 0;
    if (search->peaks[one] != search->peaks[other])
        return search->peaks[one] - search->peaks[other];
    if (search->peaks[columns + one] != search->peaks[columns + other])
        return search->peaks[columns + one] - search->peaks[columns + other];
    if (search->then_cores[one] != search->then_cores[other])
        return search->then_cores[one] - search->then_cores[other];
    return search->then_blocks[one] - search->then_blocks[other];
}

/* The groups of cards that a step may take, the fullest first. */
static struct level level_of(const struct search *search, int64_t depth, const struct vc_step *step)
{
    const int64_t *cores = step->init ? search->then_cores : search->cores;
    const int64_t *blocks = step->init ? search->then_blocks : search->blocks;
    int64_t *room = search->room + depth * ROOM(search->columns), found = 0;
    struct level level = {room, room + search->columns, room + 2 * search->columns + 1, 0};

    for (int64_t column = 0; column < search->columns; column++) {
        if (!fits(step, &search->cards[column], cores[column], blocks[column]))
            continue;
        int64_t place = found++;

        for (; place > 0 && compare(search, step->init, level.columns[place - 1], column) > 0; place--)
            level.columns[place] = level.columns[place - 1];
        level.columns[place] = column;
    }
    for (int64_t place = 0; place < found; place++)
        if (place == 0 || compare(search, step->init, level.columns[place - 1], level.columns[place]) != 0)
            level.first[level.groups++] = place;
    level.first[level.groups] = found;
    return level;
}

/* Take `count` of the groups from one on, of the first as many as there are. */
static void take_first(struct level *level, int64_t group, int64_t count)
{
    for (; group < level->groups; group++) {
        int64_t there = level->first[group + 1] - level->first[group];

        level->taken[group] = there < count ? there : count;
        count -= level->taken[group];
    }
}

/* The next choice of as many cards; 0: there is none. */
static int take_next(struct level *level)
{
    int64_t behind = 0, room = 0; /* taken of later groups, and what these have */

    for (int64_t group = level->groups - 1; group >= 0; group--) {
        if (level->taken[group] > 0 && room > behind) {
            level->taken[group]--;
            take_first(level, group + 1, behind + 1);
            return 1;
        }
        behind += level->taken[group];
        room += level->first[group + 1] - level->first[group];
    }
    return 0;
}

/* Book a step on what it has picked, or (1) take that back. */
static void book(struct search *search, const struct vc_step *step, const int64_t *picks, int64_t sign)
{
    for (int64_t each = 0; each < step->cards; each++) {
        search->cores[picks[each]] += sign * step->cores;
        search->blocks[picks[each]] += sign * blocks_of(step, &search->cards[picks[each]]);
    }
}

/* What is free while an init container runs, beside the sidecars that have started before. */
static void free_beside_sidecars(struct search *search, int64_t sidecars)
{
    for (int64_t column = 0; column < search->columns; column++) {
        search->then_cores[column] = search->cards[column].cores;
        search->then_blocks[column] = search->cards[column].blocks;
    }
    for (int64_t other = 0, before = 0; other < search->count && before < sidecars; other++) {
        const struct vc_step *beside = &search->steps[other];
        const int64_t *theirs = search->picks + search->at[other];

        if (beside->init)
            continue;
        before++;
        for (int64_t each = 0; each < beside->cards; each++) {
            search->then_cores[theirs[each]] -= beside->cores;
            search->then_blocks[theirs[each]] -= blocks_of(beside, &search->cards[theirs[each]]);
        }
    }
}

/* The cards for one init container: of those that it may have the fullest, since it costs nothing where the others stand already. */
static int place_init(struct search *search, int64_t number)
{
    const struct vc_step *step = &search->steps[number];
    int64_t *picks = search->picks + search->at[number], *fitting = search->then_blocks + search->columns, found = 0;

    free_beside_sidecars(search, step->sidecars_before);
    for (int64_t column = 0; column < search->columns; column++) {
        if (!fits(step, &search->cards[column], search->then_cores[column], search->then_blocks[column]))
            continue;
        int64_t place = found++;

        for (; place > 0; place--) {
            int64_t other = fitting[place - 1];

            if (search->cores[other] < search->cores[column] ||
                (search->cores[other] == search->cores[column] && search->blocks[other] <= search->blocks[column]))
                break;
            fitting[place] = other;
        }
        fitting[place] = column;
    }
    if (found < step->cards)
        return 0;
    for (int64_t each = 0; each < step->cards; each++)
        picks[each] = fitting[each];
    return 1;
}

static int place(struct search *search, int64_t depth);

/* The picks of one choice of a level's groups. */
static void pick(const struct level *level, int64_t *picks)
{
    for (int64_t group = 0; group < level->groups; group++)
        for (int64_t taken = 0; taken < level->taken[group]; taken++)
            *picks++ = level->columns[level->first[group] + taken];
}

/* What an init container makes of the peaks of the cards that it has picked. */
static void raise_peaks(struct search *search, const struct vc_step *step, const int64_t *picks)
{
    for (int64_t each = 0; each < step->cards; each++) {
        const struct vc_free *card = &search->cards[picks[each]];
        int64_t *peaks = search->peaks + picks[each];
        int64_t cores = card->cores - search->then_cores[picks[each]] + step->cores;
        int64_t blocks = card->blocks - search->then_blocks[picks[each]] + blocks_of(step, card);

        if (cores > peaks[0])
            peaks[0] = cores;
        if (blocks > peaks[search->columns])
            peaks[search->columns] = blocks;
    }
}

/* Try what a step may take, one choice after the other, with all that come after it; of an init container only its peak is seen
 * by these. */
static int place_step(struct search *search, int64_t depth)
{
    int64_t number = search->order[depth], *picks = search->picks + search->at[number], columns = search->columns;
    int64_t *before = search->room + depth * ROOM(columns) + 3 * columns + 1;
    const struct vc_step *step = &search->steps[number];

    if (step->init)
        free_beside_sidecars(search, step->sidecars_before);
    struct level level = level_of(search, depth, step);

    if (level.first[level.groups] < step->cards)
        return 0;
    memcpy(before, search->peaks, 2 * (size_t)columns * sizeof *before);
    take_first(&level, 0, step->cards);
    do {
        if (search->left == 0)
            return 0;
        search->left--;
        pick(&level, picks);
        if (step->init) {
            free_beside_sidecars(search, step->sidecars_before);
            raise_peaks(search, step, picks);
        } else {
            book(search, step, picks, -1);
        }
        int found = within(search) && place(search, depth + 1);

        if (step->init)
            memcpy(search->peaks, before, 2 * (size_t)columns * sizeof *before);
        else
            book(search, step, picks, 1);
        if (found)
            return 1;
    } while (take_next(&level));
    return 0;
}

/* The steps from one on, and the init containers, which run one by one, once all others have cards. */
static int place(struct search *search, int64_t depth)
{
    if (depth < search->standing || (search->limits != NULL && depth < search->count))
        return place_step(search, depth);
    for (; depth < search->count; depth++)
        if (!place_init(search, search->order[depth]))
            return 0;
    return 1;
}

int vc_fit_exactly(const struct vc_step *steps, int64_t count, const struct vc_free *cards, int64_t columns,
                   const struct vc_rooms *limits, int64_t *left, int64_t *picks)
{
    size_t numbers = 2 * (size_t)count + 7 * (size_t)columns + (size_t)count * ROOM((size_t)columns);
    int64_t *memory = malloc(numbers * sizeof *memory);

    if (memory == NULL)
        return -1;
    struct search search = {
        .steps = steps, .cards = cards, .limits = limits, .count = count, .columns = columns, .left = *left > 0 ? *left : 0,
        .order = memory, .at = memory + count, .cores = memory + 2 * count, .picks = picks,
    };

    search.blocks = search.cores + columns;
    search.then_cores = search.blocks + columns;
    search.then_blocks = search.then_cores + columns;
    search.peaks = search.then_blocks + 2 * columns;
    search.room = search.peaks + 2 * columns;
    for (int64_t number = 0, at = 0; number < count; at += steps[number++].cards)
        search.at[number] = at;
    for (int64_t column = 0; column < columns; column++) {
        search.cores[column] = cards[column].cores;
        search.blocks[column] = cards[column].blocks;
        search.peaks[column] = search.peaks[columns + column] = 0;
    }
    sort_steps(&search);
    int found = possible(&search) && place(&search, 0);

    *left = search.left;
    free(memory);
    return found;
}
