#!/usr/bin/env bash
# The commands of docs/clients.md, and what the answers must hold.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export NPUHAL_API_KEY=$NPUHAL_KEY
page=$(dirname "$0")/../../docs/clients.md
# Every block of the page that is marked as one for curl, in order, with this server's address.
awk '/^```sh curl$/ { on = 1; n += 1; next } /^```$/ { on = 0 } on { print > (folder "/" n ".sh") }' folder="$folder" "$page"
count=0
expect=(smollm2-135m Paris '\[DONE\]' Paris context_length_exceeded invalid_api_key)
for wanted in "${expect[@]}"; do
    count=$((count + 1))
    sed -i "s|http://127.0.0.1:8000|$NPUHAL_BASE|g" "$folder/$count.sh"
    said=$(bash "$folder/$count.sh" 2>&1) || { cat "$folder/$count.sh"; echo "$said"; exit 1; }
    grep -q -- "$wanted" <<<"$said" || { cat "$folder/$count.sh"; echo "wanted $wanted in: $said"; exit 1; }
done
[ "$count" -eq "$(find "$folder" -name '*.sh' | wc -l)" ] || { echo "the page has other commands than are expected"; exit 1; }
echo "curl $(curl --version | awk 'NR == 1 { print $2 }'): the $count commands of docs/clients.md"
