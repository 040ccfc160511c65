#!/usr/bin/env bash
# Installs the Debian packages that building and testing need; does nothing when all are there.
# With --check it installs nothing: it names what is missing and fails.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/common.sh"

packages=(
    gcc g++ make cmake ninja-build pkg-config # the build
    libjansson-dev libopenblas-dev liblapacke-dev libxxhash-dev
    libcmocka-dev                             # the tests
    python3 python3-pip                       # fetches models and the source of llama.cpp
)
# Clang 19 builds llama.cpp, see scripts/build-llama.sh.
[ -n "${OSCAR_LLAMA_DIR:-}" ] || packages+=(clang-19)

# tests/check_neon.sh is skipped without these, 56 MB to fetch and 267 MB on disk.
[ -z "${CI:-}${CROSS:-}" ] || packages+=(gcc-aarch64-linux-gnu libc6-dev-arm64-cross qemu-user)

# Elsewhere than on Debian the names differ: look for what the packages would bring.
check_programs() {
    local missing=() name
    for name in cc c++ cmake ninja pkg-config python3 ${OSCAR_LLAMA_DIR:-${OSCAR_LLAMA_CC:-clang-19}}; do
        [ -d "$name" ] || command -v "$name" >/dev/null || missing+=("$name")
    done
    command -v pkg-config >/dev/null && for name in jansson cmocka; do
        pkg-config --exists "$name" || missing+=("$name")
    done
    python3 -m pip --version >/dev/null 2>&1 || missing+=("pip")
    [ ${#missing[@]} = 0 ] && return
    die "missing: ${missing[*]} (on Debian 12 \`make deps\` installs them)"
}

if ! command -v dpkg-query >/dev/null || ! command -v apt-get >/dev/null; then
    check_programs
    exit 0
fi

missing=()
for package in "${packages[@]}"; do
    # The virtual and real names of a package are both answered; only "installed" counts.
    state=$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null || true)
    [ "$state" = installed ] || missing+=("$package")
done
[ ${#missing[@]} = 0 ] && exit 0

if [ "${1:-}" = --check ]; then
    die "missing packages: ${missing[*]} (\`make deps\` installs them)"
fi
say "installing ${missing[*]}"
quiet=(-qq)
[ -n "${CI:-}" ] && quiet=(-q)
as_root env DEBIAN_FRONTEND=noninteractive apt-get "${quiet[@]}" update >&2
as_root env DEBIAN_FRONTEND=noninteractive apt-get "${quiet[@]}" install -y --no-install-recommends \
    -o Dpkg::Use-Pty=0 "${missing[@]}" >&2 ||
    die "apt-get could not install ${missing[*]}"
