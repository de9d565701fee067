/* The placement policies: what a choice of cards costs a node. Pure: from the state before and after to a number, lower is better. */
#ifndef VC_SCHEDULER_POLICY_H
#define VC_SCHEDULER_POLICY_H

#include <stdbool.h>

#include "scheduler/scheduler.h"

#define VC_CARD_CORES 100

/* One node's cards, and room to work in. */
struct vc_node {
    int64_t columns, size;
    const int64_t *total_blocks, *model;
    const uint8_t *links;
    const uint8_t *usable;
    const struct vc_typical *typical;
    struct vc_work *work;
};

/* What is left of a node. */
struct vc_rest {
    const int64_t *cores, *blocks;
    int64_t cpu, memory;
};

/* NULL without memory. */
struct vc_work *vc_work_new(int64_t columns, int64_t typical_count);
void vc_work_free(struct vc_work *work);

/* The cost of each card g that `fits`, into cost[g]: `after` holds in column g the state of card g if it is taken, all others
 * being as before. */
void vc_score_cards(int64_t policy, const struct vc_node *node, struct vc_rest before, struct vc_rest after,
                    const uint8_t *fits, double *cost);

/* The cost of a set of cards, `after` being the state with all of them `taken`. */
double vc_score_set(int64_t policy, const struct vc_node *node, struct vc_rest before, struct vc_rest after,
                    const uint8_t *taken);

/* fgd's measure of one state. */
double vc_fragments(const struct vc_node *node, struct vc_rest rest);

#endif
