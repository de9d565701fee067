/* Names in a request are read within its bytes alone, wherever it is cut and whatever stands there: each body lies at the end of
 * its allocation, so that a sanitizer sees the first byte beyond. Names come and go without the table growing. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "scheduler/scheduler.h"

static const char BODY[] = "{\"Pod\":{\"a\":[\"}\\\"\",{}]},\"Nodes\":null,\"NodeNames\":[\"node-1\",\"a\",\"a-name-of-more-than-16-bytes\",\"?\"]}";

static int64_t read_body(const struct vc_names *names, const char *text, size_t bytes, int64_t rows[64])
{
    char *body = malloc(bytes + !bytes);
    int64_t *found = malloc((bytes / 3 + 1) * sizeof *found);
    size_t from = 0, to = 0;

    CHECK(body != NULL && found != NULL);
    memcpy(body, text, bytes);
    int64_t count = vc_names_offered(names, body, bytes, found, &from, &to);

    CHECK(count < 0 || (from < to && to <= bytes && body[from] == '[' && body[to - 1] == ']'));
    for (int64_t at = 0; at < count && at < 64; at++)
        rows[at] = found[at];
    free(found);
    free(body);
    return count;
}

int main(void)
{
    struct vc_names *names = vc_names_new();
    int64_t rows[64];

    CHECK(names != NULL);
    CHECK(vc_names_put(names, "node-1", 6, 1) == 0 && vc_names_put(names, "a", 1, 2) == 0);
    CHECK(vc_names_put(names, "a-name-of-more-than-16-bytes", 28, 3) == 0);
    CHECK(read_body(names, BODY, sizeof BODY - 1, rows) == 4);
    CHECK(rows[0] == 1 && rows[1] == 2 && rows[2] == 3 && rows[3] == -1);
    for (size_t bytes = 0; bytes < sizeof BODY - 1; bytes++)
        CHECK(read_body(names, BODY, bytes, rows) == -1);

    unsigned dice = 1;
    char changed[sizeof BODY];

    for (int round = 0; round < 200000; round++) {
        memcpy(changed, BODY, sizeof BODY);
        for (int each = 0; each < 1 + round % 3; each++) {
            dice = dice * 1103515245 + 12345;
            changed[(dice >> 8) % (sizeof BODY - 1)] = "\"\\[]{},: \n\xff" "aN"[(dice >> 20) % 13];
        }
        read_body(names, changed, (dice >> 4) % sizeof BODY, rows);
        read_body(names, changed, sizeof BODY - 1, rows);
    }

    for (int round = 0; round < 300000; round++) {
        char name[32];
        int bytes = snprintf(name, sizeof name, "n%d", round);

        CHECK(vc_names_put(names, name, (size_t)bytes, round) == 0);
        if (round >= 10) {
            bytes = snprintf(name, sizeof name, "n%d", round - 10);
            vc_names_drop(names, name, (size_t)bytes);
        }
    }
    CHECK(read_body(names, "{\"nodenames\":[\"n299999\",\"n299980\",\"node-1\"]}", 44, rows) == 3);
    CHECK(rows[0] == 299999 && rows[1] == -1 && rows[2] == 1);
    vc_names_free(names);
    return broken != 0;
}
