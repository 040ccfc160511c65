#!/usr/bin/env bash
# Runs the tests of one build folder: check.sh FOLDER [ctest options]. The last line is
# "N passed, N failed, N skipped"; the exit status is 0 only when none failed.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

build=$(cd "$1" && pwd) # ctest takes relative paths from its own folder
shift

# Tests of the layer need a model. A machine without a network still runs the others; in CI a
# skipped half of the tests must not look like a pass.
if [ -x "$build/oscar" ]; then
    if model=$("$build/oscar" pull smollm2-135m); then
        export OSCAR_TEST_MODEL=$model
    elif [ -n "${CI:-}" ]; then
        die "could not fetch the model that the tests need"
    else
        say "no model: tests that need one are skipped"
    fi
fi

# The cache's tests on every instruction set take long under a sanitizer.
timeout=600
is_sanitized "$build" && timeout=3600

results=$build/results.xml
rm -f "$results"
status=0
ctest --test-dir "$build" --output-on-failure --no-tests=error --timeout "$timeout" \
    --output-junit "$results" "$@" || status=$?
[ -s "$results" ] || die "ctest wrote no results"

count() { sed -n "/<testsuite /,/>/s/.*[[:space:]]$1=\"\([0-9]*\)\".*/\1/p" "$results" | head -n 1; }
tests=$(count tests) failed=$(count failures) skipped=$(count skipped) disabled=$(count disabled)
skipped=$((skipped + disabled))
printf '%d passed, %d failed, %d skipped\n' $((tests - failed - skipped)) "$failed" "$skipped"
exit "$status"
