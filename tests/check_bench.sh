#!/usr/bin/env bash
# No path has become slower against AVX2 than bench/attn_ratios.json allows: ratios within one run, so
# that the machine's speed and load count little; the least of three runs must be within 1.5 times.
set -euo pipefail
oscar=$1/oscar
[ -x "$oscar" ] || { echo "no oscar program in this build: skipped"; exit 77; }
. "$(dirname "$0")/../scripts/common.sh"
if is_sanitized "$1"; then
    echo "speeds of a sanitized build say nothing: skipped"
    exit 77
fi
grep -q avx2 /proc/cpuinfo || { echo "no AVX2 here: skipped"; exit 77; }
exec python3 - "$oscar" "$(dirname "$0")/../bench/attn_ratios.json" <<'PYTHON'
import json
import subprocess
import sys

LIMIT = 1.5


def ratios(oscar, case):
    out = subprocess.run([oscar, "bench"] + case.split() + ["--depth", "2048", "--seqs", "1", "--seconds", "0.1", "--json"],
                         check=True, text=True, stdout=subprocess.PIPE).stdout
    key = "ns_per_token_head" if case.startswith("attn") else "ns_per_token_and_token_head"
    ns = {r["isa"]: r[key] for r in json.loads(out)["results"]}
    errors = [r["error"] for r in json.loads(out)["results"]]
    assert max(errors) < 1e-3, errors
    return {isa: t / ns["avx2"] for isa, t in ns.items()}


def main(oscar, baseline):
    with open(baseline) as f:
        cases = {k: v for k, v in json.load(f).items() if k != "about"}
    slow = []
    for case, wanted in cases.items():
        runs = [ratios(oscar, case) for _ in range(3)]
        for isa, want in wanted.items():
            if isa not in runs[0]:
                print("%s, %s: not on this machine" % (case, isa))
                continue
            got = min(r[isa] for r in runs)
            print("%s, %s: %.3f of avx2, baseline %.3f" % (case, isa, got, want))
            if not 0 < got <= LIMIT * want:
                slow.append("%s, %s" % (case, isa))
    if slow:
        sys.exit("slower than the baseline allows: " + "; ".join(slow))


main(*sys.argv[1:])
PYTHON
