/*
 * isa.c - which code path runs: asked of the processor once, or forced by name.
 */
#include "base/base.h"

#include <stdlib.h>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define AVX_VNNI (1u << 4) /* of leaf 7's subleaf 1, EAX */

const char *const isa_names[ISA_COUNT] = {"ref", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512vbmi", "amx", "neon", "neondot"};
static atomic_int isa_chosen = -1; /* -1: not asked yet */
static atomic_bool isa_selected;   /* by oscar_isa_select(), whatever OSCAR_ISA says */

isa isa_from_cpuid(uint32_t leaf1_ecx, uint32_t leaf7_ebx, uint32_t leaf7_ecx, uint32_t leaf7_edx,
                   uint32_t leaf7_1_eax, uint64_t xcr0) {
    const uint32_t fma = 1u << 12, osxsave = 1u << 27, avx = 1u << 28, f16c = 1u << 29;
    const uint32_t avx2 = 1u << 5;
    const uint32_t avx512 = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31; /* F, DQ, BW, VL */
    const uint32_t vnni = 1u << 11, vbmi = 1u << 1; /* of leaf 7's ECX */
    const uint32_t amx = 1u << 22 | 1u << 24 | 1u << 25; /* of its EDX: BF16, TILE, INT8 */
    const uint32_t leaf1 = fma | osxsave | avx | f16c;
    /* The operating system must save the registers too, or the first use is a fault: XCR0 bits 1-2
     * are xmm and ymm, 5-7 the mask registers and zmm. */
    if ((leaf1_ecx & leaf1) != leaf1 || !(leaf7_ebx & avx2) || (xcr0 & 0x6) != 0x6) return ISA_REF;
    if ((leaf7_ebx & avx512) != avx512 || (xcr0 & 0xe6) != 0xe6)
        return leaf7_1_eax & AVX_VNNI ? ISA_AVXVNNI : ISA_AVX2;
    if (!(leaf7_ecx & vnni)) return ISA_AVX512;
    if (!(leaf7_ecx & vbmi)) return ISA_AVX512VNNI;
    /* Bits 17 and 18 are the tiles and their configuration. */
    if ((leaf7_edx & amx) != amx || (xcr0 & 0x60000) != 0x60000) return ISA_AVX512VBMI;
    return ISA_AMX;
}

isa isa_from_hwcap(unsigned long hwcap) {
    const unsigned long asimd = 1ul << 1, asimddp = 1ul << 20; /* HWCAP_ASIMD, HWCAP_ASIMDDP */
    if (!(hwcap & asimd)) return ISA_REF;
    return hwcap & asimddp ? ISA_NEONDOT : ISA_NEON;
}

#if defined(__x86_64__)
/* Linux gives a process the tile registers only on request (they make signal frames larger). */
static bool tiles_granted(void) {
#if defined(__linux__)
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}
#endif

#if defined(__x86_64__)
/* EAX of leaf 7, subleaf 1; 0 where there is none. */
static uint32_t leaf7_1(void) {
    uint32_t most, a, b, c, d;
    if (!__get_cpuid_count(7, 0, &most, &b, &c, &d) || most < 1) return 0;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) ? a : 0;
}
#endif

static isa isa_best(void) {
#if defined(__x86_64__)
    uint32_t a, b, c, d, leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx;
    if (!__get_cpuid(1, &a, &b, &leaf1_ecx, &d)) return ISA_REF;
    if (!(leaf1_ecx & 1u << 27)) return ISA_REF; /* no OSXSAVE: XGETBV itself would fault */
    if (!__get_cpuid_count(7, 0, &a, &leaf7_ebx, &leaf7_ecx, &leaf7_edx)) return ISA_REF;
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    (void)b, (void)c;
    isa best = isa_from_cpuid(leaf1_ecx, leaf7_ebx, leaf7_ecx, leaf7_edx, leaf7_1(), (uint64_t)high << 32 | low);
    return best == ISA_AMX && !tiles_granted() ? ISA_AVX512VBMI : best;
#elif defined(__aarch64__) && defined(__linux__)
    return isa_from_hwcap(getauxval(AT_HWCAP));
#elif defined(__aarch64__)
    return ISA_NEON;
#else
    return ISA_REF;
#endif
}

/* Whether a machine whose best is `best` runs path i of its kind. */
static bool isa_runs(isa best, int i) {
    if (i > (int)best) return false;
#if defined(__x86_64__)
    if (i == ISA_AVXVNNI && best > ISA_AVXVNNI) return leaf7_1() & AVX_VNNI;
#endif
    return true;
}

/* -1 when there is no such name or this machine cannot run it. */
static int isa_find(const char *name) {
#if defined(__aarch64__)
    const int first = ISA_NEON;
#else
    const int first = ISA_AVX2;
#endif
    if (strcmp(name, isa_names[ISA_REF]) == 0) return ISA_REF;
    const isa best = isa_best();
    for (int i = first; i <= (int)best; i++)
        if (strcmp(name, isa_names[i]) == 0 && isa_runs(best, i)) return i;
    return -1;
}

/* OSCAR_ISA where it names a path that can run, else the best one. */
static int isa_automatic(void) {
    const char *name = getenv("OSCAR_ISA");
    int forced = name ? isa_find(name) : -1;
    return forced >= 0 ? forced : (int)isa_best();
}

isa isa_current(void) {
    int chosen = atomic_load_explicit(&isa_chosen, memory_order_relaxed);
    if (chosen < 0) {
        /* Threads that race here all compute the same value. */
        chosen = isa_automatic();
        atomic_store_explicit(&isa_chosen, chosen, memory_order_relaxed);
    }
    return (isa)chosen;
}

bool isa_asks_near(void) {
#if defined(__x86_64__)
    static atomic_int near = -1;
    int known = atomic_load_explicit(&near, memory_order_relaxed);
    if (known < 0) { /* threads that race here all compute the same value */
        uint32_t most, b = 0, c = 0, d = 0;
        known = __get_cpuid(0, &most, &b, &c, &d) && b == signature_AMD_ebx && c == signature_AMD_ecx && d == signature_AMD_edx;
        atomic_store_explicit(&near, known, memory_order_relaxed);
    }
    return known;
#else
    return false;
#endif
}

oscar_status isa_check(oscar_error *error) {
    const char *name = getenv("OSCAR_ISA");
    if (!name || isa_find(name) >= 0 || atomic_load(&isa_selected)) return OSCAR_OK;
    return error_set(error, OSCAR_ERROR_UNSUPPORTED, -1, "OSCAR_ISA is '%.40s', which this machine cannot run (its best is %s)", name,
                     isa_names[isa_best()]);
}

const char *oscar_isa_name(void) {
    return isa_names[isa_current()];
}

oscar_status oscar_isa_select(const char *name) {
    int chosen = name ? isa_find(name) : isa_automatic();
    if (chosen < 0) return OSCAR_ERROR_UNSUPPORTED;
    atomic_store_explicit(&isa_chosen, chosen, memory_order_relaxed);
    atomic_store(&isa_selected, name != NULL);
    return OSCAR_OK;
}
