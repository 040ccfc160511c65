#!/usr/bin/env bash
# Speculative decoding on the 2-bit cache: drafts from n-gram lookup and from a draft model, checked and
# rolled back; the answers are those without drafts.
# usage: check_llama_drafts.sh BUILD_DIR [MODEL]
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
trap 'rm -rf "$work"' EXIT
serve_cases ngram draft
