#!/usr/bin/env bash
# The command line without a model: help, exit codes, what goes to stdout, names of models and
# files, and the environment that `wrap` hands to a program.
# usage: check_cli.sh BUILD_DIR
set -euo pipefail
build=$(cd "$1" && pwd)
. "$(dirname "$0")/../scripts/common.sh"
oscar=$build/oscar
[ -x "$oscar" ] || { echo "no oscar program in $build (built without llama.cpp)"; exit 77; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'check_cli: %s\n' "$*" >&2; exit 1; }
export OSCAR_CACHE=$work/cache
unset OSCAR_ROTATIONS OSCAR_SINK OSCAR_RECENT OSCAR_KV OSCAR_BITS_K OSCAR_BITS_V OSCAR_LLAMA_BIN

# expect CODE PATTERN COMMAND...: the exit code; on failure nothing on stdout and a line on stderr
# that matches, on success the pattern on stdout.
expect() {
    local code=$1 pattern=$2 status=0
    shift 2
    "$@" >"$work/out" 2>"$work/err" || status=$?
    [ "$status" = "$code" ] || fail "$*: exit code $status, expected $code: $(cat "$work/out" "$work/err")"
    if [ "$code" = 0 ]; then
        grep -q -e "$pattern" "$work/out" || fail "$*: no '$pattern' in: $(cat "$work/out")"
    else
        [ ! -s "$work/out" ] || fail "$*: failed but wrote to stdout: $(cat "$work/out")"
        grep -q -e "$pattern" "$work/err" || fail "$*: no '$pattern' in: $(cat "$work/err")"
        [ "$code" = 2 ] || [ "$(wc -l <"$work/err")" = 1 ] || fail "$*: more than a line: $(cat "$work/err")"
    fi
}

expect 0 'usage: oscar COMMAND' "$oscar" --help
expect 0 '^oscar [0-9]*\.[0-9]*\.[0-9]*$' "$oscar" --version
expect 2 'usage: oscar COMMAND' "$oscar"
expect 2 "unknown command 'fly'" "$oscar" fly
commands=$("$oscar" --help | sed -n 's/^  \([a-z]*\)  .*/\1/p')
[ "$(echo "$commands" | wc -l)" -ge 5 ] || fail "the help lists too few commands: $commands"
for command in $commands; do
    expect 0 "usage: oscar $command" "$oscar" "$command" --help
    grep -q '^examples:' "$work/out" || fail "$command --help has no examples"
    expect 0 "usage: oscar $command" "$oscar" help "$command"
    expect 2 '' "$oscar" "$command" --no-such-option
done
if "$oscar" --help >/dev/full 2>"$work/err"; then fail "a full disk went unnoticed"; fi
grep -q 'standard output' "$work/err" || fail "a full disk: $(cat "$work/err")"

# Options
expect 2 "expected a whole number, found '6x'" "$oscar" run m --sink 6x
expect 2 "expected a whole number, found '-1'" "$oscar" run m --sink -1
expect 2 'expected int2 or f32' "$oscar" run m --kv int3
expect 2 'expected 2, 3 or 4, found 5' "$oscar" run m --bits-k 5
expect 2 'needs a value' "$oscar" run m --sink
expect 2 'a number of bytes' "$oscar" run m --kv-memory 5T
expect 2 'expected MODEL' "$oscar" run --kv f32
expect 2 'expected -- and the PROGRAM' "$oscar" wrap --kv f32

# Models and rotations
expect 1 "neither a file nor a model" "$oscar" run nothing
expect 1 'oscar pull smollm2-135m' "$oscar" run smollm2-135m
expect 1 'cannot read .*No such file' "$oscar" run ./nothing.gguf
expect 1 'is a folder' "$oscar" inspect "$work"
expect 0 '"name": "smollm2-135m"' "$oscar" pull --list --json
python3 -c 'import json, sys; json.load(sys.stdin)' <"$work/out" || fail "pull --list --json is no JSON"
expect 1 "no model 'nothing'" "$oscar" pull nothing
: >"$work/empty.gguf"
expect 1 'oscar calibrate' "$oscar" run "$work/empty.gguf"
expect 1 'cannot read .*gone' "$oscar" run "$work/empty.gguf" --rotations "$work/gone"
expect 1 '0 bytes' "$oscar" inspect "$work/empty.gguf"
printf 'GGUF\3\0\0\0' >"$work/cut.gguf"
expect 1 'not a whole GGUF file' "$oscar" inspect "$work/cut.gguf"
printf '\377\0\0\0\0\0\0\0{}' >"$work/bad.safetensors"
expect 1 'bad.safetensors' "$oscar" inspect "$work/bad.safetensors"

# A program that tells what it was given.
mkdir -p "$work/bin" "$OSCAR_CACHE/models" "$OSCAR_CACHE/rotations"
cat >"$work/bin/tell" <<'SH'
#!/bin/sh
echo "arguments: $*"
env | grep '^OSCAR_\|^LD_PRELOAD'
SH
chmod +x "$work/bin/tell"
cp "$work/bin/tell" "$work/bin/llama-cli"
cp "$work/bin/tell" "$work/bin/llama-server"
export OSCAR_LLAMA_BIN=$work/bin
told() { grep -qxF -e "$1" "$work/out" || fail "expected '$1' in: $(cat "$work/out")"; }

model=$OSCAR_CACHE/models/smollm2-135m.gguf rotations=$OSCAR_CACHE/rotations/smollm2-135m.rot.safetensors
: >"$model"
: >"$rotations"
expect 0 . "$oscar" run smollm2-135m --sink 8 --recent=16 -p 'two words' --kv-memory 2M -- --sink 5
told "arguments: -m $model -fit off -p two words --sink 5"
told "OSCAR_KV=int2"
told "OSCAR_ROTATIONS=$rotations"
told "OSCAR_SINK=8"
told "OSCAR_RECENT=16"
told "OSCAR_KV_MEMORY=2097152"
told "LD_PRELOAD=$(sanitizer_runtime "$build")$build/liboscar-llama.so"
! grep -q OSCAR_LOOKAHEAD "$work/out" || fail "an option that was not given is in the environment"
: >"$OSCAR_CACHE/models/smollm2-135m.rot.safetensors"
expect 0 . "$oscar" serve smollm2-135m -fit on
told "arguments: -m $model -fit on"
told "OSCAR_ROTATIONS=$OSCAR_CACHE/models/smollm2-135m.rot.safetensors"
expect 0 . "$oscar" wrap --kv f32 --pass-through --bits-v 3 -- tell -m smollm2-135m --kv x
told "arguments: -m $model --kv x"
told "OSCAR_KV=f32"
told "OSCAR_BITS_V=3"
told "OSCAR_PASS_THROUGH=1"
! grep -q OSCAR_ROTATIONS "$work/out" || fail "rotations for an exact cache"
expect 1 'cannot run no-such-program' "$oscar" wrap --kv f32 -- no-such-program
echo "the command line does what it says"
