#!/usr/bin/env bash
# Builds llama.cpp (the source that the PyPI package llama-cpp-python carries) once into the
# per-user cache folder and prints the folder: bin/ (programs and shared libraries), include/.
# OSCAR_LLAMA_DIR names an installed one instead and nothing is built.
#
# A cut-short build goes on where it stopped. Flags, see docs/ARCHITECTURE.md:
#   Clang 19: GCC 12 drops stores of ggml's AMX tile set-up.
#   -mno-avx512fp16: ggml's f16 attention is 2.3 times slower with it at head_dim 64.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

version=0.3.36
sha256=832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e
tag=1
if [ -n "${OSCAR_LLAMA_DIR:-}" ]; then
    [ -e "$OSCAR_LLAMA_DIR/include/llama.h" ] ||
        die "OSCAR_LLAMA_DIR=$OSCAR_LLAMA_DIR has no include/llama.h"
    printf '%s\n' "$OSCAR_LLAMA_DIR"
    exit 0
fi

# A native build belongs to one kind of processor: its name is part of the folder's.
cpu=$(grep -m1 -E '^(flags|Features)' /proc/cpuinfo | tr ' ' '\n' | sort -u | sha256sum | cut -c1-8)
root=$(oscar_cache_dir)
out=$root/llama-$version-$tag-$cpu
if [ -e "$out/complete" ]; then
    printf '%s\n' "$out"
    exit 0
fi

mkdir -p "$root/downloads" "$out"
exec 9>"$out/lock"
flock 9
if [ -e "$out/complete" ]; then
    printf '%s\n' "$out"
    exit 0
fi

src=$out/source/llama_cpp_python-$version/vendor/llama.cpp
if [ ! -e "$out/source.complete" ]; then
    tarball=$root/downloads/llama_cpp_python-$version.tar.gz
    if [ ! -e "$tarball" ]; then
        say "fetching the source of llama.cpp (llama-cpp-python $version, 77 MB)"
        tmp=$(mktemp -d "$root/downloads/part.XXXXXX")
        # pip prepares the metadata of a source package after fetching it: a few seconds more.
        python3 -m pip download --quiet --disable-pip-version-check --no-deps --no-binary llama-cpp-python \
            -d "$tmp" "llama-cpp-python==$version" >&2 ||
            die "could not fetch llama-cpp-python $version"
        printf '%s  %s\n' "$sha256" "$(echo "$tmp"/*.tar.gz)" | sha256sum --check --status ||
            die "llama-cpp-python $version: the package's SHA-256 is not the expected one"
        mv "$tmp"/*.tar.gz "$tarball"
        rmdir "$tmp"
    fi
    mkdir -p "$out/source"
    tar -xzf "$tarball" -C "$out/source"
    touch "$out/source.complete"
fi

cc=${OSCAR_LLAMA_CC:-clang-19}
cxx=${OSCAR_LLAMA_CXX:-clang++-19}
command -v "$cc" >/dev/null || die "$cc not found (Debian: apt-get install clang-19)"
case "$(uname -m)" in
x86_64) flags=-mno-avx512fp16 ;;
*) flags= ;;
esac

say "building llama.cpp once for this machine (10 to 25 minutes on two cores) in $out"
cmake -S "$src" -B "$out/build" -G Ninja -DCMAKE_BUILD_TYPE=Release \
    -DCMAKE_C_COMPILER="$cc" -DCMAKE_CXX_COMPILER="$cxx" \
    -DCMAKE_C_FLAGS="$flags" -DCMAKE_CXX_FLAGS="$flags" \
    -DCMAKE_BUILD_WITH_INSTALL_RPATH=ON -DCMAKE_INSTALL_RPATH='$ORIGIN' \
    -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DGGML_OPENMP=OFF \
    -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF \
    -DLLAMA_BUILD_UI=OFF -DLLAMA_USE_PREBUILT_UI=OFF -DLLAMA_OPENSSL=OFF \
    >"$out/configure.log" 2>&1 || { tail -n 20 "$out/configure.log" >&2; die "cmake failed, see $out/configure.log"; }

programs="llama-cli llama-completion llama-server llama-perplexity llama-bench llama-batched-bench"
# Ninja's own [done/total] lines are the progress: one line rewritten on a terminal.
if [ -t 2 ]; then
    NINJA_STATUS="llama.cpp [%f/%t, %es] " ninja -C "$out/build" llama $programs >&2 ||
        die "building llama.cpp failed in $out/build"
else
    NINJA_STATUS="llama.cpp [%f/%t, %es] " ninja -C "$out/build" llama $programs >"$out/build.log" 2>&1 &
    pid=$!
    while kill -0 "$pid" 2>/dev/null; do
        for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do
            kill -0 "$pid" 2>/dev/null || break
            sleep 2
        done
        tail -n 1 "$out/build.log" | cut -c1-60 >&2
    done
    wait "$pid" || { tail -n 20 "$out/build.log" >&2; die "building llama.cpp failed, see $out/build.log"; }
fi

mkdir -p "$out/bin" "$out/include"
cp -P "$out/build/bin/"*.so* "$out/bin/"
for p in $programs; do cp "$out/build/bin/$p" "$out/bin/"; done
cp "$src/include/llama.h" "$src"/ggml/include/*.h "$out/include/"
cp "$src/LICENSE" "$out/"
touch "$out/complete"
rm -rf "$out/build" "$out/source" "$out/source.complete"
printf '%s\n' "$out"
