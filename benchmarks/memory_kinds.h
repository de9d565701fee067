/* Every kind of device memory that the stress run takes and gives back. */
#pragma once
#include <stddef.h>

/* One that is held. The program keeps it as it is; `kind` 0: nothing. */
struct held {
    int kind;
    size_t part; /* bytes of one of `parts` */
    unsigned long long at;
    unsigned long long parts[4];
};

enum { KINDS = 14 }; /* 1 … KINDS */

/* Look up what the kinds need; names the first function that is missing, NULL if there is none. */
const char *kinds_find(void *library);

const char *kind_name(int kind);

/* What `take` asks for of those bytes: a module is of one size. */
size_t kind_bytes(int kind, size_t bytes);

/* Take about `bytes` by the kind; `chance` decides between its variants. Returns the CUresult: 2 leaves nothing behind. */
int take(struct held *one, int kind, size_t bytes, unsigned chance);

/* Give it back, in a variant by `chance`. Returns the CUresult. */
int give(struct held *one, unsigned chance);
