#!/usr/bin/env bash
# oscar calibrate and oscar eval on a real model: refusals that leave nothing behind, the same bytes
# twice, exact against exact is 0, and the 2-bit cache close to it.
# usage: check_eval.sh BUILD_DIR
set -euo pipefail
. "$(dirname "$0")/oscar_setup.sh"

# refused PATTERN COMMAND...: fails with a line that matches, prints no result, writes no file.
refused() {
    local pattern=$1 status=0
    shift
    "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = 1 ] || [ "$status" = 2 ] || fail "$*: exit code $status: $(cat "$work/err")"
    [ ! -s "$work/out" ] || fail "$*: failed but wrote to stdout"
    grep -q -e "$pattern" "$work/err" || fail "$*: no '$pattern' in: $(cat "$work/err")"
    [ -z "$(ls "$work" | grep refused || true)" ] || fail "$*: left $(ls "$work")"
}

cat "$source_dir"/docs/METHOD.md "$source_dir"/docs/ARCHITECTURE.md >"$work/text"
to=$work/refused.safetensors
: >"$work/empty"
printf 'abc\xff\xfedef' >"$work/binary"
head -c 300 "$work/text" >"$work/short"
head -c 2000000 "$model" >"$work/cut.gguf"
refused 'cannot read .*nowhere' "$oscar" calibrate "$model" -o "$to" --text "$work/nowhere"
refused 'is empty' "$oscar" calibrate "$model" -o "$to" --text "$work/empty"
refused 'not UTF-8 text: bad byte at offset 3' "$oscar" calibrate "$model" -o "$to" --text "$work/binary"
refused 'too few to calibrate on' "$oscar" calibrate "$model" -o "$to" --text "$work/short"
refused 'expected at least 256' "$oscar" calibrate "$model" -o "$to" --text "$work/text" --tokens 12
refused 'cannot load' "$oscar" calibrate "$work/cut.gguf" -o "$to" --text "$work/text"
refused 'cannot load' "$oscar" calibrate "$work/text" -o "$to" --text "$work/text"
refused 'cannot write' "$oscar" calibrate "$model" -o "$work/no/folder" --text "$work/text"
refused "unknown method 'int9'" "$oscar" eval kl "$model" --text "$work/text" --methods int2,int9
refused 'has .* tokens, expected at least' "$oscar" eval kl "$model" --text "$work/short" --methods exact

# A llama.cpp without a GPU backend would leave the layers on the CPU and say nothing.
libraries=$(sed -n 's/^LLAMA_LIB:FILEPATH=//p' "$build/CMakeCache.txt")
if ! ls "${libraries%/*}" | grep -qE 'libggml-(cuda|hip|musa|vulkan|sycl|rpc|metal|opencl|cann|webgpu)'; then
    refused '99 layers for a GPU' "$oscar" eval kl "$model" --text "$work/text" --methods exact --weights as-is --n-gpu-layers 99
    refused '99 layers for a GPU' "$oscar" calibrate "$model" -o "$to" --text "$work/text" --n-gpu-layers 99
fi
refused 'n-gpu-layers is 9999999, expected at most' "$oscar" calibrate "$model" -o "$to" --text "$work/text" --n-gpu-layers 9999999

head -c 4000 "$work/text" >"$work/some"
export SOURCE_DATE_EPOCH=1700000000
for copy in 1 2; do
    "$oscar" calibrate "$model" -o "$work/$copy.safetensors" --text "$work/some" --tokens 512 --context 512 2>"$work/err" ||
        fail "calibrate: $(cat "$work/err")"
    grep -q 'tokens are few' "$work/err" || fail "no warning about few tokens: $(cat "$work/err")"
done
cmp "$work/1.safetensors" "$work/2.safetensors" || fail "two calibrations on the same text differ"
refused 'format\|header\|safetensors' "$oscar" eval kl "$model" --rotations "$work/some" --text "$work/text"

"$oscar" eval kl "$model" --rotations "$work/1.safetensors" --text "$work/text" --context 400 --chunks 1 --skip 100 \
    --sink 8 --recent 32 --methods exact,int2,int2:4 --json >"$work/json" 2>"$work/err" || fail "eval: $(cat "$work/err")"
python3 - "$work/json" <<'CHECK' || fail "the numbers are wrong: $(cat "$work/json")"
import json, sys
result = json.load(open(sys.argv[1]))
exact, two, four = result["methods"]
assert exact["name"] == "exact" and exact["kl"] == 0 and exact["kl_p99"] == 0 and exact["top1"] == 1
assert exact["ppl"] == result["baseline"]["ppl"] and result["scored"] == 299
assert 0 < four["kl"] < two["kl"] < 0.5, (four["kl"], two["kl"])
assert two["bits"] == 2.5 and four["bits"] == 4.5 and two["bits_windows"] > two["bits"]
CHECK

# Perplexities alone are those that KL comes with.
"$oscar" eval ppl "$model" --rotations "$work/1.safetensors" --text "$work/text" --context 400 --chunks 1 --skip 100 \
    --sink 8 --recent 32 --methods exact,int2 --json >"$work/ppl" 2>"$work/err" || fail "eval ppl: $(cat "$work/err")"

# A budget buys bits for the layers that lose most: no more than were asked for, and a lower KL.
"$oscar" calibrate "$model" -o "$work/budget.safetensors" --text "$work/some" --tokens 512 --context 512 --bits-budget 2.3 \
    2>"$work/err" || fail "calibrate --bits-budget: $(cat "$work/err")"
"$oscar" eval kl "$model" --rotations "$work/budget.safetensors" --text "$work/text" --context 400 --chunks 1 --skip 100 \
    --sink 8 --recent 32 --methods int2 --json >"$work/budget" 2>"$work/err" || fail "eval: $(cat "$work/err")"
python3 - "$work/json" "$work/ppl" "$work/budget" <<'CHECK' || fail "ppl $(cat "$work/ppl"), budget $(cat "$work/budget")"
import json, sys
kl, ppl, budget = (json.load(open(path)) for path in sys.argv[1:])
assert [m["ppl"] for m in ppl["methods"]] == [m["ppl"] for m in kl["methods"][:2]]
assert "kl" not in ppl["methods"][1]
two, mixed = kl["methods"][1], budget["methods"][0]
assert 2.5 < mixed["bits"] <= 2.8 and mixed["kl"] < two["kl"], (mixed, two)
CHECK
echo "check_eval: ok"
