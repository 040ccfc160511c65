# What script tests of the oscar program on a real model begin with; sourced with the test's argument,
# BUILD_DIR. Sets build, source_dir, oscar, model (a file) and work (removed at the end); skips the test
# where one of them is missing. fail MESSAGE... ends the test.
build=$(cd "$1" && pwd)
source_dir=$(cd "$(dirname "$0")/.." && pwd)
. "$source_dir/scripts/common.sh"
oscar=$build/oscar
[ -x "$oscar" ] || { echo "no oscar program in $build (built without llama.cpp)"; exit 77; }
model=${OSCAR_TEST_MODEL:-$(oscar_cache_dir)/models/smollm2-135m.gguf}
[ -f "$model" ] || { echo "no model: $model (oscar pull smollm2-135m)"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf '%s: %s\n' "$(basename "$0" .sh)" "$*" >&2; exit 1; }
