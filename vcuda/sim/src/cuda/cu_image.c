/* Reads kernel names, parameter sizes and globals out of PTX, cubins, fat binaries and our own linked images. */
#include <ctype.h>
#include <elf.h>
#include <stdlib.h>
#include <string.h>

#include "cu_module.h"

typedef struct {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes; /* after the header */
} fat_header;

typedef struct {
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
    uint32_t compressed_bytes, reserved;
    uint16_t minor, major;
    uint32_t arch, name_offset, name_bytes;
    uint64_t flags, reserved2, raw_bytes;
} fat_entry;

typedef struct {
    uint32_t magic, version;
    const void *data;
} fat_wrapper;

enum { FAT_MAGIC = (int)0xBA55ED50, FAT_WRAPPER_MAGIC = 0x466243b1, FAT_PTX = 1, FAT_ELF = 2, KPARAM_INFO = 0x17 };

static int starts(const void *image, const void *bytes, size_t count)
{
    return memcmp(image, bytes, count) == 0;
}

/* ---- PTX ---- */

static const char *skip_blank(const char *p)
{
    for (;;) {
        while (isspace((unsigned char)*p))
            p++;
        if (p[0] == '/' && p[1] == '/') {
            while (*p && *p != '\n')
                p++;
        } else if (p[0] == '/' && p[1] == '*') {
            const char *end = strstr(p + 2, "*/");
            p = end ? end + 2 : p + strlen(p);
        } else {
            return p;
        }
    }
}

static size_t word_length(const char *p)
{
    size_t n = 0;
    while (isalnum((unsigned char)p[n]) || p[n] == '_' || p[n] == '$' || p[n] == '.')
        n++;
    return n;
}

static size_t type_bytes(const char *type, size_t length)
{
    size_t bits = 0;
    for (size_t i = 0; i < length; i++)
        if (isdigit((unsigned char)type[i]))
            bits = bits * 10 + (size_t)(type[i] - '0');
    return bits / 8;
}

/* A declaration after `.param` or `.global`: attributes, type, name, perhaps [count]. Returns where it ends. */
static const char *declaration(const char *p, const char **name, size_t *name_length, size_t *bytes, size_t *align,
                               int *managed)
{
    size_t element = 0;
    *name = NULL;
    *align = 0;
    *managed = 0;
    for (;;) {
        p = skip_blank(p);
        const size_t n = word_length(p);
        if (!n)
            break;
        if (n == 6 && starts(p, ".align", 6)) {
            *align = strtoul(skip_blank(p + 6), (char **)(void *)&p, 10);
            continue;
        }
        if (n == 10 && starts(p, ".attribute", 10)) {
            const char *end = strchr(p, ')');
            const char *word = strstr(p, "managed");
            *managed |= end && word && word < end;
            p = end ? end + 1 : p + n;
            continue;
        }
        if (*p == '.') {
            const size_t size = type_bytes(p, n);
            element = size ? size : element;
        } else {
            *name = p;
            *name_length = n;
            p += n;
            break;
        }
        p += n;
    }
    *bytes = element;
    p = skip_blank(p);
    while (*p == '[') {
        char *end;
        const size_t count = strtoul(p + 1, &end, 10);
        *bytes *= count;
        p = skip_blank(*end == ']' ? end + 1 : end);
    }
    if (!*align)
        *align = element ? element : 1;
    return p;
}

static const char *read_entry(const char *p, CUmodule module)
{
    p = skip_blank(p);
    const size_t n = word_length(p);
    CUfunction function = n ? cu_module_add(module, p, n) : NULL;
    size_t offset = 0;
    p = skip_blank(p + n);
    if (!function || *p != '(')
        return p;
    for (p = skip_blank(p + 1); *p && *p != ')'; p = skip_blank(*p == ',' ? p + 1 : p)) {
        const char *name, *before = p;
        size_t length, bytes, align;
        int managed;
        if (starts(p, ".param", 6))
            p += 6;
        p = declaration(p, &name, &length, &bytes, &align, &managed);
        if (p == before || function->param_count == CU_PARAMS)
            break;
        offset = (offset + align - 1) / align * align;
        function->params[function->param_count].offset = offset;
        function->params[function->param_count++].bytes = bytes;
        offset += bytes;
    }
    return p;
}

static int read_ptx(const char *text, CUmodule module)
{
    int depth = 0, header = 0;
    CUfunction last = NULL; /* in whose body we are */
    for (const char *p = skip_blank(text); *p; p = skip_blank(p)) {
        const size_t n = word_length(p);
        if (!n) {
            depth += *p == '{' ? 1 : *p == '}' ? -1 : 0;
            if (*p == '"') {
                const char *end = strchr(p + 1, '"');
                p = end ? end : p;
            }
            p++;
            continue;
        }
        header |= n == 8 && starts(p, ".version", 8);
        if (n == 6 && starts(p, ".entry", 6) && !depth) {
            p = read_entry(p + n, module);
            for (last = module->functions; last && last->next; last = last->next)
                ;
        } else if (depth && last && n == 6 && starts(p, ".local", 6)) {
            const char *name;
            size_t length = 0, bytes, align;
            int managed;
            p = declaration(p + n, &name, &length, &bytes, &align, &managed);
            last->attributes[3] += name ? (int)bytes : 0;
        } else if (!depth && n == 7 && starts(p, ".global", 7)) {
            const char *name;
            size_t length = 0, bytes, align;
            int managed;
            p = declaration(p + n, &name, &length, &bytes, &align, &managed);
            if (name && bytes)
                cu_module_add_global(module, name, length, bytes, managed);
        } else {
            p += n;
        }
    }
    return header ? 0 : -1;
}

/* ---- cubin ---- */

static const char *section_name(const unsigned char *elf, const Elf64_Ehdr *header, const Elf64_Shdr *section)
{
    const Elf64_Shdr *names = (const Elf64_Shdr *)(const void *)(elf + header->e_shoff) + header->e_shstrndx;
    return (const char *)elf + names->sh_offset + section->sh_name;
}

/* `.nv.info.<kernel>`: records of {format, attribute, size}; KPARAM_INFO holds one parameter's ordinal, offset, size. */
static void read_params(const unsigned char *data, size_t bytes, CUfunction function)
{
    for (size_t at = 0; at + 4 <= bytes;) {
        uint16_t size;
        memcpy(&size, data + at + 2, sizeof size);
        const size_t payload = data[at] == 4 ? size : 0; /* other formats keep their value in the record's head */
        if (data[at + 1] == KPARAM_INFO && payload >= 12 && at + 16 <= bytes) {
            uint16_t ordinal, offset;
            uint32_t word;
            memcpy(&ordinal, data + at + 8, sizeof ordinal);
            memcpy(&offset, data + at + 10, sizeof offset);
            memcpy(&word, data + at + 12, sizeof word);
            if (ordinal < CU_PARAMS) {
                function->params[ordinal].offset = offset;
                function->params[ordinal].bytes = word >> 18;
                if (ordinal >= function->param_count)
                    function->param_count = (size_t)ordinal + 1;
            }
        }
        at += 4 + payload;
    }
}

static void read_symbols(const unsigned char *elf, const Elf64_Shdr *sections, const Elf64_Shdr *table, CUmodule module)
{
    const Elf64_Sym *symbols = (const Elf64_Sym *)(const void *)(elf + table->sh_offset);
    const char *names = (const char *)elf + sections[table->sh_link].sh_offset;
    for (size_t i = 0; i < table->sh_size / sizeof *symbols; i++) {
        const char *name = names + symbols[i].st_name;
        if (ELF64_ST_TYPE(symbols[i].st_info) == STT_OBJECT && symbols[i].st_size && *name)
            cu_module_add_global(module, name, strlen(name), symbols[i].st_size, 0);
    }
}

static int read_cubin(const unsigned char *elf, CUmodule module)
{
    Elf64_Ehdr header;
    memcpy(&header, elf, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || !header.e_shoff || header.e_shentsize != sizeof(Elf64_Shdr))
        return -1;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(const void *)(elf + header.e_shoff);
    for (int i = 0; i < header.e_shnum; i++) {
        const char *name = section_name(elf, &header, &sections[i]);
        if (!strncmp(name, ".text.", 6))
            cu_module_add(module, name + 6, strlen(name + 6));
        if (sections[i].sh_type == SHT_SYMTAB)
            read_symbols(elf, sections, &sections[i], module);
    }
    for (int i = 0; i < header.e_shnum; i++) {
        const char *name = section_name(elf, &header, &sections[i]);
        CUfunction function = strncmp(name, ".nv.info.", 9) ? NULL : cu_module_find(module, name + 9);
        if (function)
            read_params(elf + sections[i].sh_offset, sections[i].sh_size, function);
    }
    return 0;
}

/* ---- containers ---- */

static int read_fat(const unsigned char *fat, CUmodule module)
{
    fat_header header;
    memcpy(&header, fat, sizeof header);
    int found = 0;
    for (uint64_t at = header.header_bytes; at + sizeof(fat_entry) <= header.header_bytes + header.bytes && !found;) {
        fat_entry entry;
        memcpy(&entry, fat + at, sizeof entry);
        const unsigned char *payload = fat + at + entry.header_bytes;
        if (entry.header_bytes == 0)
            return -1;
        if (entry.compressed_bytes && entry.raw_bytes)
            module->any_name = 1; /* packed with a private code: nothing to read the names from */
        else if (entry.kind == FAT_PTX)
            found = !read_ptx((const char *)payload, module);
        else if (entry.kind == FAT_ELF)
            found = !read_cubin(payload, module);
        at += entry.header_bytes + entry.bytes;
    }
    return found || module->any_name ? 0 : -1;
}

static int read_linked(const unsigned char *image, CUmodule module)
{
    cu_linked header;
    memcpy(&header, image, sizeof header);
    for (uint64_t i = 0, at = sizeof header; i < header.count; i++) {
        uint64_t bytes;
        memcpy(&bytes, image + at, sizeof bytes);
        if (cu_image_read(image + at + sizeof bytes, module))
            return -1;
        at += sizeof bytes + bytes;
    }
    return 0;
}

CUresult cu_image_read(const void *image, CUmodule module)
{
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    if (magic == (uint32_t)FAT_WRAPPER_MAGIC) {
        fat_wrapper wrapper;
        memcpy(&wrapper, image, sizeof wrapper);
        return cu_image_read(wrapper.data, module);
    }
    int bad;
    if (magic == (uint32_t)FAT_MAGIC)
        bad = read_fat(image, module);
    else if (starts(image, ELFMAG, SELFMAG))
        bad = read_cubin(image, module);
    else if (starts(image, CU_LINKED_MAGIC, 4) && starts(image, CU_LINKED_MAGIC, 8))
        bad = read_linked(image, module);
    else
        return read_ptx(image, module) ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
    return bad ? CUDA_ERROR_INVALID_IMAGE : CUDA_SUCCESS;
}

size_t cu_image_bytes(const void *image)
{
    uint32_t magic;
    memcpy(&magic, image, sizeof magic);
    if (magic == (uint32_t)FAT_WRAPPER_MAGIC) {
        fat_wrapper wrapper;
        memcpy(&wrapper, image, sizeof wrapper);
        return cu_image_bytes(wrapper.data);
    }
    if (magic == (uint32_t)FAT_MAGIC) {
        fat_header header;
        memcpy(&header, image, sizeof header);
        return header.header_bytes + header.bytes;
    }
    if (starts(image, ELFMAG, SELFMAG)) {
        Elf64_Ehdr header;
        memcpy(&header, image, sizeof header);
        const size_t sections = header.e_shoff + (size_t)header.e_shnum * header.e_shentsize;
        const size_t segments = header.e_phoff + (size_t)header.e_phnum * header.e_phentsize;
        return sections > segments ? sections : segments;
    }
    if (starts(image, CU_LINKED_MAGIC, 4) && starts(image, CU_LINKED_MAGIC, 8)) {
        cu_linked header;
        memcpy(&header, image, sizeof header);
        return header.bytes;
    }
    return strlen(image) + 1;
}
