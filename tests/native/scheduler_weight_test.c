/* A text is weighed within its bytes alone, wherever it is cut: it lies at the end of its allocation, so that a sanitizer sees the first byte
 * beyond. More text never weighs less. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "scheduler/scheduler.h"

static const char TEXT[] = "{\"a\":[\"b\\\"\\\\\",\"\\ud83d\\ude00\xc3\xa9\",-1.5e+3,{},[[]],true],\"c\":{\"\":null}}]]}{\\u\"\\u\"\"\\";

int main(void)
{
    int64_t before = 0;

    for (size_t bytes = 0; bytes < sizeof TEXT; bytes++) {
        char *copy = malloc(bytes + !bytes);

        CHECK(copy != NULL);
        memcpy(copy, TEXT, bytes);
        int64_t weight = vc_json_weight(copy, bytes);

        CHECK(bytes == 0 ? weight == 0 : weight > before);
        /* A brace weighs less once its object is seen to be empty. */
        before = bytes > 0 && copy[bytes - 1] == '{' ? 0 : weight;
        free(copy);
    }
    return 0;
}
