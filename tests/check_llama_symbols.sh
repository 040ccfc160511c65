#!/usr/bin/env bash
# The table of src/llama/interpose_table.h against what liboscar-llama.so exports and against
# libllama's header, and against what llama.cpp's programs and libraries import from libllama: every
# function that takes a context, a memory or an extended batch is either replaced or passed through for
# a stated reason.
# usage: check_llama_symbols.sh BUILD_DIR
set -euo pipefail
build=$(cd "$1" && pwd)
source_dir=$(cd "$(dirname "$0")/.." && pwd)
preload=$build/liboscar-llama.so
[ -f "$preload" ] || { echo "built without llama.cpp"; exit 77; }
llama=$(sed -n 's/^OSCAR_LLAMA_DIR:PATH=//p' "$build/CMakeCache.txt")
fail() { printf 'check_llama_symbols: %s\n' "$*" >&2; exit 1; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

sed -n 's/^ *X(\(llama_[a-z0-9_]*\),.*/\1/p' "$source_dir/src/llama/interpose_table.h" | sort >"$work/table"
sed -n 's/^ *{"\(llama_[a-z0-9_]*\)", ".*/\1/p' "$source_dir/src/llama/interpose_table.c" | sort >"$work/passed"
nm -D --defined-only "$preload" | sed -n 's/.* T \(llama_.*\)/\1/p' | sort >"$work/exported"
diff "$work/table" "$work/exported" >"$work/diff" || fail "table (<) and exports (>): $(cat "$work/diff")"
both=$(comm -12 "$work/table" "$work/passed")
[ -z "$both" ] || fail "replaced and passed through: $both"

# Declarations joined to a line each; the name is what stands before the first parenthesis of
# parameters.
sed 's://.*$::' "$llama/include/llama.h" | tr '\n' ' ' | tr ';' '\n' | grep 'LLAMA_API' |
    grep -E 'llama_context *\*|llama_memory_t  *mem|llama_batch_ext *\*' |
    sed 's/.*LLAMA_API//' | grep -oE 'llama_[a-z0-9_]+ *\(' | tr -d ' (' | grep -v '^llama_sampler_context_t' |
    sort -u >"$work/wanted"
[ "$(wc -l <"$work/wanted")" -gt 60 ] || fail "only $(wc -l <"$work/wanted") functions found in llama.h"

# What is imported and libllama has: C functions must be in llama.h, and C++ ones that take a context
# in the tables.
libraries=$llama/bin
[ -e "$libraries/libllama.so" ] || libraries=$llama/lib
symbols() { nm -D "$@" | awk '{print $NF}' | sed 's/@.*//' | sort -u; }
symbols --defined-only "$libraries/libllama.so" >"$work/has"
for file in "$llama"/bin/llama-{server,cli,completion,perplexity,bench,batched-bench} "$libraries"/lib*.so; do
    [ -f "$file" ] && [ "${file##*/}" != libllama.so ] || continue
    symbols --undefined-only "$file"
done | sort -u | comm -12 - "$work/has" >"$work/imported"
[ "$(grep -c '^llama_' "$work/imported")" -gt 100 ] || fail "only $(wc -l <"$work/imported") symbols are imported from libllama"
tr '\n' ' ' <"$llama/include/llama.h" | grep -oE 'llama_[a-z0-9_]+ *\(' | tr -d ' (' | sort -u >"$work/header"
unknown=$(grep '^llama_' "$work/imported" | comm -23 - "$work/header")
[ -z "$unknown" ] || fail "imported, but not in llama.h: $unknown"
c++filt <"$work/imported" | grep -E '\(.*llama_(context|memory|batch)' | sed 's/(.*//' | grep -x 'llama_[a-z0-9_]*' | sort -u >"$work/extra"
sort -u -m "$work/wanted" "$work/extra" >"$work/all"

sort -m "$work/table" "$work/passed" >"$work/known"
missing=$(comm -23 "$work/all" "$work/known")
[ -z "$missing" ] || fail "neither replaced nor passed through: $missing"
gone=$(comm -13 "$work/all" "$work/known" | grep -vxE 'llama_model_n_swa|llama_(model_load_from|load_model_from)_[a-z_]*' || true)
[ -z "$gone" ] || fail "in the tables, but neither in llama.h nor imported: $gone"
echo "$(wc -l <"$work/table") replaced, $(wc -l <"$work/passed") passed through, $(wc -l <"$work/wanted") in llama.h," \
    "$(grep -c '^llama_' "$work/imported") of its functions imported by programs, $(wc -l <"$work/extra") others"
