/* What is kept of a text is read within its bytes alone, and written within as many, wherever it is cut and whatever stands there: text
 * and rest lie at the end of their allocations, so that a sanitizer sees the first byte beyond. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "scheduler/scheduler.h"

enum { SLOTS = 2 };

static const char TEXT[] =
    "{\"type\":\"ADDED\",\"object\":{\"metadata\":{\"uid\":\"a\\u0041\",\"more\":[1,-2,{\"x\":[[]]}]},\"spec\":{\"containers\":[{\"name\":\"m\","
    "\"env\":[{\"name\":\"A\",\"value\":null}],\"resources\":{\"limits\":{\"gpu\":\"1\"}}},{}, {\"name\":true}]},\"status\":{\"conditions\":"
    "[{\"type\":\"Ready\"},{\"type\":\"wanted\"},7]}}}\n";
static const char REST[] =
    "{\"object\":{\"metadata\":{},\"spec\":{\"containers\":[{\"name\":\"m\",\"resources\":{\"limits\":{\"gpu\":\"1\"}}},{},{\"name\":true}]},"
    "\"status\":{\"conditions\":[{\"type\":\"wanted\"}]}}}\nADDED\na\\u0041";

static int keep(struct vc_kept *kept, int within, const char *name, int way, int slot)
{
    int place = vc_kept_add(kept, within, name, strlen(name), way, slot);

    CHECK(place > 0);
    return place;
}

/* The length of the rest, which is checked against `wanted` if that is given; -1 if the text is not read. */
static int64_t read_text(const struct vc_kept *kept, const char *text, size_t bytes, const char *wanted)
{
    char *copy = malloc(bytes + !bytes), *rest = malloc(bytes + SLOTS);

    CHECK(copy != NULL && rest != NULL);
    memcpy(copy, text, bytes);
    int64_t length = vc_kept_read(kept, copy, bytes, 0, 0, SLOTS, rest);

    CHECK(length <= (int64_t)bytes + SLOTS);
    if (wanted != NULL)
        CHECK(length == (int64_t)strlen(wanted) && memcmp(rest, wanted, (size_t)length) == 0);
    free(copy);
    free(rest);
    return length;
}

int main(void)
{
    struct vc_kept *kept = vc_kept_new(0), *only = vc_kept_new(1);

    CHECK(kept != NULL && only != NULL);
    keep(kept, 0, "type", VC_SLOT, 0);
    int object = keep(kept, 0, "object", VC_WITHIN, 0), metadata = keep(kept, object, "metadata", VC_WITHIN, 0);
    int containers = keep(kept, keep(kept, object, "spec", VC_WITHIN, 0), "containers", VC_EACH, 0);
    int conditions = keep(kept, keep(kept, object, "status", VC_WITHIN, 0), "conditions", VC_NAMING, 0);

    keep(kept, metadata, "uid", VC_SLOT, 1);
    keep(kept, containers, "name", VC_WHOLE, 0);
    keep(kept, containers, "resources", VC_WHOLE, 0);
    keep(kept, conditions, "wanted", VC_UNREAD, 0);
    read_text(kept, TEXT, sizeof TEXT - 1, REST);
    CHECK(read_text(kept, TEXT, sizeof TEXT - 2, REST) > 0); /* without its last newline */
    for (size_t bytes = 0; bytes < sizeof TEXT - 2; bytes++)
        CHECK(read_text(kept, TEXT, bytes, NULL) == -1);

    keep(only, 0, "Pod", VC_WITHIN, 0);
    keep(only, 0, "Nodes", VC_UNREAD, 0);
    read_text(only, "{\"Pod\":{\"a\":1},\"Nodes\":null}", 28, "{\"Pod\":{}}\n\n");
    CHECK(read_text(only, "{\"Pod\":{},\"pod\":{}}", 19, NULL) == -1);
    CHECK(read_text(only, "{\"Nodes\":1,\"Nodes\":2}", 21, NULL) == -1);
    CHECK(read_text(only, "{\"Nodes\":1.5}", 13, NULL) == -1);
    CHECK(read_text(only, "{\"Nodes\":01}", 12, NULL) == -1);
    CHECK(read_text(only, "{\"N\\u006fdes\":1}", 16, NULL) == -1);
    CHECK(read_text(only, "{\"Nodes\":\"\xc3\xa9\"}", 14, NULL) == -1);

    unsigned dice = 1;
    char changed[sizeof TEXT];
    int read = 0;

    for (int round = 0; round < 100000; round++) {
        memcpy(changed, TEXT, sizeof TEXT);
        for (int each = 0; each < 1 + round % 3; each++) {
            dice = dice * 1103515245 + 12345;
            changed[(dice >> 8) % (sizeof TEXT - 1)] = "\"\\[]{},: \n\xff\x01u0aN-"[(dice >> 20) % 18];
        }
        read_text(kept, changed, (dice >> 4) % sizeof TEXT, NULL);
        read += read_text(kept, changed, sizeof TEXT - 1, NULL) >= 0;
    }
    CHECK(read > 1000); /* or nothing was tried */
    for (int each = 0; vc_kept_add(only, 0, "more", 4, VC_WHOLE, 0) > 0; each++)
        CHECK(each < 200);
    vc_kept_free(kept);
    vc_kept_free(only);
    return broken != 0;
}
