/*
 * test_zoo_fuzz.c - replays the fuzz targets without a fuzzer: the corpus as it is, then mutated.
 */
#define OSCAR_FUZZ_REPLAY
#include "fuzz/fuzz_gguf.c"
#include "fuzz/fuzz_pt.c"
#include "fuzz/fuzz_rotations.c"
#include "fuzz/replay.h"

static void test_rotations(void **state) {
    (void)state;
    replay("fuzz_rotations", fuzz_rotations);
}
static void test_pt(void **state) {
    (void)state;
    replay("fuzz_pt", fuzz_pt);
}
static void test_gguf(void **state) {
    (void)state;
    replay("fuzz_gguf", fuzz_gguf);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rotations), cmocka_unit_test(test_pt),
                                       cmocka_unit_test(test_gguf)};
    return cmocka_run_group_tests_name("zoo_fuzz", tests, NULL, NULL);
}
