/* The exported dlsym, dlvsym, dlopen and dlmopen: a question first, then a jump, so that libc sees the caller's own return
 * address. RTLD_NEXT, RTLD_DEFAULT, RUNPATH and the caller's namespace all depend on it.
 *
 * RTLD_DEEPBIND is taken out of dlopen's and dlmopen's flags: a library that is opened with it finds the real driver, and libc's
 * dlsym, before us. (The sanitizers of gcc and clang do not allow it for the same reason.) */
#include "preload/choose.h"
#include "preload/libc.h"
#include "preload/preload.h"
#include "preload/reals.h"

/* Not the names that names.h gives them. */
#undef dlsym
#undef dlopen

#define VC__NOT_DEEPBIND "0xfffffff7"

#define VC__IN_REGISTER __attribute__((unused))
#define VC__EXPORTED __attribute__((naked, used, visibility("default")))

/* Offsets in struct vc_libc. */
#define VC__DLSYM "0"
#define VC__DLVSYM "8"
#define VC__DLOPEN "16"
#define VC__DLMOPEN "24"
_Static_assert(__builtin_offsetof(struct vc_libc, vsym) == 8 && __builtin_offsetof(struct vc_libc, open) == 16 &&
                   __builtin_offsetof(struct vc_libc, mopen) == 24,
               "the jumps below");

VC__EXPORTED void *vc_jump_dlsym(void *handle, const char *name);
VC__EXPORTED void *vc_jump_dlvsym(void *handle, const char *name, const char *version);
VC__EXPORTED void *vc_jump_dlopen(const char *file, int flags);
VC__EXPORTED void *vc_jump_dlmopen(long space, const char *file, int flags);

/* Exported under libc's names, in both of glibc's versions: preload.map. */
#define VC__VERSIONS(name, old)                                                             \
    __asm__(".globl vc_jump_" #name "_before\n\t"                                           \
            ".set vc_jump_" #name "_before, vc_jump_" #name "\n\t"                          \
            ".symver vc_jump_" #name "_before, " #name "@" old "\n\t"                       \
            ".symver vc_jump_" #name ", " #name "@@GLIBC_2.34")
VC__VERSIONS(dlsym, "GLIBC_2.2.5");
VC__VERSIONS(dlvsym, "GLIBC_2.2.5");
VC__VERSIONS(dlopen, "GLIBC_2.2.5");
VC__VERSIONS(dlmopen, "GLIBC_2.3.4");

void *vc_jump_dlsym(void *handle VC__IN_REGISTER, const char *name VC__IN_REGISTER)
{
    __asm__("endbr64\n\t"
            "push %rdi\n\t"
            "push %rsi\n\t"
            "sub $8, %rsp\n\t"
            "xor %edx, %edx\n\t"
            "call vc_preload_choose\n\t"
            "add $8, %rsp\n\t"
            "pop %rsi\n\t"
            "pop %rdi\n\t"
            "cmp $1, %rax\n\t"
            "jb 1f\n\t"
            "jne 2f\n\t"
            "xor %eax, %eax\n"
            "2:\n\t"
            "ret\n"
            "1:\n\t"
            "jmp *vc_libc+" VC__DLSYM "(%rip)");
}

void *vc_jump_dlvsym(void *handle VC__IN_REGISTER, const char *name VC__IN_REGISTER, const char *version VC__IN_REGISTER)
{
    __asm__("endbr64\n\t"
            "push %rdi\n\t"
            "push %rsi\n\t"
            "push %rdx\n\t"
            "call vc_preload_choose\n\t"
            "pop %rdx\n\t"
            "pop %rsi\n\t"
            "pop %rdi\n\t"
            "cmp $1, %rax\n\t"
            "jb 1f\n\t"
            "jne 2f\n\t"
            "xor %eax, %eax\n"
            "2:\n\t"
            "ret\n"
            "1:\n\t"
            "jmp *vc_libc+" VC__DLVSYM "(%rip)");
}

void *vc_jump_dlopen(const char *file VC__IN_REGISTER, int flags VC__IN_REGISTER)
{
    __asm__("endbr64\n\t"
            "push %rdi\n\t"
            "push %rsi\n\t"
            "sub $8, %rsp\n\t"
            "call vc_libc_find\n\t"
            "add $8, %rsp\n\t"
            "pop %rsi\n\t"
            "pop %rdi\n\t"
            "and $" VC__NOT_DEEPBIND ", %esi\n\t"
            "jmp *vc_libc+" VC__DLOPEN "(%rip)");
}

void *vc_jump_dlmopen(long space VC__IN_REGISTER, const char *file VC__IN_REGISTER, int flags VC__IN_REGISTER)
{
    __asm__("endbr64\n\t"
            "push %rsi\n\t"
            "push %rdx\n\t"
            "sub $8, %rsp\n\t"
            "call vc_preload_space\n\t"
            "mov %rax, %rdi\n\t"
            "add $8, %rsp\n\t"
            "pop %rdx\n\t"
            "pop %rsi\n\t"
            "and $" VC__NOT_DEEPBIND ", %edx\n\t"
            "jmp *vc_libc+" VC__DLMOPEN "(%rip)");
}

void *vc_preload_lookup(bool versioned)
{
    return versioned ? (void *)vc_jump_dlvsym : (void *)vc_jump_dlsym;
}

void vc_preload_load(bool cuda)
{
    (cuda ? vc_preload_cuda_load : vc_preload_nvml_load)();
}

bool vc_preload_has(const char *name, bool cuda)
{
    return (cuda ? vc_preload_cuda_has : vc_preload_nvml_has)(name);
}
