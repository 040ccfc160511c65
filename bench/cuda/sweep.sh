#!/bin/sh
# The numbers of docs/PERFORMANCE-cuda.md. Usage: sweep.sh DIR, where DIR holds what build.sh made.
dir=$1
here=$(cd "$(dirname "$0")" && pwd)
nvidia-smi --query-gpu=name,driver_version,clocks.max.sm,clocks.max.mem --format=csv,noheader
run() { "$dir/bench_decode" "$@"; }
for b in 1 32; do
    for g in 4 8 12; do
        for tracked in 0 16 64; do run b=$b g=$g tracked=$tracked; done
    done
done
for d in 64 256; do
    for b in 1 32; do
        for t in 32768 131072; do
            run d=$d b=$b t=$t
        done
    done
done
for t in 2048 8192 32768 131072 524288 1048576; do run t=$t; done
for t in 32768 131072 524288 1048576; do run b=32 t=$t; done
for tokens in 2 4 8; do run tokens=$tokens; done
for bits in 3 4; do run b=32 t=32768 bits_k=$bits; done
run b=32 t=32768
run b=32 t=32768 bits_k=4 bits_v=4
"$dir/bench_append"
for t in 8192 32768 100000; do
    for tracked in 0 16; do "$dir/bench_prefill" t=$t tracked=$tracked; done
done
python3 "$here/sdpa_prefill.py"
python3 "$here/sdpa_baseline.py" "$2"
