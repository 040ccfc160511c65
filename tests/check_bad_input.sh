#!/usr/bin/env bash
# What is wrong with a file or a size is said in one line that names it, with exit code 1 or 2, nothing
# on stdout and nothing half-written: rotation files of another model, another geometry, with NaN, cut
# and flipped; GGUF files cut, of an unknown architecture; a full disk; contexts beyond the memory.
# usage: check_bad_input.sh BUILD_DIR
set -euo pipefail
. "$(dirname "$0")/oscar_setup.sh"

cases=0
seconds=120 # that a command may take
! is_sanitized "$build" || seconds=1200
# refused PATTERN COMMAND...: fails with a line that matches, prints no result, writes no file.
refused() {
    local pattern=$1 status=0
    shift
    timeout "$seconds" "$@" >"$work/out" 2>"$work/err" </dev/null || status=$?
    [ "$status" = 1 ] || [ "$status" = 2 ] || fail "$*: exit code $status: $(tail -n 5 "$work/err")"
    # llama-cli itself writes "Loading model" to stdout before it has a context.
    [ "${2:-}" = run ] || [ ! -s "$work/out" ] || fail "$*: failed but wrote to stdout: $(head -c 300 "$work/out")"
    [ "$(grep -c -i -e "$pattern" "$work/err")" -ge 1 ] || fail "$*: no '$pattern' in: $(tail -n 8 "$work/err")"
    [ -z "$(find "$work/new" -type f)" ] || fail "$*: left $(ls "$work/new")"
    cases=$((cases + 1))
}
mkdir "$work/new"

cat "$source_dir"/docs/METHOD.md >"$work/text"
good=$work/good.safetensors
"$oscar" calibrate "$model" -o "$good" --text "$work/text" --tokens 512 --context 512 -t 1 2>"$work/err" ||
    fail "calibrate: $(cat "$work/err")"

python3 - "$good" "$model" "$work" <<'MAKE'
import json, struct, sys
good, model, work = sys.argv[1:]
data = open(good, "rb").read()
size, = struct.unpack("<Q", data[:8])
head, body = json.loads(data[8:8 + size]), data[8 + size:]

def write(name, change, body=body):
    edited = json.loads(json.dumps(head))
    change(edited)
    text = json.dumps(edited).encode()
    text += b" " * (-len(text) % 8)
    open(f"{work}/{name}", "wb").write(struct.pack("<Q", len(text)) + text + body)

def meta(**values):
    return lambda h: h["__metadata__"].update({k.replace("__", "."): v for k, v in values.items()})

write("other-model", meta(model_fingerprint="llama/Another/params=7/layers=30/embd=576/vocab=9"))
write("newer", meta(format_version="2"))
def heads(h):
    for i in range(30):
        h["__metadata__"][f"layers.{i}.n_q_heads"] = "6"
write("other-heads", heads)
def fewer(h):
    h["__metadata__"]["n_layers"] = "29"
write("fewer-layers", fewer)
at = head["layers.7.k_rotation"]["data_offsets"][0]
write("nan", lambda h: None, body[:at + 40] + struct.pack("<f", float("nan")) + body[at + 44:])
write("not-orthogonal", lambda h: None, body[:at + 40] + struct.pack("<f", 3.0) + body[at + 44:])
for n in (0, 4, 8, 100, 8 + size, 8 + size + 1000, len(data) - 1):
    open(f"{work}/cut-{n}", "wb").write(data[:n])
open(f"{work}/longer", "wb").write(data + b"\0")

gguf = open(model, "rb").read(4_000_000)
open(f"{work}/unknown.gguf", "wb").write(open(model, "rb").read().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lemma", 1))
for n in (3, 20, 1000, 4_000_000):
    open(f"{work}/cut-{n}.gguf", "wb").write(gguf[:n])
MAKE

run() { refused "$1" "$oscar" run "$model" --rotations "$work/$2" -p hello -n 2 -- -t 1; }
evaluate() { refused "$1" "$oscar" eval kl "$model" --rotations "$work/$2" --text "$work/text" --context 256 --chunks 1 --skip 64 --methods int2 -t 1; }
for command in run evaluate; do
    "$command" 'rotations are of llama.Another' other-model
    "$command" 'layers' fewer-layers
    "$command" 'format_version' newer
    "$command" 'nan\|finite' nan
    "$command" 'orthogonal' not-orthogonal
done
evaluate '6 query heads, 3 KV heads of 64 dims in the rotations; 9, 3, 64 in the model' other-heads
for file in "$work"/cut-*[0-9] "$work/longer"; do refused "${file##*/}" "$oscar" inspect "$file"; done
for file in "$work"/cut-*.gguf; do
    refused "${file##*/}" "$oscar" inspect "$file"
    refused "${file##*/}\|load" "$oscar" calibrate "$file" -o "$work/new/r" --text "$work/text"
done
refused 'lemma' "$oscar" calibrate "$work/unknown.gguf" -o "$work/new/r" --text "$work/text"
refused 'lemma' "$oscar" run "$work/unknown.gguf" --rotations "$good" -p hello

# A disk that fills up: files may grow to 512 KiB, the rotations are larger.
refused 'not written: File too large' bash -c 'trap "" XFSZ; ulimit -f 512; exec "$@"' - \
    "$oscar" calibrate "$model" -o "$work/new/r" --text "$work/text" --tokens 512 --context 512

# Contexts beyond the memory, on our cache: refused before anything is served.
refused 'this machine has' "$oscar" run "$model" --rotations "$good" -p hello -n 2 -- -t 1 -c 2000000000
refused 'this machine has' "$oscar" serve "$model" --rotations "$good" -- -t 1 -c 2000000000 --port 0
echo "check_bad_input: $cases mistakes refused"
