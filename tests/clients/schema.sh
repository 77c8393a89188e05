#!/usr/bin/env bash
# schemathesis over the OpenAPI document: no 5xx, no answer that the document does not describe, no wrong type that is accepted.
# Bounded and repeatable.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
# Left out: positive_data_acceptance, since rules between fields are not in the document's schemas (max_tokens beside
# max_completion_tokens, stream_options without stream, a content of null by role). One worker: Python 3.11 cannot parse source on
# two threads at once, which the tool does.
"$1" --no-color run "$NPUHAL_BASE/openapi.json" --url "$NPUHAL_BASE" --header "Authorization: Bearer $NPUHAL_KEY" \
    --phases examples,coverage,fuzzing --exclude-checks positive_data_acceptance --max-examples 20 --seed 20250101 --workers 1 \
    --request-timeout 60 --continue-on-failure --generation-database none >report.txt 2>&1 || { tail -c 20000 report.txt; exit 1; }
grep -Eq '([0-9]+) generated, \1 passed' report.txt || { tail -c 20000 report.txt; exit 1; }
echo "$("$1" --version): $(grep -Eo '[0-9]+ generated.*' report.txt | tail -n 1)"
