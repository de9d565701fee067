/* The rows that cuGetProcAddress finds in the newer driver only. */
#include "../cuda/cu_table.h"

#define SIM_API(symbol, base, since, kind) void symbol(void);
#include "cu_newer.def"
#undef SIM_API

const cu_api cu_newer_table[] = {
#define SIM_API(symbol, base, since, kind) {#base, since, kind, (void (*)(void))symbol},
#include "cu_newer.def"
};
const size_t cu_newer_count = sizeof cu_newer_table / sizeof *cu_newer_table;
