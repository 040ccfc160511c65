#!/usr/bin/env bash
# llama-server, unmodified, on the 2-bit cache: slots are saved, erased, restored, also by the next
# server; known prompts of every length around a page are reused and answered the same; prompts that
# were moved out to the server's prompt cache in RAM come back; bad files are refused and leave it
# running; nothing of ours is on its standard output.
# usage: check_llama_slots.sh BUILD_DIR [MODEL]
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
command -v curl >/dev/null || { echo "no curl"; exit 77; }
server=
trap '[ -z "$server" ] || kill "$server" 2>/dev/null || true; wait 2>/dev/null || true; rm -rf "$work"' EXIT
fail() { printf 'check_llama_slots: %s\n' "$*" >&2; tail -n 15 "$work/log" >&2; exit 1; }
: >"$work/log"

need_rotations || fail "oscar calibrate failed"

port=$((20000 + $$ % 20000))
url=http://127.0.0.1:$port
mkdir "$work/slots"
start() {
    env OSCAR_KV=int2 OSCAR_ROTATIONS="$rotations" LD_PRELOAD="$preload" "$llama/bin/llama-server" -m "$model" -np 2 \
        -c 4096 -t 1 -fit off --slot-save-path "$work/slots/" --host 127.0.0.1 --port "$port" >>"$work/stdout" 2>"$work/log" &
    server=$!
    for _ in $(seq 300); do
        curl -sf "$url/health" >/dev/null && break
        kill -0 "$server" 2>/dev/null || fail "the server ended"
        sleep 0.5
    done
    curl -sf "$url/health" >/dev/null || fail "the server did not become ready"
    grep -q '^oscar: 2-bit KV cache on ' "$work/log" || fail "the cache was not held"
}
stop() {
    kill "$server"
    wait "$server" || true
    server=
}

# ask FILE SLOT PROMPT (a JSON string or array of tokens): greedy; slot -1: the server's choice
ask() {
    curl -s "$url/completion" -H 'Content-Type: application/json' -o "$1" -d \
        "{\"prompt\": $3, \"n_predict\": 12, \"temperature\": 0, \"id_slot\": $2, \"cache_prompt\": true, \"return_tokens\": true}"
    printf '%s' "$3" >"$1.prompt"
    grep -q '"content"' "$1" || fail "a request failed: $(cat "$1")"
}
get() { python3 -c 'import json, sys
value = json.load(open(sys.argv[1]))
for key in sys.argv[2].split("."): value = value[key]
print(value)' "$1" "$2"; }
same() { # FILE FILE WHAT: the same text, or another from a near tie on (serve_client.py says of what size)
    [ "$(get "$1" content)" = "$(get "$2" content)" ] && return
    python3 - "$source_dir/bench/serve" "$url" "$1" "$2" "$2.prompt" "$3" <<'END' || fail "$3: \"$(get "$1" content)\" and \"$(get "$2" content)\""
import json, sys
sys.path.insert(0, sys.argv[1])
sys.dont_write_bytecode = True
from serve_client import Failure, Server, same_tokens
server = Server.__new__(Server) # one that runs already
server.url = sys.argv[2]
expected, found, prompt = (json.load(open(path)) for path in sys.argv[3:6])
try: same_tokens(server, prompt, expected["tokens"], found["tokens"], sys.argv[6])
except Failure as failure: sys.exit(str(failure))
END
}
# slot SLOT ACTION [FILE]: HTTP status; the reply in $work/reply
slot() {
    curl -s -o "$work/reply" -w '%{http_code}' -X POST "$url/slots/$1?action=$2" -H 'Content-Type: application/json' \
        -d "{\"filename\": \"${3:-}\"}"
}

# Tokens of a long text: prompts of a known length.
curl() { command curl --max-time 120 "$@"; }
start
text=$(python3 -c 'import json, sys; print(json.dumps(open(sys.argv[1]).read()[2000:12000]))' "$source_dir/docs/METHOD.md")
curl -sf "$url/tokenize" -H 'Content-Type: application/json' -d "{\"content\": $text}" >"$work/tokens"
prompt() { python3 -c 'import json, sys; print(json.load(open(sys.argv[1]))["tokens"][int(sys.argv[2]):][:int(sys.argv[3])])' "$work/tokens" "$1" "$2"; }

# Known prompts (B01, B09): cold, then three times warm. All but the last token is reused.
for n in 1 63 64 65 128 512; do
    ask "$work/cold" 0 "$(prompt 0 100)" # something else, whose beginning is the same
    [ "$(slot 0 erase)" = 200 ] || fail "erase: $(cat "$work/reply")"
    ask "$work/cold" 0 "$(prompt 100 "$n")"
    for i in 1 2 3; do
        ask "$work/warm$i" 0 "$(prompt 100 "$n")"
        [ "$(get "$work/warm$i" timings.cache_n)" = $((n - 1)) ] ||
            fail "$n tokens again: $(get "$work/warm$i" timings.cache_n) reused, expected $((n - 1))"
        same "$work/cold" "$work/warm$i" "$n tokens, cold and warm $i"
    done
    [ "$n" != 1 ] || cp "$work/cold" "$work/one"
done

# A slot is saved, erased, restored (G07).
ask "$work/cold" 1 "$(prompt 0 1108)"
[ "$(slot 1 save a)" = 200 ] || fail "save: $(cat "$work/reply")"
[ "$(get "$work/reply" n_saved)" -ge 1108 ] || fail "saved: $(cat "$work/reply")"
[ "$(get "$work/reply" n_written)" = "$(stat -c %s "$work/slots/a")" ] || fail "n_written: $(cat "$work/reply")"
[ "$(slot 1 erase)" = 200 ] || fail "erase: $(cat "$work/reply")"
restored() { # SLOT: the saved prompt and one more token is known there, and the answer is the right one
    [ "$(slot "$1" restore a)" = 200 ] || fail "restore: $(cat "$work/reply")"
    [ "$(get "$work/reply" n_restored)" -ge 1108 ] || fail "restored: $(cat "$work/reply")"
    ask "$work/got" "$1" "$(prompt 0 1109)"
    [ "$(get "$work/got" timings.cache_n)" -ge 1107 ] || fail "after a restore $(get "$work/got" timings.cache_n) tokens are known"
    same "$work/longer" "$work/got" "after a restore"
}
ask "$work/longer" 1 "$(prompt 0 1109)" # nothing was saved for this one
[ "$(get "$work/longer" timings.cache_n)" = 0 ] || fail "an erased slot knows $(get "$work/longer" timings.cache_n) tokens"
restored 1
restored 0 # another slot

# Files that are cut or changed are refused; the server goes on.
head -c 20000 "$work/slots/a" >"$work/slots/cut"
python3 - "$work/slots" <<'END'
import sys
data = bytearray(open(sys.argv[1] + "/a", "rb").read())
data[len(data) // 2] ^= 1
open(sys.argv[1] + "/flipped", "wb").write(data)
END
for bad in cut flipped nowhere; do
    [ "$(slot 0 restore $bad)" = 400 ] || fail "restoring '$bad': $(cat "$work/reply")"
done
grep -q '^oscar: loading: .*wrong checksum' "$work/log" || fail "the reason was not said"
restored 0

# Six conversations on two slots: those not in a slot wait in the server's RAM (B14). Each comes back
# with its own text and what was known of it.
conversation() { prompt $((150 * $1)) 140; }
for i in 0 1 2 3 4 5; do ask "$work/talk$i" -1 "$(conversation "$i")"; done
n_known=0
for round in 1 2; do
    jobs=()
    for i in 3 0 5 1 4 2; do
        ask "$work/talk$i.$round" -1 "$(conversation "$i")" &
        jobs+=($!)
    done
    for job in "${jobs[@]}"; do wait "$job" || fail "a concurrent request failed"; done
    for i in 0 1 2 3 4 5; do
        same "$work/talk$i" "$work/talk$i.$round" "conversation $i, round $round"
        [ "$(get "$work/talk$i.$round" timings.cache_n)" -lt 100 ] || n_known=$((n_known + 1))
    done
done
[ "$n_known" -ge 8 ] || fail "only $n_known of 12 conversations were known"
curl -sf "$url/v1/completions" -H 'Content-Type: application/json' -o "$work/usage" \
    -d "{\"prompt\": $(conversation 2), \"max_tokens\": 4, \"temperature\": 0}"
[ "$(get "$work/usage" usage.prompt_tokens_details.cached_tokens)" = 139 ] || fail "usage: $(cat "$work/usage")"

# Answers alone and at the same time, with their log-probabilities.
python3 "$source_dir/bench/serve/compare_concurrent.py" "$url" --requests 2 --n-predict 16 --text "$source_dir/docs/METHOD.md" \
    --max-chars 1500 >"$work/reply" || fail "answers differ under load: $(cat "$work/reply")"

# The next server restores what this one saved, before it has computed anything for it.
stop
start
restored 1
stop
! grep -q oscar "$work/stdout" || fail "wrote to stdout: $(grep oscar "$work/stdout")"
echo "known prompts of 1 to 512 tokens, save, erase, restore, restart, $n_known of 12 conversations known"
