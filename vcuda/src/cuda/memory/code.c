/* Code on the card: modules and libraries, charged by what loading them takes.
 *
 * An image for one kind of card (PTX, cubin) says how large its code and its variables are: that is charged before the driver is
 * called. A fat binary holds code for many kinds, of which little is loaded: it is charged what the card's free memory fell by, up
 * to its size and the largest of its kinds' variables; if that does not fit, it is loaded first and refused by what it took.
 * A fall beyond that means compressed variables, or another process at work in the same moment: then it is loaded again, a few
 * times at most, and the least that a load and its end moved decides. A library's code is loaded with the first use of a kernel, but its variables are there for the
 * asking: they are charged in each context that looks into it. Code that is loaded lazily is overhead, which is measured. */
#include <elf.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/table.h"
#include "cuda/driver/owner.h"
#include "cuda/memory/account.h"
#include "cuda/memory/code.h"

#define VC__CODE_STEP 65536u /* images are charged in steps of this */
#define VC__FAT_WRAPPER 0x466243b1u
#define VC__FAT_BINARY 0xba55ed50u
#define VC__ROUNDS 5u /* loads of one image */
#define VC__CONTEXTS 16 /* that a library's variables are remembered in */

struct fat_wrapper {
    uint32_t magic, version;
    const void *data;
    const void *names;
};

struct fat_header {
    uint32_t magic;
    uint16_t version, header_bytes;
    uint64_t bytes;
};

struct fat_entry { /* the beginning of one */
    uint16_t kind, version;
    uint32_t header_bytes;
    uint64_t bytes;
};

/* What loading an image may take. */
struct need {
    uint64_t code;
    uint64_t variables; /* without data in the image */
    bool upper_bound;   /* code for other cards is in it: not fitting proves nothing */
};

static uint64_t elf_bytes(const Elf64_Ehdr *header)
{
    uint64_t sections = header->e_shoff + (uint64_t)header->e_shnum * header->e_shentsize;
    uint64_t segments = header->e_phoff + (uint64_t)header->e_phnum * header->e_phentsize;
    return sections > segments ? sections : segments;
}

/* Bytes of the sections .nv.global, which hold variables without data. */
static uint64_t elf_variables(const Elf64_Ehdr *header)
{
    const char *image = (const char *)header;
    uint64_t bytes = 0;
    if (header->e_shentsize != sizeof(Elf64_Shdr) || header->e_shstrndx >= header->e_shnum)
        return 0;
    const Elf64_Shdr *sections = (const Elf64_Shdr *)(image + header->e_shoff);
    const char *names = image + sections[header->e_shstrndx].sh_offset;
    for (unsigned section = 0; section < header->e_shnum; section++) {
        if (sections[section].sh_type == SHT_NOBITS && strcmp(names + sections[section].sh_name, ".nv.global") == 0)
            bytes += sections[section].sh_size;
    }
    return bytes;
}

static bool is_space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

/* Bytes of one declaration, `.align 4 .b8 name[4][1024]` up to its end. */
static uint64_t ptx_variable(const char *text)
{
    uint64_t bytes = 0;
    for (; *text && *text != ';' && *text != '='; text++) {
        char *end;
        if (text[0] == '.' && strchr("busf", text[1]) && text[2] >= '0' && text[2] <= '9') {
            bytes = (strtoull(text + 2, &end, 10) + 7) / 8 * (bytes ? bytes : 1);
            text = end - 1;
        } else if (text[0] == '.' && text[1] == 'v' && (text[2] == '2' || text[2] == '4')) {
            bytes = (uint64_t)(text[2] - '0') * (bytes ? bytes : 1);
        } else if (text[0] == '[') {
            bytes = vc_times(bytes, strtoull(text + 1, &end, 0));
        }
    }
    return bytes;
}

static uint64_t ptx_variables(const char *text)
{
    uint64_t bytes = 0;
    for (const char *at = text; (at = strstr(at, ".global")); at += 7) {
        if ((at == text || is_space(at[-1])) && is_space(at[7])) {
            uint64_t one = ptx_variable(at + 7);
            bytes = one > UINT64_MAX - bytes ? UINT64_MAX : bytes + one;
        }
    }
    return bytes;
}

static bool is_text(unsigned char byte)
{
    return (byte >= ' ' && byte <= '~') || byte == '\n' || byte == '\r' || byte == '\t';
}

static struct need need_of_image(const void *image);

/* The largest variables of any kind of card that a fat binary has code for; those of compressed code are not known. */
static uint64_t fat_variables(const struct fat_header *header)
{
    const char *at = (const char *)header + header->header_bytes, *end = at + header->bytes;
    uint64_t most = 0;
    while ((size_t)(end - at) > sizeof(struct fat_entry)) {
        struct fat_entry entry;
        memcpy(&entry, at, sizeof entry);
        if (entry.header_bytes < sizeof entry || entry.header_bytes > (size_t)(end - at) ||
            entry.bytes > (size_t)(end - at) - entry.header_bytes)
            break;
        const char *code = at + entry.header_bytes;
        uint64_t one = 0;
        if (entry.bytes > sizeof(Elf64_Ehdr) && memcmp(code, ELFMAG, SELFMAG) == 0)
            one = elf_variables((const Elf64_Ehdr *)code);
        else if (entry.bytes > 0 && is_text(*(const unsigned char *)code) && memchr(code, 0, entry.bytes))
            one = ptx_variables(code);
        most = one > most ? one : most;
        at = code + entry.bytes;
    }
    return most;
}

static struct need need_of_image(const void *image)
{
    uint32_t magic;
    if (!image)
        return (struct need){0};
    memcpy(&magic, image, sizeof magic);
    if (magic == VC__FAT_WRAPPER) {
        struct fat_wrapper wrapper;
        memcpy(&wrapper, image, sizeof wrapper);
        return need_of_image(wrapper.data);
    }
    if (magic == VC__FAT_BINARY) {
        struct fat_header header;
        memcpy(&header, image, sizeof header);
        return (struct need){header.header_bytes + header.bytes, fat_variables(image), true};
    }
    if (memcmp(image, ELFMAG, SELFMAG) == 0)
        return (struct need){elf_bytes(image), elf_variables(image), false};
    if (is_text(*(const unsigned char *)image)) /* PTX ends with a zero; its code is of about the same size */
        return (struct need){strlen(image) + 1, ptx_variables(image), false};
    return (struct need){0};
}

/* Its own copy in memory, with a zero at the end, so that nothing is read beyond a file that is cut. */
static struct need need_of_file(const char *path)
{
    struct need need = {0};
    struct stat status;
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return need; /* the driver says what is wrong */
    if (fstat(file, &status) == 0 && S_ISREG(status.st_mode) && (size_t)status.st_size > sizeof(Elf64_Ehdr)) {
        char *image = malloc((size_t)status.st_size + 1);
        ssize_t got = image ? read(file, image, (size_t)status.st_size) : -1;
        if (got > (ssize_t)sizeof(Elf64_Ehdr)) {
            const Elf64_Ehdr *elf = (const Elf64_Ehdr *)image;
            struct fat_header fat;
            image[got] = '\0';
            memcpy(&fat, image, sizeof fat);
            need.code = (uint64_t)got + 1;
            need.upper_bound = fat.magic == VC__FAT_BINARY;
            bool whole = memcmp(image, ELFMAG, SELFMAG) == 0 ? elf_bytes(elf) <= (uint64_t)got
                                                             : !need.upper_bound || fat.header_bytes + fat.bytes <= (uint64_t)got;
            if (whole)
                need.variables = need_of_image(image).variables;
        }
        free(image);
    }
    close(file);
    return need;
}

/* Modules. */

struct loading {
    struct vc_charge charge;
    struct need need;
    uint64_t most; /* that the image explains */
    int64_t left;  /* of the card when the load began, without what this process takes and gives back elsewhere */
    uint64_t moved; /* by a load and its end, the least of all rounds that moved more than the image explains */
    unsigned rounds;
};

static uint64_t fallen(int64_t from, int64_t to)
{
    return to < from ? (uint64_t)(from - to) : 0;
}

static CUresult begin_load(struct loading *loading, struct need need)
{
    struct vc_charge *charge = &loading->charge;
    uint64_t most = need.variables > UINT64_MAX - need.code ? UINT64_MAX : vc_round_up(need.code + need.variables, VC__CODE_STEP);
    *loading = (struct loading){.need = need, .most = most};
    if (vc_card_of_current(NULL) == VC_CARD_LOST)
        return CUDA_SUCCESS; /* nothing of it is launched then */
    CUresult result = vc_charge_current(charge, need.upper_bound ? need.variables : most);
    if (result != CUDA_SUCCESS || !charge->cards || !need.upper_bound)
        return result;
    if (vc_cards_reserve(charge->cards, most - charge->reserved))
        charge->reserved = most;
    loading->left = vc_left_on_card(charge);
    return CUDA_SUCCESS;
}

/* Record what was loaded, at what it took. False: it does not fit and is unloaded again; nothing is charged. */
static bool hold(struct loading *loading, uint64_t cost, void *handle, CUresult (*unload)(void *))
{
    struct vc_charge *charge = &loading->charge;
    bool fits = vc_charge_resize(charge, cost);
    if (fits && (cost == 0 || vc_charge_keep_opaque(charge, handle)))
        return true;
    unload(handle);
    if (!fits)
        vc_charge_drop(charge);
    return false;
}

/* After the driver's answer. True: call it again. */
static bool weigh(struct loading *loading, CUresult *result, void **handle, CUresult (*unload)(void *))
{
    uint64_t cost = loading->most;
    if (!loading->charge.cards)
        return false;
    if (*result != CUDA_SUCCESS) {
        vc_charge_drop(&loading->charge);
        return false;
    }
    if (loading->need.upper_bound) {
        int64_t now = vc_left_on_card(&loading->charge);
        uint64_t fell = fallen(loading->left, now);
        if (fell > loading->most && loading->rounds < VC__ROUNDS) {
            unload(*handle);
            loading->left = vc_left_on_card(&loading->charge);
            uint64_t rose = fallen(loading->left, now); /* from what it is without to what it was with */
            uint64_t moved = rose < fell ? rose : fell;
            loading->moved = loading->rounds == 0 || moved < loading->moved ? moved : loading->moved;
            loading->rounds = loading->moved > loading->most ? loading->rounds + 1 : VC__ROUNDS;
            return true;
        }
        uint64_t most = loading->moved > loading->most ? loading->moved : loading->most;
        cost = fell < most ? fell : most;
        cost = cost > loading->need.variables ? cost : loading->need.variables;
    }
    if (hold(loading, cost, *handle, unload))
        return false;
    *handle = NULL;
    *result = CUDA_ERROR_OUT_OF_MEMORY;
    return false;
}

static CUresult unload_module(void *module)
{
    return vc_real.cuModuleUnload(module);
}

#define VC__LOAD(name, handle, need, unload, parameters, arguments)                              \
    CUresult vc_hook_##name parameters                                                           \
    {                                                                                            \
        struct loading loading;                                                                  \
        if (!handle)                                                                             \
            return vc_real.name arguments;                                                       \
        CUresult result = begin_load(&loading, need);                                            \
        if (result != CUDA_SUCCESS)                                                              \
            return result;                                                                       \
        do {                                                                                     \
            result = vc_real.name arguments;                                                     \
        } while (weigh(&loading, &result, (void **)handle, unload));                             \
        return result;                                                                           \
    }

VC__LOAD(cuModuleLoad, module, need_of_file(path), unload_module, (CUmodule *module, const char *path), (module, path))
VC__LOAD(cuModuleLoadData, module, need_of_image(image), unload_module, (CUmodule *module, const void *image), (module, image))
VC__LOAD(cuModuleLoadDataEx, module, need_of_image(image), unload_module,
         (CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values),
         (module, image, count, options, values))
VC__LOAD(cuModuleLoadFatBinary, module, need_of_image(image), unload_module, (CUmodule *module, const void *image),
         (module, image))

static CUresult unload(void *handle, CUresult (*call)(void *))
{
    struct vc_allocation freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)handle, &freeing);
    CUresult result = call(handle);
    if (known)
        vc_charge_freed(&freeing, result);
    vc_frames_forget();
    return result;
}

CUresult vc_module_unload(CUmodule module)
{
    return unload(module, unload_module);
}

/* Libraries. */

struct library {
    uint64_t key; /* its handle */
    uint64_t bytes; /* in each context: its variables, and its code if it is for one kind of card */
    uint32_t count;
    CUcontext contexts[VC__CONTEXTS]; /* in which they are charged */
};
VC_TABLE(libraries, struct library);

/* Under which a library's variables in a context are recorded; no handle or address is odd. */
static uint64_t key_in(uint64_t library, CUcontext context)
{
    return (library * 0x9e3779b97f4a7c15u ^ (uint64_t)(uintptr_t)context) | 1;
}

static enum vc_table_edit add_context(void *record, void *context)
{
    struct library *library = record;
    if (library->count < VC__CONTEXTS)
        library->contexts[library->count++] = context;
    return VC_TABLE_KEEP;
}

/* The library's variables are loaded into a context, or about to be. */
static CUresult enter(CUlibrary handle, CUcontext context, int card)
{
    struct library library;
    struct vc_charge charge;
    if (card < 0 || !vc_table_get(&libraries, (uint64_t)(uintptr_t)handle, &library) || library.bytes == 0)
        return CUDA_SUCCESS;
    context = vc_context_owner(context);
    uint64_t key = key_in(library.key, context);
    struct vc_allocation charged;
    if (vc_account_get(key, &charged))
        return CUDA_SUCCESS;
    CUresult result = vc_charge_cards(&charge, 1u << card, library.bytes);
    if (result != CUDA_SUCCESS)
        return result;
    charge.context = context;
    if (!vc_charge_keep_opaque(&charge, (const void *)(uintptr_t)key))
        return CUDA_ERROR_OUT_OF_MEMORY;
    vc_table_edit(&libraries, library.key, false, add_context, context);
    return CUDA_SUCCESS;
}

static CUresult enter_context(CUlibrary handle)
{
    CUcontext context = NULL;
    int card = vc_card_of_current(&context);
    return enter(handle, context, card);
}

/* Work in a stream is work in its context, whichever is current. */
static CUresult enter_of_stream(CUlibrary handle, CUstream stream)
{
    CUdevice device;
    CUcontext context;
    if (!vc_stream_device(stream ? stream : CU_STREAM_LEGACY, &device, &context))
        return CUDA_SUCCESS;
    return enter(handle, context, vc_card_of_device(device));
}

/* Give back what its variables took in all contexts. */
static void leave_contexts(const struct library *library)
{
    for (uint32_t index = 0; index < library->count; index++) {
        struct vc_allocation freeing;
        if (vc_charge_take(key_in(library->key, library->contexts[index]), &freeing))
            vc_charge_freed(&freeing, CUDA_SUCCESS);
    }
}

/* Kernels: launched in a context that has not used the library, they bring it there. */

struct kernel {
    uint64_t key;
    CUlibrary library;
};
VC_TABLE(kernels, struct kernel);

static void remember_kernel(CUkernel kernel, CUlibrary library)
{
    struct kernel record = {(uint64_t)(uintptr_t)kernel, library};
    vc_table_put(&kernels, &record);
}

static bool is_of(const void *record, const void *library)
{
    return ((const struct kernel *)record)->library == library;
}

static void forget_kernels(CUlibrary library)
{
    size_t count;
    free(vc_table_take_all(&kernels, is_of, library, &count));
    vc_frames_forget();
}

CUresult vc_launch_pay_first(CUfunction function, CUstream stream)
{
    struct kernel kernel;
    CUresult result = vc_stream_pay(stream);
    if (result != CUDA_SUCCESS || vc_frame_is_paid(function))
        return result;
    bool of_library = vc_table_get(&kernels, (uint64_t)(uintptr_t)function, &kernel);
    result = of_library ? enter_of_stream(kernel.library, stream) : CUDA_SUCCESS;
    return result != CUDA_SUCCESS ? result : vc_frame_pay(function, stream, of_library);
}

static CUresult end_library(CUresult result, CUlibrary *handle, struct need need)
{
    if (result != CUDA_SUCCESS)
        return result;
    struct library library = {.key = (uint64_t)(uintptr_t)*handle,
                              .bytes = vc_round_up(need.variables + (need.upper_bound ? 0 : need.code), VC__CODE_STEP)};
    result = vc_table_put(&libraries, &library) ? enter_context(*handle) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result != CUDA_SUCCESS) {
        vc_table_take(&libraries, library.key, &library);
        vc_real.cuLibraryUnload(*handle);
        *handle = NULL;
    }
    return result;
}

CUresult vc_hook_cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options, void **values, unsigned int count,
                                   CUlibraryOption *library_options, void **library_values, unsigned int library_count)
{
    CUresult result = vc_real.cuLibraryLoadData(library, image, options, values, count, library_options, library_values, library_count);
    return end_library(result, library, result == CUDA_SUCCESS ? need_of_image(image) : (struct need){0});
}

CUresult vc_hook_cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options, void **values, unsigned int count,
                                       CUlibraryOption *library_options, void **library_values, unsigned int library_count)
{
    CUresult result =
        vc_real.cuLibraryLoadFromFile(library, path, options, values, count, library_options, library_values, library_count);
    return end_library(result, library, result == CUDA_SUCCESS ? need_of_file(path) : (struct need){0});
}

CUresult vc_library_unload(CUlibrary handle)
{
    struct library library;
    bool known = vc_table_take(&libraries, (uint64_t)(uintptr_t)handle, &library);
    CUresult result = vc_real.cuLibraryUnload(handle);
    forget_kernels(handle);
    if (known && result == CUDA_SUCCESS)
        leave_contexts(&library);
    else if (known)
        vc_table_put(&libraries, &library);
    return result;
}

CUresult vc_hook_cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)
{
    CUresult result = enter_context(library);
    return result != CUDA_SUCCESS ? result : vc_real.cuLibraryGetGlobal(pointer, bytes, library, name);
}

CUresult vc_hook_cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    CUresult result = enter_context(library);
    return result != CUDA_SUCCESS ? result : vc_real.cuLibraryGetModule(module, library);
}

CUresult vc_hook_cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    CUresult result = enter_context(library);
    if (result == CUDA_SUCCESS)
        result = vc_real.cuLibraryGetKernel(kernel, library, name);
    if (result == CUDA_SUCCESS)
        remember_kernel(*kernel, library);
    return result;
}

/* The function is the current context's own, so the code comes there. */
CUresult vc_hook_cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    struct kernel known;
    CUresult result = vc_table_get(&kernels, (uint64_t)(uintptr_t)kernel, &known) ? enter_context(known.library) : CUDA_SUCCESS;
    return result != CUDA_SUCCESS ? result : vc_real.cuKernelGetFunction(function, kernel);
}
