#!/usr/bin/env bash
# Builds the core for AArch64 with Debian's cross compiler, runs its tests under qemu-user, with and
# without dot products, and compares codes and pages with those of this build, to the bit.
set -euo pipefail
build=$(cd "$1" && pwd)
source_dir=$(cd "$(dirname "$0")/.." && pwd)
. "$source_dir/scripts/common.sh"
fail() { printf 'check_neon: %s\n' "$*" >&2; exit 1; }
skip() { printf 'check_neon: %s: skipped\n' "$*"; exit 77; }

command -v aarch64-linux-gnu-gcc >/dev/null || skip "no aarch64-linux-gnu-gcc (package gcc-aarch64-linux-gnu)"
[ -f /usr/aarch64-linux-gnu/include/stdio.h ] || skip "no C library for AArch64 (package libc6-dev-arm64-cross)"
command -v qemu-aarch64 >/dev/null || skip "no qemu-aarch64 (package qemu-user)"
is_sanitized "$build" && skip "the cross build is the same with and without sanitizers"

# Headers of this machine that no processor cares about, and the functions of cmocka that tests use.
cross=$build/aarch64
headers=$cross/include
mkdir -p "$headers"
printf '#include <%s>\n' cmocka.h xxhash.h | cc -M -xc - | tr ' ' '\n' | grep -E '/(cmocka|xxhash)\.h$' | xargs cp -t "$headers" ||
    fail "no cmocka.h or xxhash.h"
aarch64-linux-gnu-gcc -O1 -Wall -Wextra -Werror -Wno-deprecated-declarations -isystem "$headers" -c "$source_dir/tests/aarch64/cmocka.c" -o "$cross/cmocka.o"
aarch64-linux-gnu-ar rcs "$cross/libcmocka.a" "$cross/cmocka.o"

tests=(test_cache test_attn test_codec test_attn_decode test_codes test_page test_base)
{
    cmake -S "$source_dir" -B "$cross" -G Ninja -DCMAKE_TOOLCHAIN_FILE="$source_dir/tests/aarch64/toolchain.cmake" \
        -DOSCAR_CUDA=OFF -DOSCAR_WERROR=ON -DCMOCKA_LIB="$cross/libcmocka.a" "-DCMAKE_C_FLAGS=-isystem $headers"
    ninja -C "$cross" oscar "${tests[@]}"
} >"$cross/build.log" 2>&1 || { tail -n 30 "$cross/build.log" >&2; fail "does not build for AArch64"; }

# Two at a time, the longest first; test_base and test_codes also on a processor without dot products.
one() { # TEST CPU
    local log=$cross/$1.$2.log
    [ "$1" != test_cache ] || export OSCAR_ISA=neondot # and not in plain C and on tiles too
    # Half a minute to minutes each: oracles in float64, and threads that wait for each other.
    export OSCAR_LEAVE_OUT="test_against_model test_chunking test_threads agrees_with_float64"
    qemu-aarch64 -cpu "$2" -L /usr/aarch64-linux-gnu "$cross/$1" >"$log" 2>&1 || { tail -n 20 "$log" >&2; fail "$1 on $2"; }
}
export -f one fail
export cross
{ printf '%s max\n' "${tests[@]}"; printf '%s cortex-a53\n' test_codes test_base; } |
    xargs -P 2 -L 1 bash -euo pipefail -c 'one "$@"' one

grep -q 'exp, neon:' "$cross/test_attn.max.log" || fail "test_attn did not run NEON"
grep -q 'worst error [1-9]' "$cross/test_attn_decode.max.log" || fail "test_attn_decode did not run NEON"
"$build/test_codes" | grep '^codes ' >"$cross/codes.here" || fail "test_codes failed in this build"
for cpu in max cortex-a53; do
    grep '^codes ' "$cross/test_codes.$cpu.log" >"$cross/codes.$cpu"
    diff "$cross/codes.here" "$cross/codes.$cpu" >&2 || fail "other codes on $cpu than here"
done
echo "${#tests[@]} tests under qemu, $(grep -c . "$cross/codes.here") hashes of pages as in this build"
