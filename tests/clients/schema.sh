#!/usr/bin/env bash
# schemathesis over the OpenAPI document: no 5xx, no answer that the document does not describe. Bounded and repeatable.
set -euo pipefail
cd "$(mktemp -d)"
trap 'rm -rf "$PWD"' EXIT
"$1" --no-color run "$NPUHAL_BASE/openapi.json" --url "$NPUHAL_BASE" --header "Authorization: Bearer $NPUHAL_KEY" \
    --phases examples,coverage,fuzzing --max-examples 20 --seed 20250101 --workers 2 --request-timeout 60 --continue-on-failure \
    --generation-database none >report.txt 2>&1 || { cat report.txt; exit 1; }
grep -q 'No issues found' report.txt || { cat report.txt; exit 1; }
echo "$("$1" --version): $(grep -Eo '[0-9]+ generated.*' report.txt | tail -n 1)"
