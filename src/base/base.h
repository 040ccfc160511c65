/*
 * base.h - what every layer uses: errors, memory, half-precision numbers, the code path in use.
 */
#ifndef OSCAR_BASE_H
#define OSCAR_BASE_H

#include <stdatomic.h>
#include <string.h>

#include "oscar/oscar.h"

/* Fills *error (NULL is allowed) and returns status. position: -1 when there is none. */
oscar_status error_set(oscar_error *error, oscar_status status, int64_t position,
                       const char *format, ...) __attribute__((format(printf, 4, 5)));

/* Zeroed memory aligned to 64 bytes; NULL when there is none or count * size overflows. */
void *aligned_calloc(size_t count, size_t size);
void aligned_free(void *memory);
/* Address space that costs memory only where it is touched, zeroed, 4 KiB aligned; released with
 * the same size. NULL when there is none. */
void *region_reserve(size_t bytes);
/* Asks for large pages in a region that is read in small pieces all over. */
void region_prefer_large(void *memory, size_t bytes);
void region_release(void *memory, size_t bytes);

#define ALIGN64(n) (((n) + 63) & ~(size_t)63)

/* a * b into *out; false when it overflows. */
static inline bool size_mul(size_t a, size_t b, size_t *out) { return !__builtin_mul_overflow(a, b, out); }
static inline bool size_add(size_t a, size_t b, size_t *out) { return !__builtin_add_overflow(a, b, out); }

/* The instruction sets that have code of their own, in rising order: those of x86-64, those of AArch64.
 * A processor runs those below its best, but for AVXVNNI, which some with AVX-512 lack. */
typedef enum isa {
    ISA_REF = 0, ISA_AVX2 = 1, ISA_AVXVNNI = 2, ISA_AVX512 = 3, ISA_AVX512VNNI = 4, ISA_AVX512VBMI = 5, ISA_AMX = 6,
    ISA_NEON = 7, ISA_NEONDOT = 8,
    ISA_COUNT
} isa;
/* As OSCAR_ISA and oscar_isa_select() know them. */
extern const char *const isa_names[ISA_COUNT];
/* The one in use: what the processor allows, or what OSCAR_ISA or oscar_isa_select() force. An
 * OSCAR_ISA that this machine cannot run changes nothing here: isa_check() refuses it. */
isa isa_current(void);
/* Refuses an OSCAR_ISA that names no path of this machine, unless oscar_isa_select() chose one since. */
oscar_status isa_check(oscar_error *error);
/* Whether to ask for memory into the nearest cache. AMD's drop a good part of what is asked for into the second one where its
 * translation is not at hand; Intel's nearest caches take few lines at a time, so the second one it is there. */
bool isa_asks_near(void);
/* The best one for the given CPUID and XCR0 bits; a function of its arguments, for the tests. */
isa isa_from_cpuid(uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx,
                   uint32_t leaf7_1_eax, uint64_t xcr0);
/* The same from what Linux tells of an AArch64 processor. */
isa isa_from_hwcap(unsigned long hwcap);

/* The smallest floats, which processors handle slowly, are zeros for this thread from here on, as results and as operands.
 * Returns what floats_restore() wants. */
static inline uint64_t floats_flush(void) {
#if defined(__x86_64__)
    const uint32_t before = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(before | 0x8040); /* FTZ, DAZ */
    return before;
#elif defined(__aarch64__)
    uint64_t before;
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | 1u << 24)); /* FZ */
    return before;
#else
    return 0;
#endif
}

static inline void floats_restore(uint64_t before) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((uint32_t)before);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(before));
#else
    (void)before;
#endif
}

/* Conversions that give the same bits on every path: round to nearest even, overflow of finite
 * values saturates to the largest finite fp16 (OSCAR stores no infinities). */
static inline float bits_float(uint32_t u) {
    float f;
    memcpy(&f, &u, 4);
    return f;
}
static inline uint32_t float_bits(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    return u;
}
static inline float bf16_to_float(uint16_t h) { return bits_float((uint32_t)h << 16); }
static inline uint16_t bf16_from_float(float f) {
    uint32_t u = float_bits(f);
    if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 0x40); /* quiet NaN */
    return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}
float fp16_to_float(uint16_t h);
uint16_t fp16_from_float(float f);

/* A barrier for threads that spin: they were started together and wait microseconds. */
typedef struct spin_barrier {
    atomic_int arrived;
    atomic_int round;
} spin_barrier;
void spin_barrier_init(spin_barrier *barrier);
void spin_barrier_wait(spin_barrier *barrier, int n_threads);

#endif
