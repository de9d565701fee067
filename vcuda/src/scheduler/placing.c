/* Choosing cards for every container of one class of pods, node by node, and what that choice costs.
 *
 * Each container gets its cards in turn. An init container's share is free again for the containers after it, so each card's
 * peak over the phases is booked (vcuda/spec/placement.py, peak_use), and cards that are already booked for another phase cost
 * nothing more. What this greed refuses to a pod of several containers is searched by the caller (scheduler_ext/scoring/exact_search.py).
 */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "scheduler/policy.h"

#define GROWTH_FIRST 1e6 /* more than any policy's cost of a card */

/* One node's columns while it is planned; `cards` of each. */
struct plan {
    int64_t *free_cores, *free_blocks;
    int64_t *booked_cores, *booked_blocks; /* the peak so far */
    int64_t *wanted_cores, *wanted_blocks;
    int64_t *peak_cores, *peak_blocks;
    int64_t *before_cores, *before_blocks, *after_cores, *after_blocks;
    int64_t *growth;
    int64_t *phases; /* [steps + 1, 2, cards]: what stands after 0, 1, … containers that keep running */
    double *cost;
    uint8_t *usable, *fits, *enough, *taken, *chosen;
};

static struct plan *plan_new(int64_t columns, int64_t steps)
{
    size_t cards = (size_t)columns, rows = 13 + 2 * ((size_t)steps + 1);
    struct plan *plan = calloc(1, sizeof *plan + (rows + 1) * cards * 8 + 5 * cards);

    if (plan == NULL)
        return NULL;
    int64_t *at = (int64_t *)(void *)(plan + 1);
    int64_t **columns_of[] = {
        &plan->free_cores, &plan->free_blocks, &plan->booked_cores, &plan->booked_blocks, &plan->wanted_cores,
        &plan->wanted_blocks, &plan->peak_cores, &plan->peak_blocks, &plan->before_cores, &plan->before_blocks,
        &plan->after_cores, &plan->after_blocks, &plan->growth, &plan->phases,
    };

    for (size_t each = 0; each < sizeof columns_of / sizeof *columns_of; each++, at += cards)
        *columns_of[each] = at;
    plan->cost = (double *)(void *)((int64_t *)(void *)(plan + 1) + rows * cards);
    uint8_t *bytes = (uint8_t *)(plan->cost + cards);

    plan->usable = bytes;
    plan->fits = bytes + cards;
    plan->enough = bytes + 2 * cards;
    plan->taken = bytes + 3 * cards;
    plan->chosen = bytes + 4 * cards;
    return plan;
}

static int64_t larger(int64_t one, int64_t other)
{
    return one > other ? one : other;
}

static double rounded(double cost)
{
    return rint(cost * 1e9) / 1e9;
}

static int64_t set_in(const uint8_t *flags, int64_t count)
{
    int64_t found = 0;

    for (int64_t at = 0; at < count; at++)
        found += flags[at];
    return found;
}

static int64_t refusal(const struct plan *plan, const uint8_t *usable, int64_t columns, const struct vc_step *step,
                       const struct vc_codes *codes)
{
    if (set_in(plan->fits, columns) >= step->cards)
        return 0;
    if (!set_in(usable, columns))
        return codes->unhealthy;
    if (!set_in(plan->usable, columns))
        return codes->not_allowed;
    if (step->whole)
        return codes->whole;
    return set_in(plan->enough, columns) ? codes->memory : codes->cores;
}

/* Grow a set of `count` free cards from one of them, always by the closest; returns how close they are. */
static int64_t grown(const uint8_t *links, const uint8_t *free, int64_t columns, int64_t seed, int64_t count, uint8_t *set)
{
    int64_t total = 0;

    memset(set, 0, (size_t)columns);
    set[seed] = 1;
    while (--count > 0) {
        int64_t best = -1, most = -1;

        for (int64_t card = 0; card < columns; card++) {
            int64_t gain = 0;

            if (set[card] || !free[card])
                continue;
            for (int64_t peer = 0; peer < columns; peer++)
                gain += set[peer] ? links[peer * columns + card] : 0;
            if (gain > most) {
                most = gain;
                best = card;
            }
        }
        if (best < 0)
            break;
        set[best] = 1;
        total += most;
    }
    return total;
}

/* `count` of the free cards that are close to each other: the best total closeness wins, then the lowest card. There are enough. */
static void best_linked(const struct plan *plan, const uint8_t *links, int64_t columns, int64_t count)
{
    int64_t closest = -1;

    for (int64_t seed = 0; seed < columns; seed++) {
        if (!plan->fits[seed])
            continue;
        int64_t close = grown(links, plan->fits, columns, seed, count, plan->chosen);

        if (close > closest) {
            closest = close;
            memcpy(plan->taken, plan->chosen, (size_t)columns);
        }
    }
}

/* Leave only the cards that are booked for another phase anyway, where these suffice. */
static void only_free_rides(const struct plan *plan, int64_t columns, int64_t count)
{
    int64_t rides = 0;

    for (int64_t card = 0; card < columns; card++)
        rides += plan->fits[card] && plan->growth[card] == 0;
    for (int64_t card = 0; rides >= count && card < columns; card++)
        plan->fits[card] = plan->fits[card] && plan->growth[card] == 0;
}

static void choose(const struct plan *plan, const struct vc_node *node, const struct vc_step *step, int64_t policy,
                   struct vc_rest before, struct vc_rest after)
{
    int64_t columns = node->columns;

    if (step->cards > 1) {
        if (step->init)
            only_free_rides(plan, columns, step->cards);
        best_linked(plan, node->links, columns, step->cards);
        return;
    }
    int64_t best = -1;
    double least = INFINITY;

    vc_score_cards(policy, node, before, after, plan->fits, plan->cost);
    memset(plan->taken, 0, (size_t)columns);
    for (int64_t card = 0; card < columns; card++) {
        if (!plan->fits[card])
            continue;
        plan->cost[card] = rounded(plan->cost[card]);
        double cost = plan->cost[card] + (step->init ? GROWTH_FIRST * (double)plan->growth[card] : 0.0);

        if (best < 0 || cost < least) {
            least = cost;
            best = card;
        }
    }
    plan->taken[best] = 1;
}

/* Fill the columns that depend on what a step asks for. */
static void weigh(const struct plan *plan, const struct vc_node *node, const struct vc_step *step, const int64_t *standing)
{
    int64_t columns = node->columns;

    for (int64_t card = 0; card < columns; card++) {
        int64_t cores = standing[card] + step->cores;
        int64_t blocks = standing[columns + card] + (step->whole ? node->total_blocks[card] : step->blocks);

        plan->wanted_cores[card] = cores;
        plan->wanted_blocks[card] = blocks;
        plan->enough[card] = plan->usable[card] && cores <= plan->free_cores[card];
        plan->fits[card] = plan->enough[card] && blocks <= plan->free_blocks[card];
        plan->peak_cores[card] = larger(plan->booked_cores[card], cores);
        plan->peak_blocks[card] = larger(plan->booked_blocks[card], blocks);
        plan->before_cores[card] = plan->free_cores[card] - plan->booked_cores[card];
        plan->before_blocks[card] = plan->free_blocks[card] - plan->booked_blocks[card];
        plan->after_cores[card] = plan->free_cores[card] - plan->peak_cores[card];
        plan->after_blocks[card] = plan->free_blocks[card] - plan->peak_blocks[card];
        plan->growth[card] = plan->peak_cores[card] - plan->booked_cores[card] + plan->peak_blocks[card]
                             - plan->booked_blocks[card];
    }
}

/* Plan for one node; the reason code. `cost` and `picks` are written if it fits. */
static int64_t place(const struct plan *plan, const struct vc_node *node, const struct vc_wish *wish,
                     const struct vc_codes *codes, int64_t cpu, int64_t memory, double *total, int64_t *picks)
{
    int64_t columns = node->columns, standing = 0;
    double sum = 0.0;

    memset(plan->booked_cores, 0, 2 * (size_t)columns * sizeof *plan->booked_cores);
    memset(plan->phases, 0, 2 * (size_t)columns * sizeof *plan->phases);
    for (int64_t number = 0; number < wish->count; number++) {
        const struct vc_step *step = wish->steps + number;
        const int64_t *phase = plan->phases + 2 * columns * (step->init ? step->sidecars_before : standing);

        weigh(plan, node, step, phase);
        int64_t code = refusal(plan, node->usable, columns, step, codes);

        if (code)
            return code;
        struct vc_rest before = {plan->before_cores, plan->before_blocks, cpu, memory};

        if (number == 0) {
            cpu -= wish->cpu_milli;
            memory -= wish->memory_bytes;
        }
        struct vc_rest after = {plan->after_cores, plan->after_blocks, cpu, memory};

        choose(plan, node, step, wish->card_policy ? wish->card_policy : wish->node_policy, before, after);
        int64_t *next = plan->phases + 2 * columns * (standing + 1);

        for (int64_t card = 0; card < columns; card++) {
            bool taken = plan->taken[card];

            if (taken) {
                *picks++ = card;
                if (step->cards == 1 && !wish->card_policy)
                    sum += plan->cost[card];
                plan->booked_cores[card] = plan->peak_cores[card];
                plan->booked_blocks[card] = plan->peak_blocks[card];
            } else {
                plan->after_cores[card] = plan->before_cores[card];
                plan->after_blocks[card] = plan->before_blocks[card];
            }
            if (!step->init) {
                next[card] = taken ? plan->wanted_cores[card] : phase[card];
                next[columns + card] = taken ? plan->wanted_blocks[card] : phase[columns + card];
            }
        }
        standing += !step->init;
        if (step->cards > 1 || wish->card_policy)
            sum += rounded(vc_score_set(wish->node_policy, node, before, after, plan->taken));
    }
    *total = sum;
    return 0;
}

static struct vc_node node_at(const struct vc_nodes *nodes, const struct vc_typical *typical, struct vc_work *work, int64_t row)
{
    int64_t at = row * nodes->columns;

    return (struct vc_node){
        nodes->columns, nodes->size[row], nodes->total_blocks + at, nodes->model + at,
        nodes->links + at * nodes->columns, nodes->usable + at, typical, work,
    };
}

/* Free amounts are never negative here: who placed pods past us took what others hold, and left nothing. */
static void take_free(const struct plan *plan, const struct vc_nodes *nodes, int64_t row)
{
    for (int64_t card = 0; card < nodes->columns; card++) {
        plan->free_cores[card] = larger(nodes->free_cores[row * nodes->columns + card], 0);
        plan->free_blocks[card] = larger(nodes->free_blocks[row * nodes->columns + card], 0);
    }
}

/* What the planning of some nodes works with. */
struct planner {
    const struct vc_nodes *nodes;
    const struct vc_typical *typical;
    const struct vc_wish *wish;
    const struct vc_codes *codes;
    struct vc_plans plans;
    struct plan *plan;
    struct vc_work *work;
};

static bool get_ready(struct planner *planner)
{
    planner->plan = plan_new(planner->nodes->columns, planner->wish->count);
    planner->work = vc_work_new(planner->nodes->columns, planner->typical->count);
    return planner->plan != NULL && planner->work != NULL;
}

static int finish(struct planner *planner, int status)
{
    free(planner->plan);
    vc_work_free(planner->work);
    return status;
}

static void plan_node(const struct planner *planner, int64_t row, const uint8_t *allowed, int64_t out)
{
    const struct vc_nodes *nodes = planner->nodes;
    int64_t code = nodes->code == NULL ? 0 : nodes->code[row];
    struct vc_node node = node_at(nodes, planner->typical, planner->work, row);

    planner->plans.cost[out] = INFINITY;
    if (!code) {
        for (int64_t card = 0; card < nodes->columns; card++)
            planner->plan->usable[card] = node.usable[card] && (allowed == NULL || allowed[card]);
        take_free(planner->plan, nodes, row);
        code = place(planner->plan, &node, planner->wish, planner->codes, nodes->free_cpu[row], nodes->free_memory[row],
                     planner->plans.cost + out, planner->plans.picks + out * planner->wish->columns);
    }
    planner->plans.code[out] = code;
}

int vc_place(const struct vc_nodes *nodes, const struct vc_typical *typical, const struct vc_wish *wish,
             const struct vc_codes *codes, const uint8_t *allowed, const int64_t *rows, int64_t count, int at_rows,
             struct vc_plans plans)
{
    struct planner planner = {nodes, typical, wish, codes, plans, NULL, NULL};

    if (!get_ready(&planner))
        return finish(&planner, -1);
    for (int64_t at = 0; at < count; at++)
        plan_node(&planner, rows[at], allowed == NULL ? NULL : allowed + at * nodes->columns, at_rows ? rows[at] : at);
    return finish(&planner, 0);
}

int vc_refresh(const struct vc_nodes *nodes, const struct vc_typical *typical, const struct vc_wish *wish,
               const struct vc_codes *codes, const int64_t *changed, int64_t *planned, int64_t count, int64_t now,
               struct vc_plans plans)
{
    struct planner planner = {nodes, typical, wish, codes, plans, NULL, NULL};

    for (int64_t row = 0; row < count; row++) {
        if (changed[row] <= planned[row])
            continue;
        if (planner.plan == NULL && !get_ready(&planner))
            return finish(&planner, -1);
        plan_node(&planner, row, NULL, row);
        planned[row] = now;
    }
    return finish(&planner, 0);
}

double vc_cost_of(const struct vc_nodes *nodes, const struct vc_typical *typical, const struct vc_wish *wish, int64_t row,
                  const int64_t *cores, const int64_t *blocks)
{
    struct plan *plan = plan_new(nodes->columns, 0);
    struct vc_work *work = vc_work_new(nodes->columns, typical->count);
    double cost = NAN;

    if (plan != NULL && work != NULL) {
        struct vc_node node = node_at(nodes, typical, work, row);
        int64_t cpu = nodes->free_cpu[row], memory = nodes->free_memory[row];

        take_free(plan, nodes, row);
        for (int64_t card = 0; card < nodes->columns; card++) {
            plan->after_cores[card] = plan->free_cores[card] - cores[card];
            plan->after_blocks[card] = plan->free_blocks[card] - blocks[card];
            plan->taken[card] = cores[card] > 0;
        }
        struct vc_rest before = {plan->free_cores, plan->free_blocks, cpu, memory};
        struct vc_rest after = {
            plan->after_cores, plan->after_blocks, cpu - wish->cpu_milli, memory - wish->memory_bytes,
        };

        cost = rounded(vc_score_set(wish->node_policy, &node, before, after, plan->taken));
    }
    free(plan);
    vc_work_free(work);
    return cost;
}

int vc_fragmentation(const struct vc_nodes *nodes, const struct vc_typical *typical, const int64_t *rows, int64_t count,
                     double *found)
{
    struct plan *plan = plan_new(nodes->columns, 0);
    struct vc_work *work = vc_work_new(nodes->columns, typical->count);

    for (int64_t at = 0; plan != NULL && work != NULL && at < count; at++) {
        struct vc_node node = node_at(nodes, typical, work, rows[at]);
        struct vc_rest rest = {plan->free_cores, plan->free_blocks, nodes->free_cpu[rows[at]], nodes->free_memory[rows[at]]};

        take_free(plan, nodes, rows[at]);
        found[at] = vc_fragments(&node, rest);
    }
    int result = plan != NULL && work != NULL ? 0 : -1;

    free(plan);
    vc_work_free(work);
    return result;
}

int64_t vc_cheapest(const double *cost, const int64_t *order, const int64_t *rows, int64_t count)
{
    int64_t best = -1;

    for (int64_t at = 0; at < count; at++) {
        int64_t row = rows[at];

        if (row < 0 || cost[row] == INFINITY)
            continue;
        if (best < 0 || cost[row] < cost[best] || (cost[row] == cost[best] && order[row] < order[best]))
            best = row;
    }
    return best;
}
