/*
 * cmocka.c - the few functions of cmocka that the tests of the core use, for an AArch64 cross build:
 * Debian has no cross package of the library. Declarations are those of the installed <cmocka.h>; a
 * function that is missing here is an error when a test is linked.
 */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <cmocka.h>

enum { PASSED = 0, FAILED = 1, SKIPPED = 2 };
static jmp_buf test_end;

void print_error(const char *const format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
}

void print_message(const char *const format, ...) {
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
}

static _Noreturn void fail_at(const char *file, int line) {
    fflush(stdout);
    fprintf(stderr, "%s:%d: error: failure\n", file, line);
    longjmp(test_end, FAILED);
}

void _fail(const char *const file, const int line) {
    fail_at(file, line);
}

void _skip(const char *const file, const int line) {
    (void)file, (void)line;
    longjmp(test_end, SKIPPED);
}

void _assert_true(const LargestIntegralType result, const char *const expression, const char *const file, const int line) {
    if (result) return;
    fprintf(stderr, "not true: %s\n", expression);
    fail_at(file, line);
}

void _assert_int_equal(const LargestIntegralType a, const LargestIntegralType b, const char *const file, const int line) {
    if (a == b) return;
    fprintf(stderr, "%#llx != %#llx\n", (unsigned long long)a, (unsigned long long)b);
    fail_at(file, line);
}

void _assert_int_not_equal(const LargestIntegralType a, const LargestIntegralType b, const char *const file, const int line) {
    if (a != b) return;
    fprintf(stderr, "%#llx == %#llx\n", (unsigned long long)a, (unsigned long long)b);
    fail_at(file, line);
}

void _assert_float_equal(const float a, const float b, const float epsilon, const char *const file, const int line) {
    if (fabsf(a - b) <= epsilon) return;
    fprintf(stderr, "%g != %g within %g\n", (double)a, (double)b, (double)epsilon);
    fail_at(file, line);
}

void _assert_string_equal(const char *const a, const char *const b, const char *const file, const int line) {
    if (strcmp(a, b) == 0) return;
    fprintf(stderr, "\"%s\" != \"%s\"\n", a, b);
    fail_at(file, line);
}

void _assert_string_not_equal(const char *const a, const char *const b, const char *file, const int line) {
    if (strcmp(a, b) != 0) return;
    fprintf(stderr, "\"%s\" == \"%s\"\n", a, b);
    fail_at(file, line);
}

void _assert_memory_equal(const void *const a, const void *const b, const size_t size, const char *const file, const int line) {
    if (memcmp(a, b, size) == 0) return;
    size_t at = 0;
    while (((const uint8_t *)a)[at] == ((const uint8_t *)b)[at]) at++;
    fprintf(stderr, "byte %zu of %zu: %#x != %#x\n", at, size, ((const uint8_t *)a)[at], ((const uint8_t *)b)[at]);
    fail_at(file, line);
}

void _assert_memory_not_equal(const void *const a, const void *const b, const size_t size, const char *const file, const int line) {
    if (memcmp(a, b, size) != 0) return;
    fprintf(stderr, "%zu equal bytes\n", size);
    fail_at(file, line);
}

void _assert_in_range(const LargestIntegralType value, const LargestIntegralType minimum, const LargestIntegralType maximum,
                      const char *const file, const int line) {
    if (value >= minimum && value <= maximum) return;
    fprintf(stderr, "%llu is not in %llu .. %llu\n", (unsigned long long)value, (unsigned long long)minimum,
            (unsigned long long)maximum);
    fail_at(file, line);
}

/* A function of its own: after longjmp() only what setjmp() returned is to be trusted. A setup or
 * teardown that fails is a failure of the test. */
static int run_part(CMUnitTestFunction test, CMFixtureFunction fixture, void **state) {
    int verdict = setjmp(test_end);
    if (verdict != PASSED) return verdict;
    if (fixture) return fixture(state) == 0 ? PASSED : FAILED;
    if (test) test(state);
    return PASSED;
}

static int run_one(const struct CMUnitTest *test) {
    void *state = test->initial_state;
    int verdict = run_part(NULL, test->setup_func, &state);
    if (verdict == PASSED) verdict = run_part(test->test_func, NULL, &state);
    int after = run_part(NULL, test->teardown_func, &state);
    return after == PASSED ? verdict : after;
}

int _cmocka_run_group_tests(const char *group_name, const struct CMUnitTest *const tests, const size_t num_tests,
                            CMFixtureFunction group_setup, CMFixtureFunction group_teardown) {
    static const char *const verdicts[] = {"OK", "FAILED", "SKIPPED"};
    int n_failed = 0;
    if (group_setup || group_teardown) {
        fprintf(stderr, "fixtures of a group are not supported\n");
        return 1;
    }
    printf("%s: %zu tests\n", group_name, num_tests);
    const char *leave_out = getenv("OSCAR_LEAVE_OUT"); /* names of tests that take minutes under emulation */
    for (size_t i = 0; i < num_tests; i++) {
        if (leave_out && strstr(leave_out, tests[i].name)) continue;
        clock_t start = clock();
        int verdict = run_one(&tests[i]);
        n_failed += verdict == FAILED;
        printf("%s: %s, %.1f s\n", tests[i].name, verdicts[verdict], (double)(clock() - start) / CLOCKS_PER_SEC);
        fflush(stdout);
    }
    return n_failed;
}
