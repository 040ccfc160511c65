# What the script tests of the layer begin with; sourced with the test's arguments, BUILD_DIR [MODEL].
# Sets build, source_dir, preload, llama (a folder), model (a file), work (removed by the test's trap);
# skips the test where one of them is missing. sanitizer is what precedes our library in preload in a build with
# AddressSanitizer.
build=$(cd "$1" && pwd)
source_dir=$(cd "$(dirname "$0")/.." && pwd)
. "$source_dir/scripts/common.sh"
preload=$build/liboscar-llama.so
[ -f "$preload" ] || { echo "built without llama.cpp"; exit 77; }
sanitizer=$(sanitizer_runtime "$build")
preload=$sanitizer$preload
# What llama.cpp leaks is its own.
[ -z "$sanitizer" ] || export ASAN_OPTIONS=detect_leaks=0
llama=$(sed -n 's/^OSCAR_LLAMA_DIR:PATH=//p' "$build/CMakeCache.txt")
# The name under which `oscar pull` keeps it.
model=$(oscar_cache_dir)/models/${2:-smollm2-135m}.gguf
[ -f "$model" ] || { echo "no model: $model"; exit 77; }
work=$(mktemp -d)

# need_rotations: sets rotations to a file for the model, fitted on a little text unless
# OSCAR_TEST_ROTATIONS names one.
need_rotations() {
    rotations=${OSCAR_TEST_ROTATIONS:-$work/rotations}
    [ ! -f "$rotations" ] || return 0
    cat "$source_dir"/docs/METHOD.md "$source_dir"/docs/ARCHITECTURE.md >"$work/text"
    "$build/oscar" calibrate "$model" -o "$rotations" --text "$work/text" --tokens 512 --context 2048 --pairs 8 -t 1 \
        >"$work/out" 2>"$work/log" || { cat "$work/log" >&2; return 1; }
}

# serve_cases CASE...: runs cases of tests/serve_cases.py; skips the test without Python.
serve_cases() {
    command -v python3 >/dev/null || { echo "no python3"; exit 77; }
    need_rotations
    cat "$source_dir"/docs/*.md "$source_dir"/README.md >"$work/text"
    python3 "$source_dir/tests/serve_cases.py" "$work" "$build/oscar" "$model" "$rotations" "$work/text" "$@"
}
