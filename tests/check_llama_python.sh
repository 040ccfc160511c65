#!/usr/bin/env bash
# Programs that open libllama with dlopen(), as llama-cpp-python does through ctypes: through the front
# library of scripts/front-library.sh they run on our cache, with and without a preload; with a preload
# alone they do not, and are told.
# usage: check_llama_python.sh BUILD_DIR [MODEL]
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
if [ -n "$sanitizer" ]; then echo "a sanitised library cannot be opened later"; exit 77; fi
libraries=$llama/bin
[ -e "$libraries/libllama.so" ] || libraries=$llama/lib
if [ "$(uname -m)" != x86_64 ]; then echo "structures are passed as x86-64 does"; exit 77; fi
trap 'rm -rf "$work"' EXIT
fail() { printf 'check_llama_python: %s\n' "$*" >&2; cat "$work/err" >&2; exit 1; }
"$source_dir/scripts/front-library.sh" "$work/front" "$preload" "$libraries" >"$work/out" 2>"$work/err" || fail "no front library"

cat >"$work/run.py" <<'END'
import ctypes, sys
# Structures go by value; what is beyond their true size is not looked at.
class Large(ctypes.Structure):
    _fields_ = [("words", ctypes.c_uint32 * 256)]
class Batch(ctypes.Structure):
    _fields_ = [("n_tokens", ctypes.c_int32)] + [(name, ctypes.c_void_p) for name in "abcdef"]
lib = ctypes.CDLL(sys.argv[1])
lib.llama_model_default_params.restype = lib.llama_context_default_params.restype = Large
lib.llama_model_load_from_file.restype = lib.llama_init_from_model.restype = ctypes.c_void_p
lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, Large]
lib.llama_init_from_model.argtypes = [ctypes.c_void_p, Large]
lib.llama_batch_get_one.restype = Batch
lib.llama_decode.argtypes = [ctypes.c_void_p, Batch]
lib.llama_state_get_size.argtypes = [ctypes.c_void_p]
lib.llama_state_get_size.restype = ctypes.c_size_t
lib.llama_free.argtypes = lib.llama_model_free.argtypes = [ctypes.c_void_p]
model = lib.llama_model_load_from_file(sys.argv[2].encode(), lib.llama_model_default_params())
params = lib.llama_context_default_params()
params.words[0] = 256 # n_ctx
context = lib.llama_init_from_model(model, params)
lib.llama_set_n_threads.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32]
lib.llama_set_n_threads(context, 1, 1)
tokens = (ctypes.c_int32 * 3)(100, 200, 300)
if lib.llama_decode(context, lib.llama_batch_get_one(tokens, 3)) != 0: sys.exit("llama_decode() failed")
print(lib.llama_state_get_size(context))
lib.llama_free(context)
lib.llama_model_free(model)
END
# use LIBRARY [VARIABLE=VALUE]
use() {
    local library=$1
    shift
    env OSCAR_KV=f32 "$@" python3 "$work/run.py" "$library" "$model" >"$work/out" 2>"$work/err" || fail "python3 failed: $library $*"
    ! grep -q oscar "$work/out" || fail "wrote to stdout"
}
use "$work/front/libllama.so"
grep -q '^oscar: exact f32 KV cache on ' "$work/err" || fail "the cache was not held through the front library"
held=$(cat "$work/out")
use "$work/front/libllama.so" LD_PRELOAD="$preload"
grep -q '^oscar: exact f32 KV cache on ' "$work/err" || fail "the cache was not held through the front library and a preload"
[ "$(cat "$work/out")" = "$held" ] || fail "states of $held and $(cat "$work/out") bytes"
OSCAR_CACHE=$work/cache
export OSCAR_CACHE
for time in first second; do # made the first time
    env -u LLAMA_CPP_LIB_PATH "$build/oscar" wrap --kv f32 -- python3 -c \
        'import os, sys; sys.argv[1] = os.environ["LLAMA_CPP_LIB_PATH"] + "/libllama.so"; exec(open(sys.argv[3]).read())' \
        none "$model" "$work/run.py" >"$work/out" 2>"$work/err" || fail "oscar wrap -- python3, the $time time"
    grep -q '^oscar: exact f32 KV cache on ' "$work/err" || fail "the cache was not held by oscar wrap -- python3"
    [ "$(cat "$work/out")" = "$held" ] || fail "states of $held and $(cat "$work/out") bytes"
done
! grep -q 'libllama.so: export' "$work/err" || fail "the front library was made twice"
use "$libraries/libllama.so" LD_PRELOAD="$preload"
grep -q '^oscar: libllama was opened by dlopen() .*NOT on this cache' "$work/err" || fail "a preload that is not used was not told"
echo "held through the front library, which oscar wrap makes; told with a preload alone"
