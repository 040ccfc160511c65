#!/usr/bin/env bash
# Makes a libllama.so for programs that open libllama with dlopen(), such as Python's ctypes. They look
# functions up in the opened library and what it needs, in order, and never in a preloaded one; this
# libllama.so is empty and needs liboscar-llama.so first and the true libllama after it.
# usage: front-library.sh FOLDER LIBOSCAR_LLAMA_SO LLAMA_LIB_FOLDER
#   FOLDER then holds libllama.so, and links to the other libraries of LLAMA_LIB_FOLDER.
set -euo pipefail
[ $# = 3 ] || { sed -n 's/^# \(usage.*\)/\1/p' "$0" >&2; exit 2; }
mkdir -p "$1"
folder=$(cd "$1" && pwd)
ours=$(realpath "$2")
theirs=$(cd "$3" && pwd)
[ -f "$ours" ] || { echo "front-library.sh: no file $ours" >&2; exit 1; }
[ -e "$theirs/libllama.so" ] || { echo "front-library.sh: no libllama.so in $theirs" >&2; exit 1; }
[ "$folder" != "$theirs" ] || { echo "front-library.sh: FOLDER is the folder of the true libllama" >&2; exit 1; }
for library in "$theirs"/lib*.so*; do
    [ "${library##*/}" = libllama.so ] || ln -sf "$library" "$folder/"
done
# No soname: the true library's would make the two one. Renamed when it is whole: others may be using it.
"${CC:-cc}" -shared -o "$folder/libllama.so.$$" -Wl,--no-as-needed "$ours" "$theirs/libllama.so" \
    -Wl,-rpath,"$(dirname "$ours"):$theirs"
mv -f "$folder/libllama.so.$$" "$folder/libllama.so"
echo "$folder/libllama.so: export LLAMA_CPP_LIB_PATH=$folder"
