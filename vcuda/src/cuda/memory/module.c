/* Code on the card: modules and libraries, charged by what loading them takes.
 *
 * What the image may take is reserved before the driver is called. Code for one kind of card (PTX, cubin) is then charged
 * so. A fat binary or a library holds code for many kinds of which little is loaded, lazily by default: it is charged what
 * the card's free memory fell by, up to its size; if its size does not fit, it is loaded first and refused by what it took.
 * A fall beyond the image's size means variables without data in the image, or another process at work in the same
 * moment: then it is unloaded and loaded again, and the least that any of these calls moved decides. */
#include <elf.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "cuda/memory/charge.h"

#define VC__CODE_STEP 65536u /* images are charged in steps of this */
#define VC__ROUNDS 5         /* of unloading and loading again; a neighbour disturbs one of ten calls, but not all of them */
#define VC__FAT_WRAPPER 0x466243b1u
#define VC__FAT_BINARY 0xba55ed50u

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

/* What loading an image may take. */
struct need {
    uint64_t bytes;
    bool upper_bound; /* bytes hold more than the card's own code: not fitting proves nothing */
};

struct loading {
    struct vc_charge charge;
    struct need need;
    int64_t left;      /* of the card when the load began, without what this process takes and gives back elsewhere */
    unsigned rounds;   /* of unloading and loading again, so far */
    uint64_t least;    /* that any of them moved */
    uint64_t extra;    /* what it takes, if that is more than the image explains */
};

static uint64_t elf_bytes(const Elf64_Ehdr *header)
{
    uint64_t sections = header->e_shoff + (uint64_t)header->e_shnum * header->e_shentsize;
    uint64_t segments = header->e_phoff + (uint64_t)header->e_phnum * header->e_phentsize;
    return sections > segments ? sections : segments;
}

static bool is_text(unsigned char byte)
{
    return (byte >= ' ' && byte <= '~') || byte == '\n' || byte == '\r' || byte == '\t';
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
        return (struct need){vc_round_up(header.header_bytes + header.bytes, VC__CODE_STEP), true};
    }
    if (memcmp(image, ELFMAG, SELFMAG) == 0)
        return (struct need){vc_round_up(elf_bytes(image), VC__CODE_STEP), false};
    if (is_text(*(const unsigned char *)image)) /* PTX ends with a zero; its code is of about the same size */
        return (struct need){vc_round_up(strlen(image) + 1, VC__CODE_STEP), false};
    return (struct need){0};
}

static struct need need_of_file(const char *path)
{
    struct need need = {0};
    struct stat status;
    uint32_t magic = 0;
    int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (file < 0)
        return need; /* the driver says what is wrong */
    if (fstat(file, &status) == 0 && pread(file, &magic, sizeof magic, 0) == (ssize_t)sizeof magic)
        need = (struct need){vc_round_up((uint64_t)status.st_size + 1, VC__CODE_STEP), magic == VC__FAT_BINARY};
    close(file);
    return need;
}

/* Free memory of the card as if this process had no ledger: its threads may allocate and free while another loads. */
static int64_t left_now(const struct vc_charge *charge)
{
    size_t free_bytes = 0, total_bytes;
    struct vc_slot *own = vc_region_slot(charge->region);
    if (vc_real.cuMemGetInfo_v2)
        vc_real.cuMemGetInfo_v2(&free_bytes, &total_bytes);
    return (int64_t)(free_bytes + (own ? vc_load(&own->cards[charge->card].committed_bytes) : 0));
}

static CUresult begin_load(struct loading *loading, struct need need)
{
    struct vc_region *region = vc_region_get();
    struct vc_charge *charge = &loading->charge;
    *loading = (struct loading){.charge = {.region = region, .card = VC_CARD_UNKNOWN}, .need = need};
    if (region->state == VC_REGION_DAMAGED)
        return CUDA_SUCCESS; /* computing is allowed then, and takes code */
    CUresult result = vc_charge_current(charge, need.upper_bound ? 0 : need.bytes);
    if (result != CUDA_SUCCESS || charge->card < 0)
        return result;
    if (need.upper_bound && vc_quota_reserve(region, (uint32_t)charge->card, need.bytes))
        charge->reserved = need.bytes;
    loading->left = left_now(charge);
    return CUDA_SUCCESS;
}

/* The card's memory fell by more than the image explains: unload it and see what that gives back. True: load it once more.
 * False: it does take that much, which is over the limit; nothing is charged. */
static bool take_back(struct loading *loading, uint64_t fell, void *handle, CUresult (*unload)(void *))
{
    struct vc_charge *charge = &loading->charge;
    int64_t before = left_now(charge);
    unload(handle);
    loading->left = left_now(charge);
    uint64_t rose = loading->left > before ? (uint64_t)(loading->left - before) : 0;
    uint64_t moved = rose < fell ? rose : fell;
    loading->least = loading->rounds == 0 || moved < loading->least ? moved : loading->least;
    loading->rounds = loading->least > loading->need.bytes ? loading->rounds + 1 : VC__ROUNDS;
    if (loading->rounds < VC__ROUNDS || loading->least <= loading->need.bytes)
        return true;
    loading->extra = loading->least;
    if (vc_charge_resize(charge, loading->extra))
        return true;
    vc_charge_drop(charge);
    return false;
}

/* Record what was loaded, at what it took. False: it does not fit and is unloaded again; nothing is charged. */
static bool hold(struct loading *loading, uint64_t fell, void *handle, CUresult (*unload)(void *))
{
    struct vc_charge *charge = &loading->charge;
    uint64_t cost = loading->need.bytes;
    if (loading->extra)
        cost = loading->extra;
    else if (loading->need.upper_bound && fell < cost)
        cost = fell;
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
    if (loading->charge.card < 0)
        return false;
    if (*result != CUDA_SUCCESS) {
        vc_charge_drop(&loading->charge);
        return false;
    }
    int64_t now = left_now(&loading->charge);
    uint64_t fell = now < loading->left ? (uint64_t)(loading->left - now) : 0;
    bool held;
    if (fell > loading->need.bytes && loading->rounds < VC__ROUNDS) {
        held = take_back(loading, fell, *handle, unload);
        if (held)
            return true;
    } else {
        held = hold(loading, fell, *handle, unload);
    }
    if (!held) {
        *handle = NULL;
        *result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    return false;
}

static CUresult unload_module(void *module)
{
    return vc_real.cuModuleUnload(module);
}

static CUresult unload_library(void *library)
{
    return vc_real.cuLibraryUnload(library);
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

/* A library has no context of its own: most of it is loaded with the first use of a kernel. */
static struct need need_of_library(struct need need)
{
    return (struct need){need.bytes, true};
}

VC__LOAD(cuLibraryLoadData, library, need_of_library(need_of_image(image)), unload_library,
         (CUlibrary *library, const void *image, CUjit_option *options, void **values, unsigned int count,
          CUlibraryOption *library_options, void **library_values, unsigned int library_count),
         (library, image, options, values, count, library_options, library_values, library_count))
VC__LOAD(cuLibraryLoadFromFile, library, need_of_library(need_of_file(path)), unload_library,
         (CUlibrary *library, const char *path, CUjit_option *options, void **values, unsigned int count,
          CUlibraryOption *library_options, void **library_values, unsigned int library_count),
         (library, path, options, values, count, library_options, library_values, library_count))

static CUresult unload(void *handle, CUresult (*call)(void *))
{
    struct vc_freeing freeing;
    bool known = vc_charge_take((uint64_t)(uintptr_t)handle, &freeing);
    CUresult result = call(handle);
    if (known)
        vc_charge_freed(&freeing, result);
    return result;
}

CUresult vc_hook_cuModuleUnload(CUmodule module)
{
    return unload(module, unload_module);
}

CUresult vc_hook_cuLibraryUnload(CUlibrary library)
{
    return unload(library, unload_library);
}
