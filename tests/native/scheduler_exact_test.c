/* The exact search stays within its arrays, whatever is asked for and free, and what it finds fits: each array lies at the end of
 * its allocation, so that a sanitizer sees the first byte beyond. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "scheduler/scheduler.h"

static uint64_t state = 88172645463325252u;

static int64_t draw(int64_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return (int64_t)(state % (uint64_t)below);
}

static void *copied(const void *from, size_t bytes)
{
    void *copy = malloc(bytes + !bytes);

    CHECK(copy != NULL);
    if (bytes)
        memcpy(copy, from, bytes);
    return copy;
}

/* Whether all but the init containers stand together on what is free. */
static void check_found(const struct vc_step *steps, int64_t count, const struct vc_free *cards, int64_t columns, const int64_t *picks)
{
    int64_t cores[16] = {0}, blocks[16] = {0};

    for (int64_t number = 0; number < count; number++) {
        for (int64_t each = 0; each < steps[number].cards; each++, picks++) {
            CHECK(*picks >= 0 && *picks < columns);
            if (steps[number].init)
                continue;
            cores[*picks] += steps[number].cores;
            blocks[*picks] += steps[number].whole ? cards[*picks].total_blocks : steps[number].blocks;
        }
    }
    for (int64_t column = 0; column < columns; column++)
        CHECK(cores[column] <= cards[column].cores && blocks[column] <= cards[column].blocks);
}

/* Whether the peaks of all containers, each init container beside the sidecars that started before it, are within the limits. */
static void check_limits(const struct vc_step *steps, int64_t count, const struct vc_free *cards, int64_t columns,
                         const struct vc_rooms *limits, const int64_t *picks)
{
    int64_t stands[2][16] = {{0}}, peaks[2][16] = {{0}};

    for (int init = 0; init < 2; init++) {
        const int64_t *its = picks;

        for (int64_t number = 0; number < count; its += steps[number++].cards) {
            int64_t now[2][16] = {{0}}, before = 0;
            const int64_t *theirs = picks;

            if (!steps[number].init != !init)
                continue;
            for (int64_t other = 0; init && other < count && before < steps[number].sidecars_before; theirs += steps[other++].cards) {
                if (steps[other].init)
                    continue;
                before++;
                for (int64_t each = 0; each < steps[other].cards; each++) {
                    now[0][theirs[each]] += steps[other].cores;
                    now[1][theirs[each]] += steps[other].whole ? cards[theirs[each]].total_blocks : steps[other].blocks;
                }
            }
            for (int64_t each = 0; each < steps[number].cards; each++) {
                int64_t amounts[] = {steps[number].cores, steps[number].whole ? cards[its[each]].total_blocks : steps[number].blocks};

                for (int amount = 0; amount < 2; amount++) {
                    int64_t *all = init ? now[amount] : stands[amount];

                    all[its[each]] += amounts[amount];
                    if (all[its[each]] > peaks[amount][its[each]])
                        peaks[amount][its[each]] = all[its[each]];
                }
            }
        }
    }
    for (int64_t number = 0; number < limits->count; number++) {
        int64_t sums[3] = {0};

        for (int64_t column = 0; column < columns; column++) {
            if (!(limits->counted[column] >> number & 1))
                continue;
            sums[0] += peaks[0][column];
            sums[1] += peaks[1][column];
            sums[2] += peaks[0][column] >= 100;
        }
        for (int amount = 0; amount < 3; amount++)
            CHECK(sums[amount] == 0 || sums[amount] <= limits->rooms[3 * number + amount]);
    }
}

int main(void)
{
    int64_t found = 0, bounded = 0, within = 0;

    for (int round = 0; round < 20000; round++) {
        struct vc_step steps[8];
        struct vc_free cards[8];
        int64_t count = draw(9), columns = draw(9), asked = 0, standing = 0, most = draw(200) - 1, left = most;

        for (int64_t number = 0; number < count; number++) {
            int whole = draw(6) == 0, init = number > 0 && (steps[number - 1].init || draw(5) == 0);

            steps[number] = (struct vc_step){whole ? 100 : 5 + draw(60), draw(20), 1 + draw(3), whole, init, init ? draw(standing + 2) : 0};
            standing += !init;
            asked += steps[number].cards;
        }
        for (int64_t column = 0; column < columns; column++) {
            int64_t total = 40 * draw(3);

            cards[column] = (struct vc_free){25 * draw(5), total / (1 + draw(2)), total};
        }
        int limited = draw(2) == 0;
        int64_t rooms[9], counted[8], several = draw(4);

        for (int64_t number = 0; number < 3 * several; number++)
            rooms[number] = number % 3 == 2 ? draw(5) - 1 : draw(220) - 5;
        for (int64_t column = 0; column < columns; column++)
            counted[column] = draw(8);
        int64_t *its_rooms = copied(rooms, 3 * (size_t)several * sizeof *rooms);
        int64_t *its_counted = copied(counted, (size_t)columns * sizeof *counted);
        struct vc_rooms limits = {several, its_rooms, its_counted};
        struct vc_step *its_steps = copied(steps, (size_t)count * sizeof *steps);
        struct vc_free *its_cards = copied(cards, (size_t)columns * sizeof *cards);
        int64_t *picks = malloc((size_t)(asked + !asked) * sizeof *picks);

        CHECK(picks != NULL);
        int answer = vc_fit_exactly(its_steps, count, its_cards, columns, limited ? &limits : NULL, &left, picks);

        CHECK((answer == 0 || answer == 1) && left >= 0 && left <= (most > 0 ? most : 0));
        if (answer)
            check_found(steps, count, cards, columns, picks);
        if (answer && limited)
            check_limits(steps, count, cards, columns, &limits, picks);
        found += answer;
        within += answer && limited && several;
        bounded += most > 0 && left == 0 && !answer;
        free(its_steps);
        free(its_rooms);
        free(its_counted);
        free(its_cards);
        free(picks);
    }
    CHECK(found > 500 && bounded > 20 && within > 100);
    return 0;
}
