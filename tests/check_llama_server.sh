#!/usr/bin/env bash
# llama-server, unmodified, on the exact cache: it starts, answers four requests at once as it
# answers them one by one, goes on from a prompt it knows, and nothing it does is refused.
# usage: check_llama_server.sh BUILD_DIR [MODEL]
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
command -v curl >/dev/null || { echo "no curl"; exit 77; }
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
fail() { printf 'check_llama_server: %s\n' "$*" >&2; tail -n 15 "$work/log" >&2; exit 1; }

port=$((20000 + $$ % 20000))
env OSCAR_KV=f32 LD_PRELOAD="$preload" "$llama/bin/llama-server" -m "$model" -np 4 -c 4096 -t 2 -fit off \
    --cache-ram 0 --host 127.0.0.1 --port "$port" >"$work/out" 2>"$work/log" &
server=$!
for _ in $(seq 300); do
    curl -sf "http://127.0.0.1:$port/health" >/dev/null && break
    kill -0 "$server" 2>/dev/null || fail "the server ended"
    sleep 0.5
done
curl -sf "http://127.0.0.1:$port/health" >/dev/null || fail "the server did not become ready"
grep -q '^oscar: exact f32 KV cache on ' "$work/log" || fail "the cache was not held"

# ask SLOT FILE PROMPT: greedy text
ask() {
    curl -sf "http://127.0.0.1:$port/completion" -H 'Content-Type: application/json' -d \
        "{\"prompt\": \"$3\", \"n_predict\": 16, \"temperature\": 0, \"id_slot\": $1, \"cache_prompt\": true}" >"$2" ||
        fail "request failed: $3"
}
text() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["content"])' "$1"; }
field() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["timings"][sys.argv[2]])' "$1" "$2"; }

prompts=("The capital of France is" "Water boils at a temperature of" "Once upon a time there was a"
    "The largest planet of the solar system is")
for i in 0 1 2 3; do ask "$i" "$work/one$i" "${prompts[i]}"; done
# All at once, each in another slot than before, so that nothing is left of the first time.
jobs=()
for i in 0 1 2 3; do
    ask "$(((i + 1) % 4))" "$work/all$i" "${prompts[i]}" &
    jobs+=($!)
done
for job in "${jobs[@]}"; do wait "$job" || fail "a concurrent request failed"; done
for i in 0 1 2 3; do
    [ -n "$(text "$work/one$i")" ] || fail "an empty answer to: ${prompts[i]}"
    [ "$(text "$work/one$i")" = "$(text "$work/all$i")" ] ||
        fail "${prompts[i]}: alone \"$(text "$work/one$i")\", with others \"$(text "$work/all$i")\""
done

# The same prompt and its answer, and more: only the new tokens are computed.
known="${prompts[0]}$(text "$work/all0" | tr -d '\n"\\')"
ask 1 "$work/more" "$known And then"
ask 1 "$work/again" "$known And then"
[ "$(text "$work/more")" = "$(text "$work/again")" ] || fail "another answer to the same prompt"
[ "$(field "$work/again" prompt_n)" -le 2 ] || fail "a known prompt was computed again: $(field "$work/again" prompt_n) tokens"
! grep -E '^oscar: ' "$work/log" | grep -v 'KV cache o[fn]' >"$work/said" || fail "said: $(cat "$work/said")"
! grep -q oscar "$work/out" || fail "wrote to stdout"
echo "four answers alone and together are equal; a known prompt took $(field "$work/again" prompt_n) token(s)"
