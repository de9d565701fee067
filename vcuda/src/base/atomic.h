/* Atomic access to the plain words of the region's ABI, which other processes read and write at the same time. */
#ifndef VC_ATOMIC_H
#define VC_ATOMIC_H

#include <stdbool.h>
#include <stdint.h>

#define VC_LIKELY(x) __builtin_expect(!!(x), 1)
#define VC_UNLIKELY(x) __builtin_expect(!!(x), 0)

/* The suffix names the order: _relaxed, _acquire/_release, none = sequentially consistent. */
#define vc_load(p) __atomic_load_n((p), __ATOMIC_SEQ_CST)
#define vc_load_acquire(p) __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define vc_load_relaxed(p) __atomic_load_n((p), __ATOMIC_RELAXED)
#define vc_store(p, v) __atomic_store_n((p), (v), __ATOMIC_SEQ_CST)
#define vc_store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define vc_store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define vc_add(p, v) __atomic_add_fetch((p), (v), __ATOMIC_SEQ_CST)
#define vc_add_relaxed(p, v) __atomic_add_fetch((p), (v), __ATOMIC_RELAXED)
#define vc_sub(p, v) __atomic_sub_fetch((p), (v), __ATOMIC_SEQ_CST)

/* Raise *word to at least value. */
static inline void vc_raise_to(uint64_t *word, uint64_t value)
{
    uint64_t seen = vc_load_relaxed(word);
    while (seen < value && !__atomic_compare_exchange_n(word, &seen, value, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        ;
}

static inline void vc_cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
