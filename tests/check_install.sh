#!/usr/bin/env bash
# Installs to a fresh prefix, builds examples/embed.c against it as a stranger would, runs it, and
# runs the installed program from there.
# usage: check_install.sh BUILD_DIR
set -euo pipefail
build=$(cd "$1" && pwd)
source_dir=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail() { printf 'check_install: %s\n' "$*" >&2; exit 1; }

prefix=$work/prefix
cmake --install "$build" --prefix "$prefix" >"$work/log" 2>&1 || fail "install failed: $(tail -n 5 "$work/log")"
pc=$(find "$prefix" -name oscar.pc)
[ -n "$pc" ] || fail "no oscar.pc was installed"
export PKG_CONFIG_PATH=${pc%/*}

# The prefix may be moved afterwards.
mv "$prefix" "$work/moved"
prefix=$work/moved
PKG_CONFIG_PATH=$(dirname "$(find "$prefix" -name oscar.pc)")
flags=$(pkg-config --cflags --libs oscar)
libdir=$(pkg-config --variable=libdir oscar)
sanitizers=
if ldd "$libdir/liboscar.so" | grep -q libasan; then sanitizers=-fsanitize=address,undefined; fi
if ldd "$libdir/liboscar.so" | grep -q libtsan; then sanitizers=-fsanitize=thread; fi
# shellcheck disable=SC2086
cc -std=c11 -Wall -Wextra -Werror $sanitizers "$source_dir/examples/embed.c" $flags -o "$work/embed" ||
    fail "examples/embed.c does not build with: $flags"
output=$(LD_LIBRARY_PATH=$libdir "$work/embed") || fail "embed failed"
echo "$output"
case "$output" in
"lengths 301 and 300, "*" 2.50 bits an element") ;;
*) fail "unexpected output of embed: $output" ;;
esac
case "$output" in
*" 0 shared"*) fail "the fork shares no page" ;;
esac

# Of the system's libraries it needs libc and libm alone.
needed=$(objdump -p "$libdir/liboscar.so" | sed -n 's/.*NEEDED *//p' | grep -vE '^(libc|libm|libpthread|ld-linux.*|lib[a-z]*san)\.so' || true)
[ -z "$needed" ] || fail "liboscar.so needs more than libc and libm: $needed"

if [ -x "$prefix/bin/oscar" ]; then
    OSCAR_CACHE=$work/cache "$prefix/bin/oscar" pull --list | grep -q smollm2-135m || fail "the installed program does not run"
    # Everything that a program at this prefix looks for beside itself.
    [ -e "$libdir/liboscar-llama.so" ] || fail "no liboscar-llama.so in $libdir"
    [ -e "$prefix/share/oscar/pull_model.py" ] || fail "no pull_model.py"
fi
echo "installs, builds the example, runs"
