#!/usr/bin/env bash
# oscar serve on the 2-bit cache, as clients use and misuse it: several answers of a prompt, cancels, bad
# requests, a full context, 64 slots, pages shared, conversations, what clients of the OpenAI API rely on,
# sleep, restart; sizes that do not fit are refused before it listens.
# usage: check_llama_serve.sh BUILD_DIR [MODEL]
set -euo pipefail
. "$(dirname "$0")/llama_setup.sh"
trap 'rm -rf "$work"' EXIT
serve_cases requests many shared turns api sleep refused
