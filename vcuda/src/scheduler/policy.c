/* fgd, binpack, spread and topology.
 *
 * fgd's idea is that of "Beware of Fragmentation: Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent" (ATC'23): the
 * fragmentation of a node is the part of its free cards that a typical pod, drawn from the workload's distribution, could not
 * use; a pod goes where it increases the cluster's expected fragmentation least. For one typical pod and one node: if it does
 * not fit the node at all (cards, cpu or memory), every free part is a fragment; else only the rests of those cards that
 * are too small for it are.
 *
 * Ours on top, in the order in which they decide:
 * - A share goes where it wastes least of the card: what the cut-off part was worth beyond the share's own value, at the prices of
 *   the best packing of the expected shares (scheduler_ext/scoring/prices.py). Fragmentation asks whether one more pod fits into
 *   a rest, this asks how well the rest can be filled in the end.
 * - A typical pod finds a node usable as long as one of it fits, even if the node's cpu and memory will run out long before its
 *   cards do. So a node's free cards beyond those that its free cpu and memory could serve, at the expected pods' mean need per
 *   card, count as stranded, and stranding a card costs twice as much as fragmenting it: no share at all can use it.
 * - A card costs rent by how much pods that accept few models, or fit on large nodes only, depend on such cards.
 *
 * docs/extender.md has what each is worth on the public trace. Sums are made in a fixed order: equal states must cost the same,
 * to the last bit, wherever they are.
 */
#include "scheduler/policy.h"

#include <stdlib.h>
#include <string.h>

#define WASTE 10.0 /* more than a share can change of a node's fragmentation: waste decides first */
#define STRANDED 2.0
/* Between nearly equal gradients the fuller node and card win: it keeps whole cards and empty nodes together. */
#define TIE_NODE 2e-2
#define TIE_CARD 1e-3

#define CARD_FIRST 1000.0 /* binpack: more than any node's rest in cards: the card decides, the node breaks ties */
#define NODE_FIRST 1000.0 /* spread: a node's mean rest decides down to 1/1000 card, the card breaks ties */
#define LINKS_FIRST 1000.0

struct vc_work {
    double *value, *then_value; /* [columns] */
    double *part;               /* [columns] or [typical] */
    uint8_t *takes;             /* [columns, typical] */
    double *useful;             /* [typical] */
    int64_t *count;             /* [typical] */
};

struct vc_work *vc_work_new(int64_t columns, int64_t typical_count)
{
    size_t cards = (size_t)columns, pods = (size_t)typical_count;
    size_t most = cards > pods ? cards : pods;
    struct vc_work *work = calloc(1, sizeof *work);

    if (work == NULL)
        return NULL;
    work->value = calloc(2 * cards + most + 2 * pods + 1, sizeof *work->value);
    work->takes = calloc(cards * pods + 1, sizeof *work->takes);
    if (work->value == NULL || work->takes == NULL) {
        vc_work_free(work);
        return NULL;
    }
    work->then_value = work->value + cards;
    work->part = work->then_value + cards;
    work->useful = work->part + most;
    work->count = (int64_t *)(void *)(work->useful + pods);
    return work;
}

void vc_work_free(struct vc_work *work)
{
    if (work == NULL)
        return;
    free(work->value);
    free(work->takes);
    free(work);
}

/* In eight sums at a time, as numpy adds: the reference of the tests is written with it. */
static double sum(const double *parts, int64_t count)
{
    if (count < 8) {
        double total = 0.0;

        for (int64_t at = 0; at < count; at++)
            total += parts[at];
        return total;
    }
    if (count > 128) {
        int64_t half = count / 2 - count / 2 % 8;

        return sum(parts, half) + sum(parts + half, count - half);
    }
    double lane[8];
    int64_t at = 8;

    memcpy(lane, parts, sizeof lane);
    for (; at + 8 <= count; at += 8)
        for (int each = 0; each < 8; each++)
            lane[each] += parts[at + each];
    double total = ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));

    for (; at < count; at++)
        total += parts[at];
    return total;
}

/* A card's rest as a fraction of the card: the mean of cores and memory; 0 for unusable cards. */
static double worth(const struct vc_node *node, int64_t card, int64_t cores, int64_t blocks)
{
    int64_t total = node->total_blocks[card] > 1 ? node->total_blocks[card] : 1;

    return node->usable[card] ? ((double)cores / VC_CARD_CORES + (double)blocks / (double)total) / 2 : 0.0;
}

static void worths(const struct vc_node *node, struct vc_rest rest, double *value)
{
    for (int64_t card = 0; card < node->columns; card++)
        value[card] = worth(node, card, rest.cores[card], rest.blocks[card]);
}

/* Whether a card in the given state can take (one card of) typical pod m. */
static bool takes(const struct vc_node *node, int64_t card, int64_t cores, int64_t blocks, int64_t m)
{
    const struct vc_typical *typical = node->typical;

    if (!node->usable[card])
        return false;
    if (typical->allowed != NULL
        && (node->model[card] >= typical->models || !typical->allowed[node->model[card] * typical->count + m]))
        return false;
    if (typical->whole[m])
        return cores == VC_CARD_CORES && blocks == node->total_blocks[card];
    return cores >= typical->cores[m] && blocks >= typical->blocks[m];
}

/* Whether the node's cpu and memory suffice for typical pod m. */
static bool hosts(const struct vc_typical *typical, struct vc_rest rest, int64_t m)
{
    return rest.cpu >= typical->cpu_milli[m] && rest.memory >= typical->memory_bytes[m];
}

/* The fragments, and in the work's value, takes, count and useful what they are made of. */
static double fragments(const struct vc_node *node, struct vc_rest rest)
{
    const struct vc_typical *typical = node->typical;
    struct vc_work *work = node->work;

    worths(node, rest, work->value);
    for (int64_t m = 0; m < typical->count; m++) {
        work->useful[m] = 0.0;
        work->count[m] = 0;
    }
    for (int64_t card = 0; card < node->columns; card++) {
        uint8_t *row = work->takes + card * typical->count;

        for (int64_t m = 0; m < typical->count; m++) {
            row[m] = takes(node, card, rest.cores[card], rest.blocks[card], m);
            work->count[m] += row[m];
            work->useful[m] += row[m] ? work->value[card] : 0.0;
        }
    }
    for (int64_t m = 0; m < typical->count; m++) {
        bool possible = work->count[m] >= typical->cards[m] && hosts(typical, rest, m);

        work->part[m] = possible ? work->useful[m] * typical->weight[m] : 0.0;
    }
    double expected = sum(work->part, typical->count);

    return sum(work->value, node->columns) - expected;
}

double vc_fragments(const struct vc_node *node, struct vc_rest rest)
{
    return fragments(node, rest);
}

/* Of a node's free cards (in cards), those that its cpu and memory could not serve. */
static double stranded(const struct vc_typical *typical, double free, struct vc_rest rest)
{
    double cpu = (double)rest.cpu / typical->cpu_per_card, memory = (double)rest.memory / typical->memory_per_card;
    double served = cpu < memory ? cpu : memory;
    double left = free - (served > 0.0 ? served : 0.0);

    return left > 0.0 ? left : 0.0;
}

static int64_t within(int64_t parts)
{
    return parts < 0 ? 0 : parts > VC_CARD_CORES ? VC_CARD_CORES : parts;
}

static int64_t floor_of(int64_t amount, int64_t divisor)
{
    return amount / divisor - (amount % divisor < 0);
}

/* What is left of a card by its scarcer half, in hundredths. */
static int64_t hundredths(int64_t cores, int64_t blocks, int64_t total)
{
    int64_t memory = floor_of(VC_CARD_CORES * blocks, total);

    return within(cores < memory ? cores : memory);
}

/* What a card's taken part was worth beyond what is taken, in cards; below 0 where it fills a leftover. */
static double waste(const struct vc_node *node, int64_t card, struct vc_rest before, struct vc_rest after)
{
    const struct vc_typical *typical = node->typical;
    int64_t total = node->total_blocks[card] > 1 ? node->total_blocks[card] : 1;
    int64_t cores = before.cores[card] - after.cores[card], blocks = before.blocks[card] - after.blocks[card];
    int64_t memory = -floor_of(-VC_CARD_CORES * blocks, total);

    if (node->model[card] >= typical->models)
        return 0.0;
    const double *values = typical->values + node->model[card] * (VC_CARD_CORES + 1);

    return values[hundredths(before.cores[card], before.blocks[card], total)]
           - values[hundredths(after.cores[card], after.blocks[card], total)]
           - values[within(cores > memory ? cores : memory)];
}

static double rent_of(const struct vc_node *node, int64_t card)
{
    const struct vc_typical *typical = node->typical;
    bool known = node->size < typical->sizes && node->model[card] < typical->models;

    return known ? typical->rent[node->size * typical->models + node->model[card]] : 0.0;
}

static void fgd_cards(const struct vc_node *node, struct vc_rest before, struct vc_rest after, const uint8_t *fits,
                      double *cost)
{
    const struct vc_typical *typical = node->typical;
    struct vc_work *work = node->work;
    double now = fragments(node, before);
    double all = sum(work->value, node->columns);
    double was_stranded = stranded(typical, all, before);

    for (int64_t card = 0; card < node->columns; card++) {
        if (!fits[card])
            continue;
        const uint8_t *row = work->takes + card * typical->count;
        double value = work->value[card], then_value = worth(node, card, after.cores[card], after.blocks[card]);

        /* Only this card changes: correct the node's sums by it instead of summing all cards again. */
        for (int64_t m = 0; m < typical->count; m++) {
            bool then = takes(node, card, after.cores[card], after.blocks[card], m);
            double useful = work->useful[m] - (row[m] ? value : 0.0) + (then ? then_value : 0.0);
            bool possible = work->count[m] - row[m] + then >= typical->cards[m] && hosts(typical, after, m);

            work->part[m] = possible ? useful * typical->weight[m] : 0.0;
        }
        double free = all - value + then_value;
        double gradient = free - sum(work->part, typical->count) - now
                          + STRANDED * (stranded(typical, free, after) - was_stranded);

        cost[card] = WASTE * waste(node, card, before, after) + gradient + rent_of(node, card) * (value - then_value)
                     + TIE_NODE * free + TIE_CARD * then_value;
    }
}

static double fgd_set(const struct vc_node *node, struct vc_rest before, struct vc_rest after)
{
    const struct vc_typical *typical = node->typical;
    struct vc_work *work = node->work;
    double now = fragments(node, before), were = sum(work->value, node->columns);
    double was_stranded = stranded(typical, were, before);

    memcpy(work->then_value, work->value, (size_t)node->columns * sizeof *work->value);
    double then = fragments(node, after), free = sum(work->value, node->columns);

    for (int64_t card = 0; card < node->columns; card++)
        work->then_value[card] = rent_of(node, card) * (work->then_value[card] - work->value[card]);
    return then - now + STRANDED * (stranded(typical, free, after) - was_stranded) + sum(work->then_value, node->columns)
           + TIE_NODE * free;
}

static double mean_rest(const struct vc_node *node, struct vc_rest rest)
{
    int64_t cards = 0;

    worths(node, rest, node->work->value);
    for (int64_t card = 0; card < node->columns; card++)
        cards += node->usable[card];
    return sum(node->work->value, node->columns) / (double)(cards > 1 ? cards : 1);
}

static double closeness(const struct vc_node *node, const uint8_t *taken)
{
    int64_t ranks = 0;

    for (int64_t card = 0; card < node->columns; card++)
        for (int64_t peer = 0; taken[card] && peer < node->columns; peer++)
            ranks += taken[peer] ? node->links[card * node->columns + peer] : 0;
    return (double)ranks;
}

void vc_score_cards(int64_t policy, const struct vc_node *node, struct vc_rest before, struct vc_rest after,
                    const uint8_t *fits, double *cost)
{
    const double *value = node->work->value;

    if (policy == VC_FGD) {
        fgd_cards(node, before, after, fits, cost);
        return;
    }
    double mean = mean_rest(node, before), all = sum(value, node->columns);

    for (int64_t card = 0; card < node->columns; card++) {
        double then = worth(node, card, after.cores[card], after.blocks[card]);

        cost[card] = policy == VC_SPREAD ? -NODE_FIRST * mean - then : then * CARD_FIRST + all + then - value[card];
    }
}

double vc_score_set(int64_t policy, const struct vc_node *node, struct vc_rest before, struct vc_rest after,
                    const uint8_t *taken)
{
    if (policy == VC_FGD)
        return fgd_set(node, before, after);
    if (policy == VC_SPREAD)
        return -NODE_FIRST * mean_rest(node, before);
    worths(node, after, node->work->value);
    double rest = sum(node->work->value, node->columns);

    return policy == VC_TOPOLOGY ? rest - closeness(node, taken) * LINKS_FIRST : rest;
}
