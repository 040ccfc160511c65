#!/usr/bin/env bash
# llama-completion, llama-cli and llama-bench, unmodified, on the exact cache; options that are wrong are
# refused by name.
# usage: check_llama_programs.sh BUILD_DIR [MODEL]
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
trap 'rm -rf "$work"' EXIT
fail() { printf 'check_llama_programs: %s\n' "$*" >&2; tail -n 5 "$work/err" >&2; exit 1; }
unset OSCAR_ROTATIONS OSCAR_SINK OSCAR_RECENT OSCAR_LOOKAHEAD OSCAR_BITS_K OSCAR_BITS_V OSCAR_KV_MEMORY OSCAR_PASS_THROUGH

# held [VARIABLE=VALUE...] PROGRAM ARGS: on the cache; nothing of ours on stdout.
held() {
    env OSCAR_KV=f32 LD_PRELOAD="$preload" "$@" </dev/null >"$work/out" 2>"$work/err" || return 1
    ! grep -q 'oscar:' "$work/out" || fail "wrote to stdout: $*"
}
complete=("$llama/bin/llama-completion" -m "$model" -no-cnv -fit off -t 2 --temp 0 -c 512 -n 8 -p "The sky is")

held "${complete[@]}" || fail "llama-completion failed"
grep -q '^oscar: exact f32 KV cache on ' "$work/err" || fail "llama-completion: the cache was not held"
[ "$(wc -c <"$work/out")" -gt 20 ] || fail "llama-completion wrote nothing"
held "$llama/bin/llama-cli" -m "$model" -fit off -t 2 -c 512 -n 8 --temp 0 -st -p "Say hello." || fail "llama-cli failed"
grep -q '^oscar: exact f32 KV cache on ' "$work/err" || fail "llama-cli: the cache was not held"
held "$llama/bin/llama-bench" -m "$model" -p 32 -n 4 -d 16 -r 2 -t 2 -o csv || fail "llama-bench failed"
[ "$(wc -l <"$work/out")" = 3 ] || fail "llama-bench: expected a header and two rows"

# A session: the second run reads the first one's state and says the same; a changed file is refused.
session=("${complete[@]}" --prompt-cache "$work/session")
held "${session[@]}" || fail "llama-completion --prompt-cache failed"
cp "$work/out" "$work/first"
held "${session[@]}" || fail "llama-completion with a session failed"
grep -q 'session file has exact match for prompt' "$work/err" || fail "the session was not used"
cmp -s "$work/first" "$work/out" || fail "another text from the session: $(cat "$work/first" "$work/out")"
truncate -s -1 "$work/session"
if held "${session[@]}"; then fail "a cut session was accepted"; fi
grep -q '^oscar: loading: .*wrong checksum' "$work/err" || fail "a cut session: the reason was not said"

# refused VARIABLE=VALUE PATTERN
refused() {
    if held "$1" "${complete[@]}"; then fail "$1 was accepted"; fi
    grep -q "^oscar: .*$2" "$work/err" || fail "$1: no '$2' in the message"
}
refused OSCAR_KV=int3 'OSCAR_KV is "int3": expected int2 or f32'
refused OSCAR_SINK=many 'OSCAR_SINK is "many"'
refused OSCAR_KV_MEMORY=1Q 'OSCAR_KV_MEMORY is "1Q"'
refused OSCAR_KV=int2 'no rotations'
refused "OSCAR_KV_MEMORY=4K" 'kv_memory_bytes is 4096'
echo "three programs held, a session went on, five mistakes refused"
