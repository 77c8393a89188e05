#!/usr/bin/env bash
# What docs/clients.md shows for curl, Python and JavaScript, run as it stands there, and what the answers must hold. Arguments:
# the python and the folder with the JavaScript SDK.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder" "$2"/page-*.mjs' EXIT
export NPUHAL_API_KEY=$NPUHAL_KEY
page=$(cd "$(dirname "$0")/../.." && pwd)/docs/clients.md
# Blocks of these kinds, in order, one file each, with this server's address and key.
awk '/^```(sh curl|python|js)$/ { on = 1; n += 1; kind = substr($0, 4, 2); next } /^```$/ { on = 0 }
     on { print > (folder "/" n "." kind) }' folder="$folder" "$page"
sed -i -e "s|http://127.0.0.1:8000|$NPUHAL_BASE|g" -e "s|any text, or the key|$NPUHAL_KEY|g" "$folder"/*
count=0
expect=(smollm2-135m Paris '\[DONE\]' Paris context_length_exceeded invalid_api_key Paris Paris Paris)
for wanted in "${expect[@]}"; do
    count=$((count + 1))
    block=$(echo "$folder/$count".*)
    case $block in
    *.sh) command=(bash "$block") ;;
    *.py) command=("$1" "$block") ;;
    *.js) cp "$block" "$2/page-$count.mjs" && command=(node "$2/page-$count.mjs") ;;
    esac
    said=$("${command[@]}" 2>&1) || { cat "$block"; echo "$said"; exit 1; }
    grep -q -- "$wanted" <<<"$said" || { cat "$block"; echo "wanted $wanted in: $said"; exit 1; }
done
[ "$count" -eq "$(find "$folder" -type f | wc -l)" ] || { echo "the page shows more than is expected here"; exit 1; }
echo "curl $(curl --version | awk 'NR == 1 { print $2 }'), python, node: the $count blocks of docs/clients.md"
