# What the script tests of the layer begin with; sourced with the test's arguments, BUILD_DIR [MODEL].
# Sets build, source_dir, preload, llama (a folder), model (a file), work (removed by the test's trap);
# skips the test where one of them is missing.
build=$(cd "$1" && pwd)
source_dir=$(cd "$(dirname "$0")/.." && pwd)
. "$source_dir/scripts/common.sh"
preload=$build/liboscar-llama.so
[ -f "$preload" ] || { echo "built without llama.cpp"; exit 77; }
llama=$(sed -n 's/^OSCAR_LLAMA_DIR:PATH=//p' "$build/CMakeCache.txt")
# The name under which `oscar pull` keeps it.
model=$(oscar_cache_dir)/models/${2:-smollm2-135m}.gguf
[ -f "$model" ] || { echo "no model: $model"; exit 77; }
work=$(mktemp -d)
