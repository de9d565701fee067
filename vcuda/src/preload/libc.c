/* Looking libc's functions up in its tables. The loader can't be asked: whatever it is asked for, it finds ours first. */
#include "preload/libc.h"

#include <elf.h>
#include <link.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/atomic.h"

#undef dlsym
#undef dlopen

static void *no_symbol(void *handle, const char *name)
{
    (void)handle, (void)name;
    return NULL;
}

static void *no_versioned(void *handle, const char *name, const char *version)
{
    (void)version;
    return no_symbol(handle, name);
}

static void *no_library(const char *file, int flags)
{
    (void)file, (void)flags;
    return NULL;
}

static void *no_namespace(long space, const char *file, int flags)
{
    (void)space;
    return no_library(file, flags);
}

struct vc_libc vc_libc = {no_symbol, no_versioned, no_library, no_namespace};

struct tables {
    uintptr_t base;
    const ElfW(Sym) *symbols;
    const char *strings;
    const uint32_t *hash; /* DT_GNU_HASH */
    const ElfW(Half) *versions;
};

static bool read_tables(const struct dl_phdr_info *info, struct tables *tables)
{
    *tables = (struct tables){.base = info->dlpi_addr};
    for (int index = 0; index < info->dlpi_phnum; index++) {
        if (info->dlpi_phdr[index].p_type != PT_DYNAMIC)
            continue;
        const ElfW(Dyn) *entry = (const ElfW(Dyn) *)(info->dlpi_addr + info->dlpi_phdr[index].p_vaddr);
        for (; entry->d_tag != DT_NULL; entry++) {
            const void *address = (const void *)entry->d_un.d_ptr; /* relocated by glibc's loader on x86-64 */
            if (entry->d_tag == DT_SYMTAB)
                tables->symbols = address;
            else if (entry->d_tag == DT_STRTAB)
                tables->strings = address;
            else if (entry->d_tag == DT_GNU_HASH)
                tables->hash = address;
            else if (entry->d_tag == DT_VERSYM)
                tables->versions = address;
        }
    }
    return tables->symbols && tables->strings && tables->hash;
}

/* The function of this name in its newest version (of which older glibcs have one, newer ones two of the same code). */
static void *find(const struct tables *tables, const char *name)
{
    uint32_t hash = 5381;
    for (const char *letter = name; *letter; letter++)
        hash = hash * 33 + (unsigned char)*letter;
    uint32_t buckets = tables->hash[0], first = tables->hash[1], words = tables->hash[2];
    const uint32_t *bucket = tables->hash + 4 + words * (sizeof(ElfW(Addr)) / sizeof(uint32_t));
    const uint32_t *chain = bucket + buckets;
    void *found = NULL;
    uint32_t index = buckets ? bucket[hash % buckets] : 0;
    for (; index >= first && index != 0; index++) {
        const ElfW(Sym) *symbol = &tables->symbols[index];
        uint32_t entry = chain[index - first];
        if ((entry | 1) == (hash | 1) && ELF64_ST_TYPE(symbol->st_info) == STT_FUNC && symbol->st_shndx != SHN_UNDEF &&
            strcmp(tables->strings + symbol->st_name, name) == 0) {
            bool hidden = tables->versions && tables->versions[index] & 0x8000; /* not the default version */
            if (!found || !hidden)
                found = (void *)(tables->base + symbol->st_value);
        }
        if (entry & 1)
            break;
    }
    return found;
}

static int look_into(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    struct vc_libc *into = data;
    const char *slash = strrchr(info->dlpi_name, '/'), *file = slash ? slash + 1 : info->dlpi_name;
    /* libdl is where they are before glibc 2.34; afterwards it is empty. */
    if (strncmp(file, "libc.so.6", 9) != 0 && strncmp(file, "libdl.so.2", 10) != 0)
        return 0;
    struct tables tables;
    if (!read_tables(info, &tables))
        return 0;
    struct vc_libc found = {find(&tables, "dlsym"), find(&tables, "dlvsym"), find(&tables, "dlopen"), find(&tables, "dlmopen")};
    if (!found.sym || !found.vsym || !found.open || !found.mopen)
        return 0;
    *into = found;
    return 1;
}

void vc_libc_find(void)
{
    static uint32_t done;
    if (VC_LIKELY(vc_load_acquire(&done)))
        return;
    /* Threads that race here find the same. */
    struct vc_libc found = vc_libc;
    if (dl_iterate_phdr(look_into, &found))
        vc_libc = found;
    vc_store_release(&done, 1);
}

void *vc_libc_dlsym(void *handle, const char *name)
{
    vc_libc_find();
    return vc_libc.sym(handle, name);
}

void *vc_libc_dlopen(const char *file, int flags)
{
    vc_libc_find();
    return vc_libc.open(file, flags);
}
