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

int main(void)
{
    int64_t found = 0, bounded = 0;

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
        struct vc_step *its_steps = copied(steps, (size_t)count * sizeof *steps);
        struct vc_free *its_cards = copied(cards, (size_t)columns * sizeof *cards);
        int64_t *picks = malloc((size_t)(asked + !asked) * sizeof *picks);

        CHECK(picks != NULL);
        int answer = vc_fit_exactly(its_steps, count, its_cards, columns, &left, picks);

        CHECK((answer == 0 || answer == 1) && left >= 0 && left <= (most > 0 ? most : 0));
        if (answer)
            check_found(steps, count, cards, columns, picks);
        found += answer;
        bounded += most > 0 && left == 0 && !answer;
        free(its_steps);
        free(its_cards);
        free(picks);
    }
    CHECK(found > 500 && bounded > 20);
    return 0;
}
