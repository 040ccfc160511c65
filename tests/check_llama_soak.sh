#!/usr/bin/env bash
# Two minutes of what `make soak` does for thirty: 16 clients who ask, leave, err, save and restore.
# usage: check_llama_soak.sh BUILD_DIR [MODEL]
# OSCAR_SOAK_SECONDS: another length.
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
trap 'rm -rf "$work"' EXIT
command -v python3 >/dev/null || { echo "no python3"; exit 77; }
need_rotations
cat "$source_dir"/docs/*.md "$source_dir"/README.md >"$work/text"
python3 "$source_dir/bench/serve/soak.py" "$build/oscar" "$model" --rotations "$rotations" --text "$work/text" \
    --seconds "${OSCAR_SOAK_SECONDS:-120}" ${sanitizer:+--sanitized} ${OSCAR_SOAK_JSON:+--json "$OSCAR_SOAK_JSON"}
