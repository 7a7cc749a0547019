#!/usr/bin/env bash
# Trains several methods in turn on one config, evaluates each on the test split of its data, and prints one table.
# A method whose metrics stand already is not run again; a broken run is resumed.
# usage: bash scripts/compare.sh CONFIG OUTPUT "METHOD METHOD ..." [contaccum train options]
#   bash scripts/compare.sh configs/demo.yaml runs/demo "grad_accum grad_cache cont_accum" --seed 1
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,5p' "$0" >&2; exit 2; }
config=$(realpath "$1") output=$(realpath -m "$2") methods=$3
shift 3
. "$(dirname "$0")/environment.sh"

data=$(contaccum train --config "$config" "$@" --print_config | python -c 'import sys, yaml; print(yaml.safe_load(sys.stdin)["data"]["train"])')
runs=()
for method in $methods; do
    run="$output/$method"
    runs+=("$run")
    if [ ! -e "$run/metrics.json" ]; then
        echo "== $method" >&2
        contaccum train --config "$config" --method "$method" --output_dir "$run" --resume "$@" >&2
        contaccum evaluate --model "$run/model" --data "$data" --output "$run/metrics.json" >&2
    fi
done
if [ ! -e "$output/bm25/metrics.json" ]; then
    echo "== bm25" >&2
    contaccum evaluate --model bm25 --data "$data" --output "$output/bm25/metrics.json" >&2
fi
contaccum report "${runs[@]}" "$output/bm25"
