#!/usr/bin/env bash
# A cache of less memory than the context asks for: slots have their share, or share and run out.
# usage: check_llama_exhausted.sh BUILD_DIR [MODEL]
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
trap 'rm -rf "$work"' EXIT
serve_cases exhausted
