#!/bin/sh
# Builds the CUDA library, its test and its benchmark with nvcc alone, for machines without the rest
# of the project's dependencies. Usage: build.sh OUTPUT_DIR [ARCH], ARCH as in compute_90a.
set -e
root=$(cd "$(dirname "$0")/../.." && pwd)
out=$1
arch=${2:-90a}
mkdir -p "$out"
flags="-std=c++17 -O3 -split-compile=0 -gencode=arch=compute_$arch,code=sm_$arch -I$root/include -I$root/src -I$out"
pids=
for f in "$root"/src/cuda/*.cu "$root"/tests/cuda/*.cu "$root"/bench/cuda/*.cu; do
    extra=
    case "$f" in */append.cu) extra=-fmad=false ;; esac
    nvcc $flags $extra -Xptxas -v -c "$f" -o "$out/$(basename "$f" .cu).o" >"$out/$(basename "$f" .cu).log" 2>&1 &
    pids="$pids $!"
done
for p in $pids; do wait "$p" || { cat "$out"/*.log | grep -E "error|warning" ; exit 1; }; done
# The CPU's quantiser, for the append test.
cflags="-std=gnu11 -O2 -ffp-contract=off -fno-math-errno -fno-trapping-math -D_GNU_SOURCE -I$root/include -I$root/src"
cpu=
for f in "$root"/src/codec/*.c "$root"/src/base/*.c "$root"/tests/cuda/*.c; do
    isa=
    case "$f" in
    *_neon.c) continue ;; # these machines are x86
    *_avx512.c) isa="-mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx2 -mfma -mf16c" ;;
    *_avx2.c) isa="-mavx2 -mfma -mf16c" ;;
    esac
    gcc $cflags $isa -c "$f" -o "$out/cpu_$(basename "$f" .c).o"
    cpu="$cpu $out/cpu_$(basename "$f" .c).o"
done
lib=$(for f in "$root"/src/cuda/*.cu; do echo "$out/$(basename "$f" .cu).o"; done)
for f in "$root"/tests/cuda/*.cu "$root"/bench/cuda/*.cu; do
    name=$(basename "$f" .cu)
    nvcc -gencode=arch=compute_$arch,code=sm_$arch "$out/$name.o" $lib $cpu -lpthread -lm -o "$out/$name"
done
