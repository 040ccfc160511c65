# Shared by the set-up scripts: where slow things are kept, and how progress is told.
# Sourced, not run.

oscar_cache_dir() {
    printf '%s\n' "${OSCAR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/oscar}"
}

say() { printf '%s\n' "oscar: $*" >&2; }

die() { printf '%s\n' "oscar: error: $*" >&2; exit 1; }

# Runs a command as root where that is possible, and says so where it is not.
as_root() {
    if [ "$(id -u)" = 0 ]; then "$@"
    elif command -v sudo >/dev/null 2>&1; then sudo "$@"
    else die "need root to run: $*"
    fi
}

# Whether a build folder is one with sanitizers.
is_sanitized() { grep -qE '^OSCAR_(SANITIZE|TSAN):BOOL=(ON|TRUE|1)' "$1/CMakeCache.txt"; }

# What a preload of a build folder's library begins with: AddressSanitizer's runtime and a colon, or nothing.
sanitizer_runtime() { sed -n 's/^OSCAR_SANITIZER_RUNTIME:INTERNAL=//p' "$1/CMakeCache.txt"; }
