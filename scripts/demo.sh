#!/usr/bin/env bash
# The demo behind `make demo`: demo.sh BUILD_DIR MODEL. Fetches and calibrates the model (kept in the
# cache folder, so a second run is short), answers a question about a text on the 2-bit cache, compares
# that cache with the exact one, and prints what it costs.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

build=$1
name=$2
oscar=$build/oscar
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

model=$("$oscar" pull "$name")
rotations=$(oscar_cache_dir)/rotations/$name.rot.safetensors
# A file of an older format is made again.
if ! "$oscar" inspect "$rotations" >/dev/null 2>&1; then
    say "calibrating $name once"
    mkdir -p "${rotations%/*}"
    # Any text will do; our own sources and two of our documents are at hand. What the comparison
    # below reads is not among them.
    cat "$here"/../docs/METHOD.md "$here"/../docs/FORMAT.md "$here"/../src/*/*.c >"$work/calibration"
    "$oscar" calibrate "$model" -o "$rotations" --text "$work/calibration" --tokens 16384 >&2
fi

# Long enough that most of it is read back from 2 bits: the first 64 and the last 256 tokens are
# kept in BF16 as well.
cat "$here/../README.md" "$here/../docs/ARCHITECTURE.md" >"$work/text"
{
    head -c 5000 "$here/../README.md"
    printf '\n\nIn one sentence: what does this program do?\n'
} >"$work/prompt"
say "the question, after a text of $(wc -w <"$work/prompt") words: in one sentence, what does this program do?"
"$oscar" wrap --rotations "$rotations" -- llama-completion -m "$model" -fit off -st -f "$work/prompt" \
    -c 4096 -n 60 --temp 0 --no-display-prompt --perf </dev/null >"$work/answer" 2>"$work/log" ||
    { tail -n 20 "$work/log" >&2; die "llama-completion failed"; }
printf '\n%s\n\n' "$(cat "$work/answer")"

say "comparing with the exact cache"
"$oscar" eval kl "$model" --rotations "$rotations" --text "$work/text" --context 1024 --chunks 1 \
    --skip 384 --methods int2 --json >"$work/kl.json"
"$oscar" inspect "$model" --json >"$work/model.json"
python3 "$here/demo_table.py" "$name" "$work/kl.json" "$work/model.json" "$work/log"
