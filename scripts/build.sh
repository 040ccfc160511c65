#!/usr/bin/env bash
# Configures and builds one build folder: build.sh FOLDER [cmake options].
# llama.cpp comes from scripts/build-llama.sh unless OSCAR_CORE_ONLY is set.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

build=$1
shift
llama=
[ -n "${OSCAR_CORE_ONLY:-}" ] || llama=$("$here/build-llama.sh")

log=$build/configure.log
mkdir -p "$build"
cmake -S "$here/.." -B "$build" -G Ninja "-DOSCAR_LLAMA_DIR=$llama" "$@" >"$log" 2>&1 ||
    { tail -n 30 "$log" >&2; die "cmake failed, see $log"; }
NINJA_STATUS='[%f/%t] ' ninja -C "$build" >&2 || die "the build failed"
