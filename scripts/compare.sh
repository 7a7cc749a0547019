#!/usr/bin/env bash
# Trains several methods in turn on one config, evaluates each on the test split of its data, and prints one table.
# A finished method is not run again, a broken run is resumed, and other settings in the same folder are refused.
# Where the config trains on a file of examples, DATA names the BEIR folder whose test split is scored.
# usage: bash scripts/compare.sh CONFIG OUTPUT "METHOD METHOD ..." [contaccum train options]
#   bash scripts/compare.sh configs/demo.yaml runs/demo "grad_accum grad_cache cont_accum" --seed 1
set -euo pipefail
[ $# -ge 3 ] || { sed -n '2,6p' "$0" >&2; exit 2; }
config=$1 output=$2 methods=$3
shift 3
. "$(dirname "$0")/environment.sh"

data=${DATA:-$(contaccum train --config "$config" "$@" --print_config | python -c 'import sys, yaml; print(yaml.safe_load(sys.stdin)["data"]["train"])')}
[ ! -f "$data" ] || { echo "compare.sh: $data is a file of examples, which has no test split; expected DATA=BEIR_FOLDER" >&2; exit 2; }
flags=$(data_flags --config "$config" "$@")
runs=()
for method in $methods; do
    run="$output/$method"
    runs+=("$run")
    echo "== $method" >&2
    contaccum train --config "$config" --method "$method" --output_dir "$run" --resume "$@" >&2
    if [ ! -e "$run/metrics.json" ]; then
        contaccum evaluate --model "$run/model" --data "$data" --output "$run/metrics.json" $flags >&2
    fi
done
if [ ! -e "$output/bm25/metrics.json" ]; then
    echo "== bm25" >&2
    contaccum evaluate --model bm25 --data "$data" --output "$output/bm25/metrics.json" $flags >&2
fi
contaccum report "${runs[@]}" "$output/bm25"
