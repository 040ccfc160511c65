#!/usr/bin/env bash
# Fails when an #include breaks the arrows of docs/ARCHITECTURE.md: a layer sees itself and what lies
# below it, the core knows nothing of llama.cpp, the CLI and the benchmarks see no insides.
# usage: check_layers.sh BUILD_DIR
set -euo pipefail
source_dir=$(cd "$(dirname "$0")/.." && pwd)

# Folders whose headers a layer may include besides its own and include/oscar/.
declare -A below=(
    [base]=""
    [codec]="base"
    [zoo]="base codec"
    [attn]="base codec"
    [cache]="base codec zoo attn"
    [cuda]="base codec attn cache"
    [llama]="base codec zoo attn cache"
    [calib]="base codec zoo attn cache llama"
    [eval]="base codec zoo attn cache llama calib"
    [cli]="calib eval"
    [bench]="calib eval"
)
# Layers that may use llama.cpp, jansson and LAPACK; the others have libc, libm and threads.
with_engine=" llama calib eval cli bench "

# Prints each broken arrow of the tree at $1.
broken_arrows() {
    local root=$1 file layer line header folder
    while read -r file; do
        case "$file" in
        include/*) layer=include ;;
        bench/*) layer=bench ;;
        *) layer=$(echo "$file" | cut -d/ -f2) ;;
        esac
        while read -r line; do
            header=$(echo "$line" | sed 's/.*[<"]\(.*\)[>"].*/\1/')
            folder=${header%%/*}
            case "$header" in
            oscar/*) continue ;;
            llama.h | gguf.h | ggml*.h | jansson.h | lapacke.h | cblas.h)
                [[ $with_engine == *" $layer "* || $file == include/oscar/llama.h ]] ||
                    echo "$file: <$header>: the $layer layer uses libc, libm and threads only"
                continue ;;
            esac
            case "$line" in *'<'*) continue ;; esac # the system's
            if [ "$layer" != include ] && [ -z "${below[$layer]+known}" ]; then
                echo "$file: no rule for the folder '$layer' in tests/check_layers.sh"
            elif [ "$folder" = "$layer" ] || [ -e "$root/${file%/*}/$header" ]; then continue
            elif [ "$layer" != include ] && [[ " ${below[$layer]} " == *" $folder "* ]]; then continue
            else echo "$file: \"$header\": the $layer layer may not see it"
            fi
        done < <(grep -hE '^[[:space:]]*#[[:space:]]*include[[:space:]]*[<"]' "$root/$file" || true)
    done < <(cd "$root" && find include src bench -name '*.[ch]' -o -name '*.cu' -o -name '*.cuh' 2>/dev/null | sort)
}

# The check must see what it is for: a tree with one right and four wrong arrows.
trial=$(mktemp -d)
trap 'rm -rf "$trial"' EXIT
mkdir -p "$trial/include/oscar" "$trial/src/base" "$trial/src/codec" "$trial/src/cli" "$trial/bench"
echo '#include "base/base.h"' >"$trial/src/codec/right.c"
echo '#include "codec/codec.h"' >"$trial/src/base/up.c"
echo '# include <llama.h>' >"$trial/src/codec/engine.c"
echo '#include "codec/page.h"' >"$trial/src/cli/inside.c"
echo '#include "base/base.h"' >"$trial/include/oscar/leak.h"
found=$(broken_arrows "$trial")
if [ "$(printf '%s\n' "$found" | wc -l)" != 4 ]; then
    printf 'check_layers does not see what it should; it saw:\n%s\n' "$found" >&2
    exit 1
fi

broken=$(broken_arrows "$source_dir")
if [ -n "$broken" ]; then
    printf 'broken arrows (docs/ARCHITECTURE.md):\n%s\n' "$broken" >&2
    exit 1
fi
echo "every include follows the arrows"
