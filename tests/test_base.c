/*
 * test_base.c - errors, memory, half precision, the choice of a code path, the barrier.
 */
#include "base/base.h"
#include "test_util.h"

#include <pthread.h>

static void status_strings(void **state) {
    (void)state;
    for (int s = OSCAR_ERROR_INTERNAL; s <= OSCAR_OK; s++) {
        assert_non_null(oscar_status_string((oscar_status)s));
        assert_string_not_equal(oscar_status_string((oscar_status)s), "unknown status");
        for (int t = OSCAR_ERROR_INTERNAL; t < s; t++)
            assert_string_not_equal(oscar_status_string((oscar_status)s), oscar_status_string((oscar_status)t));
    }
    assert_string_equal(oscar_status_string((oscar_status)-1000), "unknown status");
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", OSCAR_VERSION_MAJOR, OSCAR_VERSION_MINOR, OSCAR_VERSION_PATCH);
    assert_string_equal(oscar_version(), version);
}

static void errors(void **state) {
    (void)state;
    assert_int_equal(error_set(NULL, OSCAR_ERROR_IO, 3, "nobody %s", "listens"), OSCAR_ERROR_IO);
    oscar_error e;
    memset(&e, 0xff, sizeof e);
    assert_int_equal(error_set(&e, OSCAR_ERROR_FORMAT, 17, "field %s: found %d", "head_dim", 7), OSCAR_ERROR_FORMAT);
    assert_int_equal(e.status, OSCAR_ERROR_FORMAT);
    assert_int_equal(e.position, 17);
    assert_string_equal(e.message, "field head_dim: found 7");
    char text[1000];
    memset(text, 'x', sizeof text - 1);
    text[sizeof text - 1] = 0;
    error_set(&e, OSCAR_ERROR_IO, -1, "%s", text);
    assert_int_equal(strlen(e.message), sizeof e.message - 1);
}

static void memory(void **state) {
    (void)state;
    const size_t counts[] = {0, 1, 63, 64, 65, 4097};
    for (size_t i = 0; i < sizeof counts / sizeof *counts; i++) {
        uint8_t *p = aligned_calloc(counts[i], 3);
        assert_non_null(p);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t j = 0; j < counts[i] * 3; j++) assert_int_equal(p[j], 0);
        memset(p, 0xaa, counts[i] * 3);
        aligned_free(p);
    }
    /* Read through volatile: the compiler knows these sizes and would warn. */
    volatile size_t half = SIZE_MAX / 2 + 1, most = SIZE_MAX;
    assert_null(aligned_calloc(half, 2));
    assert_null(aligned_calloc(most, 1));
    aligned_free(NULL);

    size_t out;
    assert_true(size_mul(1u << 20, 1u << 20, &out));
    assert_false(size_mul(half, 2, &out));
    assert_false(size_add(most, 1, &out));

    /* More address space than the machine has memory; touched at both ends only. */
    const size_t bytes = (size_t)64 << 30;
    uint8_t *region = region_reserve(bytes);
    assert_non_null(region);
    assert_int_equal((uintptr_t)region % 4096, 0);
    assert_int_equal(region[0] | region[bytes - 1] | region[bytes / 2], 0);
    region[0] = region[bytes - 1] = 1;
    region_release(region, bytes);
    region_release(NULL, 0);
    assert_null(region_reserve(0));
}

/* The nearest fp16 by arithmetic alone: ties to even, saturated. */
static double nearest_fp16(double x) {
    int e;
    frexp(x, &e);
    int exponent = e - 1 < -14 ? -14 : e - 1;
    double spacing = ldexp(1, exponent - 10), y = rint(x / spacing) * spacing;
    return y > 65504 ? 65504 : y < -65504 ? -65504 : y;
}

static void fp16_all_values(void **state) {
    (void)state;
    for (uint32_t h = 0; h < 65536; h++) {
        float f = fp16_to_float((uint16_t)h);
        int exponent = h >> 10 & 31, mantissa = h & 1023;
        if (exponent == 31) {
            assert_true(mantissa ? isnan(f) : isinf(f));
            continue;
        }
        double v = exponent ? ldexp(1024 + mantissa, exponent - 25) : ldexp(mantissa, -24);
        assert_true((double)f == (h & 0x8000 ? -v : v));
        assert_int_equal(fp16_from_float(f), h);
        /* Half way to the next value goes to the even one, a hair further to the next. */
        if (exponent < 30) {
            float next = fp16_to_float((uint16_t)(h + 1));
            float middle = (f + next) / 2;
            assert_int_equal(fp16_from_float(middle), h & 1 ? h + 1 : h);
            assert_int_equal(fp16_from_float(nextafterf(middle, next)), h + 1);
            assert_int_equal(fp16_from_float(nextafterf(middle, f)), h);
        }
    }
}

static void fp16_random(void **state) {
    (void)state;
    uint64_t rng = rng_seed("fp16_random", 11);
    for (int i = 0; i < 2000000; i++) {
        float f = bits_float((uint32_t)(rng_next(&rng) >> 32));
        if (!isfinite(f)) continue;
        assert_true((double)fp16_to_float(fp16_from_float(f)) == nearest_fp16((double)f));
    }
    assert_int_equal(fp16_from_float(65519.996f), 0x7bff);
    assert_int_equal(fp16_from_float(65520.0f), 0x7bff); /* would be infinity */
    assert_int_equal(fp16_from_float(3e38f), 0x7bff);
    assert_int_equal(fp16_from_float(-INFINITY), 0xfbff);
    assert_true(isnan(fp16_to_float(fp16_from_float(NAN))));
    assert_int_equal(fp16_from_float(-0.0f), 0x8000);
}

/* A19: values that come out as 3.6172 and 3.9258 when BF16 bits are read as fp16. */
static void bf16_values(void **state) {
    (void)state;
    assert_true(bf16_to_float(bf16_from_float(188.0f)) == 188.0f);
    assert_true(bf16_to_float(bf16_from_float(436.0f)) == 436.0f);
    assert_true(fabsf(bf16_to_float(bf16_from_float(-0.1621f)) + 0.1621f) <= 0.1621f / 256);
    assert_int_equal(bf16_from_float(188.0f), 0x433c);
    for (uint32_t h = 0; h < 65536; h++) {
        float f = bf16_to_float((uint16_t)h);
        if (isnan(f))
            assert_true(isnan(bf16_to_float(bf16_from_float(f))));
        else
            assert_int_equal(bf16_from_float(f), h);
    }
    assert_int_equal(bf16_from_float(bits_float(0x3f808000)), 0x3f80); /* tie to even */
    assert_int_equal(bf16_from_float(bits_float(0x3f818000)), 0x3f82);
    assert_int_equal(bf16_from_float(bits_float(0x3f808001)), 0x3f81);
    assert_true(isnan(bf16_to_float(bf16_from_float(bits_float(0x7f800001))))); /* not infinity */
}

/* F02: CPUID alone says too much; the operating system must save the registers. */
static void isa_bits(void **state) {
    (void)state;
    const uint32_t leaf1 = 1u << 12 | 1u << 27 | 1u << 28 | 1u << 29;
    const uint32_t avx2 = 1u << 5, avx512 = avx2 | 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 0, 0, 0, 0xe7), ISA_AVX512);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 1u << 11, 0, 0, 0xe7), ISA_AVX512VNNI);
    const uint32_t vbmi = 1u << 1 | 1u << 11;
    assert_int_equal(isa_from_cpuid(leaf1, avx512, vbmi, 0, 0, 0xe7), ISA_AVX512VBMI);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 1u << 1, 0, 0, 0xe7), ISA_AVX512);
    const uint32_t amx = 1u << 22 | 1u << 24 | 1u << 25;
    assert_int_equal(isa_from_cpuid(leaf1, avx512, vbmi, amx, 0, 0x600e7), ISA_AMX);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, vbmi, amx, 0, 0x200e7), ISA_AVX512VBMI);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, vbmi, 1u << 24, 0, 0x600e7), ISA_AVX512VBMI);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 1u << 11, amx, 0, 0x600e7), ISA_AVX512VNNI);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 0, amx, 0, 0x600e7), ISA_AVX512);
    assert_int_equal(isa_from_cpuid(leaf1, avx2, 1u << 11, 0, 0, 0xe7), ISA_AVX2);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 0, 0, 0, 0x07), ISA_AVX2);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 0, 0, 0, 0x67), ISA_AVX2); /* upper zmm not saved */
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 0, 0, 0, 0x03), ISA_REF);
    assert_int_equal(isa_from_cpuid(leaf1, avx2, 0, 0, 0, 0xe7), ISA_AVX2);
    const uint32_t avx_vnni = 1u << 4;
    assert_int_equal(isa_from_cpuid(leaf1, avx2, 0, 0, avx_vnni, 0xe7), ISA_AVXVNNI);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 0, 0, avx_vnni, 0x07), ISA_AVXVNNI);
    assert_int_equal(isa_from_cpuid(leaf1, avx512, 0, 0, avx_vnni, 0xe7), ISA_AVX512);
    assert_int_equal(isa_from_cpuid(leaf1, avx2, 0, 0, ~avx_vnni, 0xe7), ISA_AVX2);
    assert_int_equal(isa_from_cpuid(leaf1, avx2, 0, 0, avx_vnni, 0x03), ISA_REF);
    assert_int_equal(isa_from_cpuid(leaf1, 0, 0, 0, avx_vnni, 0xe7), ISA_REF);
    assert_int_equal(isa_from_cpuid(0, 0, 0, 0, 0, 0), ISA_REF);
    const unsigned long asimd = 1ul << 1, dotprod = 1ul << 20;
    assert_int_equal(isa_from_hwcap(0), ISA_REF);
    assert_int_equal(isa_from_hwcap(asimd), ISA_NEON);
    assert_int_equal(isa_from_hwcap(~dotprod), ISA_NEON);
    assert_int_equal(isa_from_hwcap(dotprod), ISA_REF);
    assert_int_equal(isa_from_hwcap(asimd | dotprod), ISA_NEONDOT);
    const int needed1[] = {12, 27, 28, 29}, needed7[] = {16, 17, 30, 31};
    for (int i = 0; i < 4; i++) {
        assert_int_equal(isa_from_cpuid(leaf1 & ~(1u << needed1[i]), avx512, 0, 0, 0, 0xe7), ISA_REF);
        assert_int_equal(isa_from_cpuid(leaf1, avx512 & ~(1u << needed7[i]), 0, 0, 0, 0xe7), ISA_AVX2);
    }
}

static void isa_selection(void **state) {
    (void)state;
    unsetenv("OSCAR_ISA");
    assert_int_equal(oscar_isa_select(NULL), OSCAR_OK);
    const isa best = isa_current();
    const char *const names[ISA_COUNT] = {"ref", "avx2", "avxvnni", "avx512", "avx512vnni", "avx512vbmi", "amx", "neon", "neondot"};
    for (int i = 0; i < ISA_COUNT; i++) {
        oscar_status status = oscar_isa_select(names[i]);
        bool runs = i == ISA_REF || (i <= (int)best && (i >= ISA_NEON) == (best >= ISA_NEON));
        if (i == ISA_AVXVNNI && runs && best > ISA_AVXVNNI) continue; /* some with AVX-512 lack it */
        assert_int_equal(status, runs ? OSCAR_OK : OSCAR_ERROR_UNSUPPORTED);
        if (status) continue;
        assert_int_equal(isa_current(), i);
        assert_string_equal(oscar_isa_name(), names[i]);
    }
    assert_int_equal(oscar_isa_select("ref"), OSCAR_OK);
    assert_int_equal(oscar_isa_select("no such path"), OSCAR_ERROR_UNSUPPORTED);
    assert_int_equal(isa_current(), ISA_REF); /* a refusal changes nothing */
    setenv("OSCAR_ISA", "ref", 1);
    assert_int_equal(oscar_isa_select(NULL), OSCAR_OK);
    assert_int_equal(isa_current(), ISA_REF);
    setenv("OSCAR_ISA", "no such path", 1);
    assert_int_equal(oscar_isa_select(NULL), OSCAR_OK);
    assert_int_equal(isa_current(), best);
    oscar_error error;
    assert_int_equal(isa_check(&error), OSCAR_ERROR_UNSUPPORTED); /* no cache is made on another path than asked for */
    assert_non_null(strstr(error.message, "no such path"));
    assert_int_equal(oscar_isa_select("ref"), OSCAR_OK);
    assert_int_equal(isa_check(&error), OSCAR_OK);
    assert_int_equal(oscar_isa_select(NULL), OSCAR_OK);
    unsetenv("OSCAR_ISA");
    assert_int_equal(isa_check(&error), OSCAR_OK);
}

enum { THREADS = 5, ROUNDS = 2000 };
static spin_barrier barrier;
static int slots[THREADS]; /* plain: the barrier alone orders the accesses */
static atomic_int disagreements;

static void *barrier_thread(void *argument) {
    int ith = (int)(intptr_t)argument;
    for (int round = 1; round <= ROUNDS; round++) {
        slots[ith] = round;
        spin_barrier_wait(&barrier, THREADS);
        for (int t = 0; t < THREADS; t++)
            if (slots[t] != round) atomic_fetch_add(&disagreements, 1);
        spin_barrier_wait(&barrier, THREADS);
    }
    return NULL;
}

static void barriers(void **state) {
    (void)state;
    spin_barrier_init(&barrier);
    spin_barrier_wait(&barrier, 1); /* alone: no waiting */
    pthread_t threads[THREADS];
    for (intptr_t t = 0; t < THREADS; t++)
        assert_int_equal(pthread_create(&threads[t], NULL, barrier_thread, (void *)t), 0);
    for (int t = 0; t < THREADS; t++) pthread_join(threads[t], NULL);
    assert_int_equal(atomic_load(&disagreements), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(status_strings), cmocka_unit_test(errors),      cmocka_unit_test(memory),
        cmocka_unit_test(fp16_all_values), cmocka_unit_test(fp16_random), cmocka_unit_test(bf16_values),
        cmocka_unit_test(isa_bits),        cmocka_unit_test(isa_selection), cmocka_unit_test(barriers),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
